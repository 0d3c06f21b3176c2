"""prior_precision="auto": the prior precision that maximizes the ELBO, followed while training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.checks import invalid, is_number
from vprop.parallel.sharding import sums
from vprop.structures.members import Marginal

if TYPE_CHECKING:
    from vprop.optim.optimizer import VariationalOptimizer

BOUNDS = (1e-8, 1e8)
"""λ stays in here. Where the data say nothing of a group the best λ is infinite."""


@dataclass(frozen=True)
class AutoPrior:
    r"""A prior precision λ that is chosen by the ELBO while training: ``prior_precision=AutoPrior(...)``.

    For a given posterior the ELBO depends on λ through KL(q ‖ N(m₀, I/λ)) only, which is smallest at

        λ* = D / (‖μ−m₀‖² + Σσ²)        over the D weights of a group

    Every ``every`` steps, after the first ``warmup``, log λ ← ``damping``·log λ + (1−``damping``)·log λ*, and never out
    of [1e-8, 1e8]. The current value stands in ``param_groups[i]["prior_precision"]``. ``prior_precision="auto"`` is
    ``AutoPrior()``.

    Args:
        shared: one λ for all groups that ask for it, and not one for each. The choice of groups is the choice of
            which weights share a scale: a group per layer is a useful one.
        damping: share of the old value, on a logarithmic scale.
        every: steps between two changes; a change waits for the device.
        warmup: steps before the first change, in which the posterior forgets how it was initialised.
        start: λ until then.
    """

    shared: bool = False
    damping: float = 0.8
    every: int = 5
    warmup: int = 20
    start: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.shared, bool):
            raise invalid("shared", self.shared, "True or False", "True is one prior precision for all groups.")
        if not is_number(self.damping) or not 0 <= self.damping < 1:
            raise invalid("damping", self.damping, "a number in [0, 1)", "0 jumps to the best value each time.")
        for name, least in (("every", 1), ("warmup", 0)):
            value = getattr(self, name)
            if not is_number(value, whole=True) or value < least:
                raise invalid(name, value, f"an integer >= {least}", "It is a number of steps.")
        if not is_number(self.start) or not BOUNDS[0] <= self.start <= BOUNDS[1]:
            raise invalid("start", self.start, f"a number in [{BOUNDS[0]:g}, {BOUNDS[1]:g}]", "1 is the default.")


PriorPrecision = float | str | AutoPrior | Sequence[Tensor]
"""λ: one number, "auto", or a list of tensors like the parameters."""


def take_auto(group: dict[str, Any]) -> None:
    """Put a request for an automatic λ into the form that the updates read: a number, and beside it how to change it.

    Plain values, so that a checkpoint holds them.
    """
    wanted = group["prior_precision"]
    if isinstance(wanted, str):
        if wanted != "auto":
            raise invalid("prior_precision", wanted, 'a number, a list of tensors, or "auto"', 'Did you mean "auto"?')
        wanted = AutoPrior()
    if isinstance(wanted, list | tuple | Tensor) and "auto_prior" in group:
        del group["auto_prior"]  # somebody else knows better: one λ for each weight is not followed
    if not isinstance(wanted, AutoPrior):
        return
    if group["capturable"]:
        raise invalid(
            "prior_precision",
            "auto",
            "a number with capturable=True",
            "A captured graph cannot change it.",
        )
    group["prior_precision"] = float(wanted.start)
    group["auto_prior"] = {
        "shared": wanted.shared,
        "damping": float(wanted.damping),
        "every": int(wanted.every),
        "warmup": int(wanted.warmup),
        "changed_at": 0,
    }


@torch.compiler.disable
def follow_auto_priors(optimizer: VariationalOptimizer) -> None:
    """Let λ follow the posterior in the groups that asked for it. Reads numbers, so it stays out of graphs."""
    groups = optimizer.param_groups
    steps = [optimizer._steps_made(group) for group in groups]
    due = due_for_change(groups, steps)
    if due:
        update_auto_priors(groups, due, optimizer._marginals())
    for number in due:
        groups[number]["auto_prior"]["changed_at"] = steps[number]


def due_for_change(groups: list[dict[str, Any]], steps: list[int]) -> list[int]:
    """The numbers of the groups whose λ changes after this step; ``steps`` are how many each has made."""
    due = []
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        settings = group.get("auto_prior")
        if settings is None or step <= settings["warmup"] or step % settings["every"] != 0:
            continue
        if step != settings["changed_at"]:  # a group that sits a step out has not come to its next one
            due.append(number)
    return due


def update_auto_priors(groups: list[dict[str, Any]], due: list[int], marginals: Iterable[Marginal]) -> None:
    """Move λ of the groups numbered ``due`` towards its best value, given the posterior now."""
    counts, moments = [0.0] * len(groups), [0.0] * len(groups)
    following = [m for m in marginals if groups[m.member.group_number].get("auto_prior") is not None]
    seconds = [(m.mean - m.member.prior_mean).square() + m.variance for m in following]
    for marginal, moment in zip(following, sums(seconds), strict=True):
        counts[marginal.member.group_number] += marginal.mean.numel()
        moments[marginal.member.group_number] += moment
    sharing = [number for number, group in enumerate(groups) if (group.get("auto_prior") or {}).get("shared")]
    pools = [[number] for number in due if number not in sharing]
    pools += [sharing] if any(number in sharing for number in due) else []
    for pool in pools:
        best = best_precision(sum(counts[i] for i in pool), sum(moments[i] for i in pool))
        # Somebody may have set it to zero.
        old = math.exp(sum(math.log(max(BOUNDS[0], groups[i]["prior_precision"])) for i in pool) / len(pool))
        new = damped(old, best, groups[pool[0]]["auto_prior"]["damping"])
        for i in pool:
            groups[i]["prior_precision"] = new


def best_precision(count: float, second_moment: float) -> float | None:
    """λ* = D/(‖μ−m₀‖² + Σσ²), within :data:`BOUNDS`; ``None`` if the posterior is not finite, or there are no weights.

    >>> best_precision(10, 2.5), best_precision(10, 0.0), best_precision(10, float("inf"))
    (4.0, 100000000.0, None)
    """
    if count == 0 or not math.isfinite(second_moment):
        return None
    low, high = BOUNDS
    return min(high, max(low, count / max(second_moment, count / high)))


def damped(old: float, new: float | None, damping: float) -> float:
    """Between the two on a logarithmic scale; the old one if there is no new one."""
    return old if new is None else math.exp(damping * math.log(old) + (1 - damping) * math.log(new))

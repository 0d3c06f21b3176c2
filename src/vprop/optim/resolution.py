"""What a step needs of each parameter group, decided once per step, and kept while the groups stay as they are."""

from __future__ import annotations

import math
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.checks import invalid
from vprop.parallel.ranks import has_own_noise, rank_and_count
from vprop.parallel.sharding import is_sharded, to_local
from vprop.structures import GroupStep
from vprop.structures.members import fill_members

if TYPE_CHECKING:
    from vprop.optim.optimizer import VariationalOptimizer

_REQUIRES_GRAD = attrgetter("requires_grad")
READ_LATE = ("lr", "betas", "clip_radius")
"""What the update reads itself, and schedulers write."""


class Resolution:
    """The groups of an optimizer as a step sees them."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._steps: list[GroupStep] = []
        self.several_ranks = False
        """Whether other processes train as well, as far as was seen when a step was last resolved."""

    def steps(self, optimizer: VariationalOptimizer) -> list[GroupStep]:
        """One object per group, the same as last time where nothing was edited; all are checked when one was."""
        groups = optimizer.param_groups
        if torch.compiler.is_compiling():
            return resolved(optimizer, groups)
        ranks = rank_and_count()
        self.several_ranks = ranks[1] > 1
        edited = groups
        # Every step comes here: what was edited is listed only where something was.
        if len(groups) == len(self._known):
            for known, group in zip(self._known, groups, strict=True):
                if not known.fits(group, ranks):
                    break
            else:
                return self._steps
            edited = [group for known, group in zip(self._known, groups, strict=True) if not known.fits(group, ranks)]
        for group in edited:
            optimizer._check_edited(group)
        self._steps = resolved(optimizer, groups)
        self._known = [_Known(group, ranks) for group in groups]
        return self._steps


class _Known:
    """A group as it was when it was resolved. Entries are compared by identity, which costs next to nothing."""

    def __init__(self, group: dict[str, Any], ranks: tuple[int, int]) -> None:
        self._group, self._ranks = group, ranks
        self._values, self._params = list(group.values()), list(group["params"])
        self._late = [list(group).index(name) for name in READ_LATE]
        self._requires_grad = list(map(_REQUIRES_GRAD, self._params))
        self._sharded = [p for p in self._params if is_sharded(p)]
        self._addresses = _addresses(self._sharded)

    def fits(self, group: dict[str, Any], ranks: tuple[int, int]) -> bool:
        """Whether nothing was edited but what the update reads itself."""
        values, params = list(group.values()), group["params"]
        if group is not self._group or len(values) != len(self._values) or len(params) != len(self._params):
            return False
        for i in self._late:
            values[i] = self._values[i]
        return (
            ranks == self._ranks
            and all(map(is_, values, self._values))
            and all(map(is_, params, self._params))
            and list(map(_REQUIRES_GRAD, params)) == self._requires_grad
            and (not self._sharded or _addresses(self._sharded) == self._addresses)
        )


def _addresses(params: list[Tensor]) -> list[int]:
    return [to_local(p).data_ptr() for p in params]


def resolved(optimizer: VariationalOptimizer, groups: list[dict[str, Any]]) -> list[GroupStep]:
    """The groups as a step sees them, after a check of what can be edited at any time."""
    check_sample_counts(optimizer, groups)
    optimizer._fit_structure(groups)
    for group in groups:
        optimizer._check_by_structure(group)
    optimizer._structure.check_groups(groups, optimizer._shared_by_groups())
    steps, number = [], 0
    for i, group in enumerate(groups):
        ess = group["num_data"] / group["temperature"]
        rule, preconditioner = optimizer._rule(group), group.get("preconditioner", "precision")
        step = GroupStep(
            number=i,
            group=group,
            estimator=optimizer._curvature(group),
            rule=rule,
            kernel=rule.kernels.get(preconditioner),
            ess=ess,
            prior_precision=group["prior_precision"],
            prior_mean=group["prior_mean"],
            seed=group["seed"],
            samples=group["mc_samples"],
            antithetic=group["antithetic"],
            maximize=group["maximize"],
            own_noise=has_own_noise(group),
            fused=_may_be_fused(optimizer, group),
            capturable=group["capturable"],
            rate_factor=optimizer._rate_factor(group, ess),
            # Not every method has these.
            batch_size=group.get("batch_size"),
            divides_by_root=preconditioner == "root",
            divides=preconditioner != "identity",
            init_steps=group.get("init_steps"),
            hess_floor=group.get("hess_floor", 0.0),
            noise_limit=group.get("noise_limit", math.inf),
        )
        fill_members(step, number)
        number += len(group["params"])
        steps.append(step)
    return steps


def check_sample_counts(optimizer: VariationalOptimizer, groups: list[dict[str, Any]]) -> int:
    """Samples per step; one number for all groups, because a sample covers all weights at once."""
    for group in groups:
        optimizer._check_samples(group)
    counts = {group["mc_samples"] for group in groups}
    if len(counts) > 1:
        remedy = "A sample covers all groups at once."
        raise invalid("mc_samples", sorted(counts), "the same in all parameter groups", remedy)
    return counts.pop()


def _may_be_fused(optimizer: VariationalOptimizer, group: dict[str, Any]) -> bool:
    if not optimizer._structure.kernels_for(group) or group["fused"] is False:
        return False
    return bool(group["fused"]) or group["foreach"] is None

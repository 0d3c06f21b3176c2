"""What looks wrong with a posterior, in words, with the argument to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop.help.auto_prior import BOUNDS
from vprop.parallel.sharding import sums
from vprop.structures.members import Marginal

MOST = 0.5
"""A symptom counts when more than this share of a group's weights show it."""
AT_THE_PRIOR = 0.9
"""σ² above this share of the prior's variance: the data have said next to nothing of the weight."""
MANY_CLIPPED = 0.1


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong."""

    symptom: str
    """A name to test for, e.g. ``"variance at prior"``."""
    group: int
    """The parameter group that shows it."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"group {self.group}, {self.symptom}: {self.what} {self.remedy}"


class Diagnosis(Sequence[Finding]):
    """The findings, as a sequence; printed, the text for a person."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __repr__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings) or "Nothing looks wrong."


@dataclass
class _Group:
    """A parameter group with what its posterior is."""

    number: int
    settings: dict[str, Any]
    steps: int
    marginals: list[Marginal]
    clipped: list[tuple[Tensor, int]]

    def share(self, condition: Callable[[Marginal], Tensor]) -> float:
        """The share of the weights for which a condition holds."""
        size = sum(m.mean.numel() for m in self.marginals)
        return sum(sums([condition(m) for m in self.marginals])) / size

    def total(self, value: Callable[[Marginal], Tensor]) -> float:
        """The sum over the weights."""
        return sum(sums([value(m) for m in self.marginals]))

    def finding(self, symptom: str, what: str, remedy: str) -> Finding:
        return Finding(symptom, self.number, what, remedy)


def diagnose(
    param_groups: list[dict[str, Any]],
    steps: list[int],
    marginals: list[Marginal],
    clipped: Mapping[int, list[tuple[Tensor, int]]],
) -> Diagnosis:
    """All findings, group by group."""
    findings: list[Finding] = []
    for number, settings in enumerate(param_groups):
        if not any(p.requires_grad and p.numel() for p in settings["params"]):
            continue  # nothing to say of no weights
        own = [marginal for marginal in marginals if marginal.member.group_number == number]
        group = _Group(number, settings, steps[number], own, clipped.get(number, []))
        for check in _CHECKS if own else (_no_steps,):
            findings.extend(check(group))
    return Diagnosis(findings)


def _no_steps(group: _Group) -> Iterator[Finding]:
    yield group.finding(
        "no steps",
        "No parameter of the group has made a step.",
        "Call step() after backward(), and look whether the loss depends on these parameters.",
    )


def _not_finite(group: _Group) -> Iterator[Finding]:
    share = group.share(lambda m: ~(torch.isfinite(m.mean) & torch.isfinite(m.variance)))
    if share > 0:
        yield group.finding(
            "not finite",
            f"{share:.1%} of the weights or their variances are NaN or infinite.",
            "Go back to an earlier checkpoint and lower lr, or clip the gradients.",
        )


def _without_gradient(group: _Group) -> Iterator[Finding]:
    seen = {id(marginal.member.p) for marginal in group.marginals}
    missing = sum(p.requires_grad and id(p) not in seen for p in group.settings["params"])
    if missing:
        yield group.finding(
            "no gradient",
            f"{missing} of its parameters have never had a gradient, so their variance is that of hess_init.",
            "Leave them out of the optimizer, or freeze them (requires_grad=False), if the loss does not need them.",
        )


def _curvature_at_start(group: _Group) -> Iterator[Finding]:
    start, beta2 = group.settings["hess_init"], group.settings["betas"][1]
    left = start * beta2**group.steps
    if left == 0 or any(marginal.hess is None for marginal in group.marginals):
        return
    ess = group.settings["num_data"] / group.settings["temperature"]
    # Of the precision h+δ; where h is zero there is nothing left of any start.
    share = group.share(lambda m: (m.hess > 0) & (left >= MOST * (m.hess + _prior_precision(m) / ess)))  # type: ignore
    if share > MOST:
        shorter = max(0.0, 1 - 10 / max(10, group.steps))
        yield group.finding(
            "curvature at hess_init",
            f"After {group.steps} steps the curvature of {share:.0%} of the weights is still mostly "
            f"hess_init={start:g}, and so are their variances: a share of {beta2**group.steps:.2g} of it is left.",
            f"Train longer, lower betas[1]={beta2:g} (for this many steps to about {shorter:.3g}), or lower hess_init.",
        )


def _variance_at_prior(group: _Group) -> Iterator[Finding]:
    share = group.share(lambda m: m.variance * _prior_precision(m) > AT_THE_PRIOR)
    if share > MOST:
        data, temperature = group.settings["num_data"], group.settings["temperature"]
        yield group.finding(
            "variance at prior",
            f"The posterior of {share:.0%} of the weights is as wide as their prior: the data say next to nothing of "
            "them.",
            f"Check that num_data={data:g} is the number of training examples and that the loss is a mean; lower "
            f"prior_precision, or the temperature ({temperature:g}). Vadam's curvature is small by construction: use "
            "Vprop or IVON for a narrower one. In a network with many more weights than data it may be the truth.",
        )


def _noise_dominates(group: _Group) -> Iterator[Finding]:
    size = group.total(lambda m: torch.ones_like(m.mean))
    noise, signal = group.total(lambda m: m.variance), group.total(lambda m: m.mean.square())
    if noise > signal:
        yield group.finding(
            "noise dominates",
            f"The noise (σ = {math.sqrt(noise / size):.2g}, root mean square) is larger than the weights "
            f"({math.sqrt(signal / size):.2g}): a sample hardly resembles the mean.",
            "Raise hess_init (the noise of the first steps) or prior_precision (it bounds σ by 1/√λ), lower the "
            f"temperature, and check that num_data={group.settings['num_data']:g} is the number of training examples.",
        )


def _steps_clipped(group: _Group) -> Iterator[Finding]:
    if not group.clipped:
        return
    share = sum(float(count) for count, _ in group.clipped) / sum(size for _, size in group.clipped)
    if share > MANY_CLIPPED:
        radius = group.settings["clip_radius"]
        yield group.finding(
            "steps clipped",
            f"In the last step {share:.0%} of the elements were at clip_radius={radius:g}: the step was one of signs "
            "rather than a Newton-like one.",
            "Raise clip_radius; or, if the loss is unstable without it, raise hess_init or set betas[0]=0.9.",
        )


def _prior_at_bound(group: _Group) -> Iterator[Finding]:
    precision = group.settings["prior_precision"]
    if group.settings.get("auto_prior") is None or BOUNDS[0] * 2 < precision < BOUNDS[1] / 2:
        return
    yield group.finding(
        "prior at its bound",
        f"The automatic prior_precision has gone to {precision:.1g}.",
        "The data do not decide it for this group: pool it with others (vprop.AutoPrior(shared=True)) or set a number.",
    )


def _prior_precision(marginal: Marginal) -> float | Tensor:
    precision = marginal.member.prior_precision
    if isinstance(precision, Tensor) and precision.dim() == 2 and precision.shape != marginal.mean.shape:
        return 0.0  # a prior with correlations: variances alone cannot be compared
    return precision


_CHECKS: tuple[Callable[[_Group], Iterator[Finding]], ...] = (
    _not_finite,
    _without_gradient,
    _curvature_at_start,
    _variance_at_prior,
    _noise_dominates,
    _steps_clipped,
    _prior_at_bound,
)

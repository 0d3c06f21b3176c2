"""What looks wrong with a posterior, in words, with what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop.help import advice
from vprop.help.advice import Advice
from vprop.help.auto_prior import BOUNDS
from vprop.help.predictions import Losses
from vprop.parallel.sharding import sums
from vprop.structures.members import Marginal

MOST = 0.5
"""A symptom counts when more than this share of a group's weights show it."""
AT_THE_PRIOR = 0.9
"""σ² above this share of the prior's variance: the data have said next to nothing of the weight."""
MANY_CLIPPED = 0.1
MUCH_LOST = 0.2
"""Samples that lose this share of what the mean knows (its gain over a constant) are no posterior to predict with."""
NO_BETTER = 0.99
"""A loss above this share of a constant's has learned nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong."""

    symptom: str
    """A name to test for, e.g. ``"variance at prior"``."""
    group: int | None
    """The parameter group that shows it; ``None`` for what is seen of the model as a whole."""
    what: str
    remedy: str
    advice: Advice | None = None
    """The remedy for programs: optimizer, arguments, step size; ``None`` where there is nothing of these to change."""

    def __str__(self) -> str:
        where = "the whole model" if self.group is None else f"group {self.group}"
        return f"{where}, {self.symptom}: {self.what} {self.remedy}"


class Diagnosis(Sequence[Finding]):
    """The findings, as a sequence; printed, the text for a person."""

    def __init__(self, findings: list[Finding], losses: Losses | None = None) -> None:
        self.findings = findings
        self.losses = losses
        """What was measured on the data, if there were any."""

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __repr__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing looks wrong."]
        if self.losses is None:
            lines.append("(How the model predicts is not known without data: diagnose(objective).)")
        else:
            lines.append(f"({self.losses})")
        return "\n".join(lines)


@dataclass
class _Group:
    """A parameter group with what its posterior is."""

    number: int
    settings: dict[str, Any]
    steps: int
    marginals: list[Marginal]
    clipped: list[tuple[Tensor, int]]
    is_network: bool
    """Whether the noise of a layer goes through others: there is more than one matrix, in all groups together."""
    examples: int | None
    """How many of them a gradient is a mean of, as far as that was seen."""

    def share(self, condition: Callable[[Marginal], Tensor]) -> float:
        """The share of the weights for which a condition holds."""
        size = sum(m.mean.numel() for m in self.marginals)
        return sum(sums([condition(m) for m in self.marginals])) / size

    def total(self, value: Callable[[Marginal], Tensor]) -> float:
        """The sum over the weights."""
        return sum(sums([value(m) for m in self.marginals]))

    def finding(self, symptom: str, what: str, remedy: str, advice: Advice | None = None) -> Finding:
        words = [remedy] if advice is None else [remedy, advice.words]
        return Finding(symptom, self.number, what, " ".join(filter(None, words)), advice)

    def less_noise(self) -> Advice | None:
        return advice.less_noise(self.settings, self.examples, self.is_network)


def diagnose(
    param_groups: list[dict[str, Any]],
    steps: list[int],
    marginals: list[Marginal],
    clipped: Mapping[int, list[tuple[Tensor, int]]],
    examples: int | None = None,
    losses: Losses | None = None,
) -> Diagnosis:
    """All findings: those of the predictions, then group by group."""
    findings: list[Finding] = []
    trained = [p for settings in param_groups for p in settings["params"] if p.requires_grad and p.numel()]
    is_network = sum(p.dim() >= 2 for p in trained) > 1
    if losses is not None:
        findings.extend(_predictions(losses, param_groups[0], examples, is_network))
    for number, settings in enumerate(param_groups):
        if not any(p.requires_grad and p.numel() for p in settings["params"]):
            continue  # nothing to say of no weights
        own = [marginal for marginal in marginals if marginal.member.group_number == number]
        group = _Group(number, settings, steps[number], own, clipped.get(number, []), is_network, examples)
        for check in _CHECKS if own else (_no_steps,):
            findings.extend(check(group))
    return Diagnosis(findings, losses)


def _predictions(losses: Losses, settings: dict[str, Any], examples: int | None, is_network: bool) -> Iterator[Finding]:
    """What data say of the model as a whole."""
    constant = losses.constant
    beside = "" if constant is None else f" (a constant's: {constant:.3g})"
    if losses.is_sum and settings["num_data"] > 1:  # the sum over all data is the mean over one
        yield Finding(
            "loss is a sum",
            None,
            "The loss is a sum over the batch, and it counts num_data times: the posterior is too narrow.",
            'Train with the mean: reduction="mean", which is torch\'s default.',
        )
    if not losses.is_better_than_constant(NO_BETTER):
        remedy = advice.less_noise(settings, examples, is_network) or advice.another_lr()
        yield Finding(
            "chance level",
            None,
            f"The mean of the weights predicts no better than a constant: its loss is {losses.mean:.3g}{beside}.",
            f"{remedy.words} If that does not help, look at the prior, which pulls the weights to its mean, and at "
            "the data and their labels.",
            remedy,
        )
    elif losses.lost > MUCH_LOST:
        remedy = advice.still_less_noise(settings, examples, is_network) or advice.another_lr()
        yield Finding(
            "mean better than samples",
            None,
            f"The loss of samples from the posterior is {losses.samples:.3g} on average, that of their mean "
            f"{losses.mean:.3g}{beside}: the noise costs much of what was learned.",
            remedy.words,
            remedy,
        )


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
    start, beta2, init_steps = group.settings["hess_init"], group.settings["betas"][1], group.settings.get("init_steps")
    # Of an average whose weights sum up to 1−(1−w₀)β₂ᵗ the start has w₀·β₂ᵗ.
    weight = 1.0 if init_steps is None else min(1.0, init_steps * (1 - beta2))
    share_left = weight * beta2**group.steps / (1 - (1 - weight) * beta2**group.steps)
    left = start * share_left
    if left == 0 or any(marginal.hess is None for marginal in group.marginals):
        return
    ess = group.settings["num_data"] / group.settings["temperature"]
    # Of the precision h+δ; where h is zero there is nothing left of any start.
    share = group.share(lambda m: (m.hess > 0) & (left >= MOST * (m.hess + _prior_precision(m) / ess)))  # type: ignore
    if share > MOST:
        yield group.finding(
            "curvature at hess_init",
            f"After {group.steps} steps the curvature of {share:.0%} of the weights is still mostly "
            f"hess_init={start:g}, and so are their variances: a share of {share_left:.2g} of it is left.",
            "Predictions can be good all the same: hess_init bounds the noise. For variances from the data train "
            "longer; to lower hess_init or betas[1] is no way there in a network, whose noise has then no bound.",
        )


def _too_certain(group: _Group) -> Iterator[Finding]:
    data, known = group.settings["num_data"], group.settings.get("batch_size", 0)
    examples, own = group.examples, group.marginals[0].member.step
    if known is not None or examples is None or not own.estimator.counts_examples or examples > MOST * data:
        return
    yield group.finding(
        "too certain",
        f"The curvature is made of squared gradients that count for all num_data={data:g} examples, but each is a mean "
        f"of {examples}: it is about {data / examples:.2g} times too large, and variances and steps that much too "
        "small.",
        "",
        advice.mini_batches(group.settings, examples, group.is_network),
    )


def _variance_at_prior(group: _Group) -> Iterator[Finding]:
    share = group.share(lambda m: m.variance * _prior_precision(m) > AT_THE_PRIOR)
    if share > MOST:
        truth = "" if group.is_network else " In one layer with many more weights than data it may be the truth."
        yield group.finding(
            "variance at prior",
            f"The posterior of {share:.0%} of the weights is as wide as their prior: the data say next to nothing of "
            "them.",
            f"Check that num_data={group.settings['num_data']:g} is the number of training examples and that the loss "
            f"is a mean.{truth}",
            group.less_noise(),
        )


def _noise_dominates(group: _Group) -> Iterator[Finding]:
    squares = sums([m.mean.square() for m in group.marginals])
    sizes = {id(m): square / max(1, m.mean.numel()) for m, square in zip(group.marginals, squares, strict=True)}
    share = group.share(lambda m: m.variance > sizes[id(m)])
    if share > MOST:
        size = sum(m.mean.numel() for m in group.marginals)
        noise, signal = group.total(lambda m: m.variance), sum(squares)
        truth = "" if group.is_network else " In a model of one layer it may be the truth."
        yield group.finding(
            "noise dominates",
            f"The noise (σ = {math.sqrt(noise / size):.2g}, root mean square) is larger than the weights "
            f"({math.sqrt(signal / size):.2g}) for {share:.0%} of them: a sample hardly resembles the mean.",
            f"Check that num_data={group.settings['num_data']:g} is the number of training examples.{truth}",
            group.less_noise(),
        )


def _steps_clipped(group: _Group) -> Iterator[Finding]:
    if not group.clipped:
        return
    share = sum(float(count) for count, _ in group.clipped) / sum(size for _, size in group.clipped)
    if share > MANY_CLIPPED:
        radius = group.settings["clip_radius"]
        yield group.finding(
            "steps clipped",
            f"In the last step {share:.0%} of the elements were at clip_radius={radius:g}: the step was one of signs, "
            "of size lr·clip_radius, rather than a Newton-like one.",
            "If the loss falls as it should there is nothing to change. Otherwise:",
            advice.another_lr(),
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
    _too_certain,
    _variance_at_prior,
    _noise_dominates,
    _steps_clipped,
    _prior_at_bound,
)

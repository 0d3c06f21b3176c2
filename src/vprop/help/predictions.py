"""How well a posterior predicts: beside its own mean, and beside a constant that knows nothing of the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vprop.calling import call_model
from vprop.checks import shown
from vprop.likelihood.terms import LossCall, LossWatch
from vprop.objective import Objective, batch_size_of
from vprop.posterior import Posterior
from vprop.replica import evaluating_replicas
from vprop.wrappers import refuse_sharded

SAMPLES = 8
"""Draws of the weights; a gap that matters is seen with fewer."""


@dataclass(frozen=True)
class Losses:
    """Mean losses over the same data, in evaluation mode."""

    mean: float
    """At the mean of the weights."""
    samples: float
    """Averaged over weights drawn from the posterior."""
    constant: float | None
    """Of the best prediction that is the same for every input; ``None`` where the loss is not known well enough."""
    is_sum: bool = False
    """Whether one of torch's losses added up the examples of a batch."""

    def __str__(self) -> str:
        constant = "" if self.constant is None else f", of a constant prediction {self.constant:.3g}"
        return f"Loss at the mean {self.mean:.3g}, of samples {self.samples:.3g} on average{constant}."

    def is_better_than_constant(self, share: float) -> bool:
        """Whether the mean's loss is below this share of a constant's; taken to be so where that is not known."""
        if self.constant is None:
            return math.isfinite(self.mean)
        return self.mean < self.constant - (1 - share) * abs(self.constant)

    @property
    def lost(self) -> float:
        """What samples lose to the mean, as a share of what the mean knows (or of its own loss, without a constant)."""
        known = abs(self.mean) if self.constant is None else self.constant - self.mean
        gap = self.samples - self.mean
        if not math.isfinite(gap):
            return math.inf
        return gap / known if known > 0 else 0.0


def compare_losses(posterior: Posterior, objectives: Iterable[Objective]) -> Losses:
    """Run mean and samples over the batches. The model is not changed; loaders are read once."""
    refuse_sharded(posterior.model, "diagnose(objective)")
    totals, size, constant, is_sum = [0.0] * (1 + SAMPLES), 0.0, _Constant(), False
    for objective in objectives:
        models: Iterator[Callable[..., Any]] = chain(
            evaluating_replicas(posterior.model, posterior.buffers, [posterior._in_model_dtypes(posterior.mean)]),
            posterior.sampled_models(SAMPLES),
        )
        counted = 0.0
        for i, model in enumerate(models):
            with LossWatch() as watch:
                loss = objective.loss_fn(call_model(model, objective.x), objective.y)
            call = watch.call_of(loss)
            is_sum = is_sum or (watch.is_sum(loss) and batch_size_of(objective.y) > 1)
            if call is not None and call.reduction == "mean" and not call.was_changed:
                loss = call.result  # without factors and penalties, so that a constant's can be compared with it
            else:
                call = None
            if i == 0:
                counted = float(batch_size_of(objective.y) if call is None else call.terms())
                constant.add(objective, call)
            if counted:
                totals[i] += counted * float(loss)
        size += counted
    if size == 0:
        raise ValueError(
            "diagnose(objective): the objective has no examples, or none of its targets counts. Pass an Objective or a "
            "non-empty list of them, with labels that are not all ignored."
        )
    mean, *sampled = (total / size for total in totals)
    return Losses(mean, sum(sampled) / len(sampled), constant.loss(), is_sum)


@dataclass
class _Constant:
    """Collects the targets of several batches, and finds the loss of the best constant for all of them."""

    targets: list[Tensor] = field(default_factory=list)
    loss_of: Callable[[Tensor], Tensor] | None = None
    known: bool = True

    def add(self, objective: Objective, call: LossCall | None) -> None:
        """Take in a batch."""
        if call is not None:
            kind = _KINDS.get(call.function)
            target = None if kind is None else kind(call)
            if target is not None and self.loss_of is None:
                self.loss_of = _loss_of(call)
        else:
            target = objective.y if objective.likelihood == "gaussian" and isinstance(objective.y, Tensor) else None
            if target is not None and self.loss_of is None:
                loss_fn = objective.loss_fn
                self.loss_of = lambda y: loss_fn(y.mean(0, keepdim=True).expand_as(y), y)
        if target is None or (self.targets and target.shape[1:] != self.targets[0].shape[1:]):
            self.known = False
        else:
            self.targets.append(target)

    def loss(self) -> float | None:
        """``None`` where not every batch was of a known kind."""
        if not self.known or not self.targets or self.loss_of is None:
            return None
        return float(self.loss_of(torch.cat(self.targets)))


def _classes(call: LossCall) -> Tensor | None:
    """Class numbers one by one, wherever in a batch they are; of probabilities nothing is known."""
    target = call.arguments["target"]
    return None if target.is_floating_point() else target.flatten()


def _elements(call: LossCall) -> Tensor | None:
    """Targets of which every element counts alike."""
    weighted = any(call.arguments.get(name) is not None for name in ("weight", "pos_weight"))
    target = call.arguments["target"]
    return None if weighted or not target.dim() else target


_KINDS: dict[Any, Callable[[LossCall], Tensor | None]] = {
    F.cross_entropy: _classes,
    F.binary_cross_entropy_with_logits: _elements,
    F.mse_loss: _elements,
}


def _loss_of(call: LossCall) -> Callable[[Tensor], Tensor]:
    """The loss of the best constant for given targets, by the user's own call of torch's loss."""
    scores, others = call.arguments["input"], {k: v for k, v in call.arguments.items() if k not in ("input", "target")}

    def loss(target: Tensor) -> Tensor:
        if call.function is F.cross_entropy:
            classes = scores.shape[min(1, scores.dim() - 1)]
            counted = target[target != others.get("ignore_index", -100)]
            shares = _shares(torch.bincount(counted, minlength=classes).to(scores.dtype), others)
            constant = shares.clamp_min(torch.finfo(scores.dtype).tiny).log().expand(len(target), classes)
        else:
            constant = target.to(scores.dtype).mean(0, keepdim=True)
            if call.function is F.binary_cross_entropy_with_logits:
                constant = torch.logit(constant, eps=1e-6)
            constant = constant.expand_as(target)
        return call.function(constant, target, **others)

    return loss


def _shares(counts: Tensor, options: dict[str, Any]) -> Tensor:
    """The probabilities with the least cross-entropy for labels of these counts n, of C classes.

    With weights w of classes and smoothing ε it is Σ_c w_c((1−ε)n_c + εN/C)·(−log p_c), up to a factor.
    """
    smoothing, weight = options.get("label_smoothing", 0.0), options.get("weight")
    smoothed = (1 - smoothing) * counts + smoothing * counts.mean()
    smoothed = smoothed if weight is None else smoothed * weight.to(smoothed)
    return smoothed / smoothed.sum().clamp_min(torch.finfo(smoothed.dtype).tiny)


def objectives_in(given: Any) -> list[Objective]:
    """One objective, several, or none; anything else is refused."""
    if given is None:
        return []
    objectives = [given] if isinstance(given, Objective) else list(given) if isinstance(given, Iterable) else [given]
    for objective in objectives:
        if not isinstance(objective, Objective):
            raise TypeError(
                f"diagnose(objective): got {shown(objective)}, must be a vprop.Objective or several of them. Pass "
                "vprop.Objective(model, loss_fn, x, y), or a list with one for each batch."
            )
    if not objectives:
        raise ValueError("diagnose(objective): got no objective. Pass None to look at the state alone.")
    return objectives

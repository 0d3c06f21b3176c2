r"""The diagonal Gaussian q = N(μ, σ²) and one step on it: the natural-gradient step, and Vadam's.

In every function ``hess`` is the per-example curvature h, ``ess`` the effective sample size N/τ, and ``damping``
is δ = λ/ess, a number or a tensor with one entry per weight. Then

    σ² = 1 / (ess·(h + δ))
    h  ← β₂·h + (1−β₂)·ĥ
    m  ← β₁·m + (1−β₁)·ĝ,   m̂ = m / (1−β₁ᵗ)
    μ  ← μ − lr·clip((m̂ + δ·(μ−m₀)) / (h + δ))

with the new h in the last line. The prior term stays outside the momentum average. An exact Hessian can be negative
where the loss is not convex, and so can an estimate of one. There are two ways to keep the precision positive: h is
not let below zero, so that no weight is less certain than under the prior; or (``riemannian``) the average has a term
more, ½(1−β₂)²(h−ĥ)²/(h+δ), which keeps h+δ > 0 by itself.

Four things can be asked for beyond that. A ``floor`` f bounds σ: the precision is ess·max(h+δ, f), in σ² and in the
step alike. The clamped average can forget its start: with ``start_weight`` w₀ < 1 its new part has the weight
(1−β₂)/(1−(1−w₀)β₂ᵗ), which is 1 in the first step of an average that knows nothing (w₀ = 0: Adam's debiased one) and
1−β₂ throughout with w₀ = 1. And with ``gradient_scale`` M the step divides as Adam does, by the size of what it steps
along: √(h/M + δ²((μ−m₀)²+σ²)). h is the mean square of one example's gradient, and h/M that of a mini-batch's; the rest
is the mean square under q of the prior's, without which the pull on a weight whose gradient vanishes would be divided
by nothing. Or (``divides=False``) the step divides by nothing at all, as SGD with momentum does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Scalar = float | Tensor

LEAST_PRECISION = 1e-3
"""No weight's precision is less than this share of its prior's.

The riemannian average keeps h above −δ, but δ may fall afterwards (the prior or the temperature changes), and h+δ is
a difference that rounding can make zero."""


SMALLEST_SIZE = 1e-8
"""Of a gradient that a step divides by, as Adam has it: what is zero stays where it is."""


def precision(hess: Tensor, ess: Scalar, damping: Scalar, floor: Scalar = 0.0) -> Tensor:
    """1/σ² = ess·max(h+δ, f)."""
    return ess * _not_below((hess + damping).clamp_min(LEAST_PRECISION * damping), floor)


def variance(hess: Tensor, ess: Scalar, damping: Scalar, floor: Scalar = 0.0) -> Tensor:
    """σ² = 1/(ess·max(h+δ, f)).

    >>> variance(torch.tensor([0.0, 0.03]), ess=100.0, damping=0.01)
    tensor([1.0000, 0.2500])
    """
    return precision(hess, ess, damping, floor).reciprocal()


def perturbation(hess: Tensor, noise: Tensor, ess: Scalar, damping: Scalar, floor: Scalar = 0.0) -> Tensor:
    """σ·ε: what a sample adds to the mean."""
    return noise * precision(hess, ess, damping, floor).rsqrt()


class Step(NamedTuple):
    """What one update leaves behind."""

    mean: Tensor
    hess: Tensor
    momentum: Tensor | None
    unusable: Tensor
    """How many elements were left out because they would not have been finite (0-dim int64)."""
    clipped: Tensor | None
    """How many elements of the step were at the clip radius; ``None`` if that is infinite."""


def natural_gradient_step(
    mean: Tensor,
    hess: Tensor,
    momentum: Tensor | None,
    grad: Tensor,
    hess_estimate: Tensor,
    *,
    step: Scalar,
    lr: Scalar,
    betas: tuple[float, float],
    damping: Scalar,
    prior_mean: Scalar,
    clip_radius: float,
    floor: Scalar = 0.0,
    start_weight: float = 1.0,
    gradient_scale: float | None = None,
    divides: bool = True,
    ess: float = math.inf,
    riemannian: bool = False,
) -> Step:
    """One step from ĝ (``grad``) and ĥ (``hess_estimate``), the averages over this step's samples.

    ``ess`` is needed with ``gradient_scale`` only; ``riemannian`` knows no ``start_weight``. ``step`` counts from 1.
    ``momentum`` is ``None`` when β₁ = 0. An element that would become NaN or infinite keeps its mean, curvature and
    momentum: one bad gradient must not ruin the posterior, nor (h = ∞) silently freeze a weight for ever.
    """
    beta1, beta2 = betas
    if riemannian:
        new_hess = _riemannian_average(hess, hess_estimate, 1 - beta2, damping)
    elif start_weight == 1:
        new_hess = _clamped_average(hess, hess_estimate, 1 - beta2)
    else:
        # As a sum: a start that is to be forgotten can be so large that the difference to it says nothing.
        weights = _weight_of_all(beta2, step, start_weight)
        kept = beta2 * _weight_of_all(beta2, step - 1, start_weight) / weights
        new_hess = (kept * hess + (1 - beta2) / weights * hess_estimate).clamp_min(0)
    new_momentum, debiased = _averaged(momentum, grad, beta1, step)
    pull = damping * (mean - prior_mean)
    direction = debiased + pull
    if gradient_scale is None:
        bounded = _not_below(new_hess + damping, floor)
        # Without any precision the next sample would be infinite, and the mean lost in it.
        direction = direction / bounded if divides else torch.where(bounded > 0, direction, torch.nan)
    else:
        prior_square = pull.square() + damping * damping * variance(new_hess, ess, damping, floor)
        direction = direction / (((new_hess / gradient_scale).clamp_min(0) + prior_square).sqrt() + SMALLEST_SIZE)
    return _bounded_step(mean, hess, momentum, grad, new_hess, new_momentum, direction, lr, clip_radius)


def vadam_step(
    mean: Tensor,
    hess: Tensor,
    momentum: Tensor | None,
    grad: Tensor,
    hess_estimate: Tensor,
    *,
    step: Scalar,
    lr: Scalar,
    betas: tuple[float, float],
    damping: Scalar,
    prior_mean: Scalar,
    clip_radius: float,
    floor: Scalar = 0.0,
    start_weight: float = 1.0,
    gradient_scale: float | None = None,
    divides: bool = True,
    ess: float = math.inf,
) -> Step:
    """Vadam's step: Adam's, with the prior's pull inside the momentum average.

    m ← β₁m + (1−β₁)(ĝ + δ(μ−m₀)), h ← β₂h + (1−β₂)ĥ, μ ← μ − lr·m̂/(√ĥ + δ), where hats over averages are their
    debiased values m/(1−β₁ᵗ) and h/(1−β₂ᵗ). Arguments are those of :func:`natural_gradient_step`, of which the last
    five have no meaning here.
    """
    beta1, beta2 = betas
    new_hess = _clamped_average(hess, hess_estimate, 1 - beta2)
    pulled = grad + damping * (mean - prior_mean)
    new_momentum, debiased = _averaged(momentum, pulled, beta1, step)
    direction = debiased / ((new_hess / _weight_so_far(beta2, step)).sqrt() + damping)
    return _bounded_step(mean, hess, momentum, grad, new_hess, new_momentum, direction, lr, clip_radius)


def _averaged(momentum: Tensor | None, value: Tensor, beta: float, step: Scalar) -> tuple[Tensor | None, Tensor]:
    """The momentum average with ``value`` in it, and what it says without its start; ``value`` if there is none."""
    if momentum is None:
        return None, value
    momentum = torch.lerp(momentum, value, 1 - beta)
    return momentum, momentum / _weight_so_far(beta, step)


def _weight_so_far(beta: float, step: Scalar) -> Scalar:
    """1 − βᵗ, what the weights of an average that started at zero sum up to after t steps."""
    if isinstance(step, Tensor) and beta > 0:
        return -torch.expm1(step * math.log(beta))  # the difference itself would lose half of float32's digits
    return 1 - beta**step


def newest_weight(beta: float, step: Scalar, start_weight: float) -> Scalar:
    """(1−β)/(1−(1−w₀)βᵗ): what the newest value weighs in an average whose start has the weight w₀ of all before it.

    The weights of all values sum up to Wₜ = βWₜ₋₁ + (1−β) with W₀ = w₀, and the average stays divided by it.

    >>> newest_weight(0.9, 1, 1.0), newest_weight(0.5, 1, 0.0), newest_weight(0.5, 2, 0.0)
    (0.09999999999999998, 1.0, 0.6666666666666666)
    """
    if start_weight == 1:
        return 1 - beta
    return (1 - beta) / _weight_of_all(beta, step, start_weight)


def _weight_of_all(beta: float, step: Scalar, start_weight: float) -> Scalar:
    """Wₜ = 1 − (1−w₀)βᵗ."""
    known = _weight_so_far(beta, step)
    return known + start_weight * (1 - known)


def _not_below(value: Tensor, floor: Scalar) -> Tensor:
    """The larger of the two; NaN stays, to be found."""
    if isinstance(floor, Tensor):
        return torch.maximum(value, floor)
    return value.clamp_min(floor) if floor > 0 else value


def _clamped_average(hess: Tensor, estimate: Tensor, weight: float) -> Tensor:
    """h + (1−β₂)(ĥ−h), not below zero; ``weight`` is 1−β₂."""
    return torch.lerp(hess, estimate, weight).clamp_min(0)


def _riemannian_average(hess: Tensor, estimate: Tensor, weight: float, damping: Scalar) -> Tensor:
    """h + (1−β₂)(ĥ−h) + ½(1−β₂)²(ĥ−h)²/(h+δ): at least half of h+δ stays, whatever ĥ is."""
    change = weight * (estimate - hess)
    floor = -(1 - LEAST_PRECISION) * damping
    positive = (hess + damping).clamp_min(LEAST_PRECISION * damping)
    return (hess + change + 0.5 * change.square() / positive).clamp_min(floor)


def _bounded_step(
    mean: Tensor,
    hess: Tensor,
    momentum: Tensor | None,
    grad: Tensor,
    new_hess: Tensor,
    new_momentum: Tensor | None,
    direction: Tensor,
    lr: Scalar,
    clip_radius: float,
) -> Step:
    """Clip the direction, go, and leave out what is not finite."""
    clipped = None if math.isinf(clip_radius) else (direction.abs() > clip_radius).sum()
    new_mean = mean - lr * direction.clamp(-clip_radius, clip_radius)
    usable = torch.isfinite(grad) & torch.isfinite(new_hess) & torch.isfinite(new_mean)
    return Step(
        torch.where(usable, new_mean, mean),
        torch.where(usable, new_hess, hess),
        None if momentum is None or new_momentum is None else torch.where(usable, new_momentum, momentum),
        (~usable).sum(),
        clipped,
    )

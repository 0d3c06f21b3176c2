r"""The diagonal Gaussian q = N(μ, σ²) and one natural-gradient step on it.

In every function ``hess`` is the per-example curvature h, ``ess`` the effective sample size N/τ, and ``damping``
is δ = λ/ess, a number or a tensor with one entry per weight. Then

    σ² = 1 / (ess·(h + δ))
    h  ← β₂·h + (1−β₂)·ĥ
    m  ← β₁·m + (1−β₁)·ĝ,   m̂ = m / (1−β₁ᵗ)
    μ  ← μ − lr·clip((m̂ + δ·(μ−m₀)) / (h + δ))

with the new h in the last line. The prior term stays outside the momentum average. An exact Hessian can be negative
where the loss is not convex; h is kept from falling below zero, so that no weight is less certain than under the prior.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Scalar = float | Tensor


def variance(hess: Tensor, ess: Scalar, damping: Scalar) -> Tensor:
    """σ² = 1/(ess·(h+δ)).

    >>> variance(torch.tensor([0.0, 0.03]), ess=100.0, damping=0.01)
    tensor([1.0000, 0.2500])
    """
    return (ess * (hess + damping)).reciprocal()


def perturbation(hess: Tensor, noise: Tensor, ess: Scalar, damping: Scalar) -> Tensor:
    """σ·ε: what a sample adds to the mean."""
    return noise * (ess * (hess + damping)).rsqrt()


class Step(NamedTuple):
    """What one update leaves behind."""

    mean: Tensor
    hess: Tensor
    momentum: Tensor | None
    unusable: Tensor
    """How many elements were left out because they would not have been finite (0-dim int64)."""


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
) -> Step:
    """One step from ĝ (``grad``) and ĥ (``hess_estimate``), the averages over this step's samples.

    ``step`` counts from 1. ``momentum`` is ``None`` when β₁ = 0. An element that would
    become NaN or infinite keeps its mean, curvature and momentum: one bad gradient must not ruin the posterior, nor
    (h = ∞) silently freeze a weight for ever.
    """
    beta1, beta2 = betas
    new_hess = torch.lerp(hess, hess_estimate, 1 - beta2).clamp_min(0)
    new_momentum, debiased = None, grad
    if momentum is not None:
        new_momentum = torch.lerp(momentum, grad, 1 - beta1)
        debiased = new_momentum / (1 - beta1**step)
    direction = (debiased + damping * (mean - prior_mean)) / (new_hess + damping)
    new_mean = mean - lr * direction.clamp(-clip_radius, clip_radius)
    usable = torch.isfinite(grad) & torch.isfinite(new_hess) & torch.isfinite(new_mean)
    return Step(
        torch.where(usable, new_mean, mean),
        torch.where(usable, new_hess, hess),
        None if momentum is None or new_momentum is None else torch.where(usable, new_momentum, momentum),
        (~usable).sum(),
    )

r"""The full-covariance Gaussian q = N(μ, P⁻¹) over all weights as one vector, and one natural-gradient step on it.

In every function ``hess`` is the per-example curvature H, a matrix; ``ess`` the effective sample size N/τ; ``damping``
is δ = λ/ess: a number, one number per weight, or a matrix. With Δ the matrix that δ stands for

    P = ess·(H + Δ) = ess·LLᵀ,   θ = μ + L⁻ᵀε/√ess
    H ← β₂·H + (1−β₂)·Ĥ
    m ← β₁·m + (1−β₁)·ĝ,   m̂ = m / (1−β₁ᵗ)
    μ ← μ − lr·clip((H + Δ)⁻¹(m̂ + Δ(μ−m₀)))

with the new H in the last line. Away from a minimum the Hessian of a loss that is not convex can make H + Δ (or all but
a thousandth of Δ) indefinite; then H is replaced by its positive part, so that no direction is less certain than under
the prior.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Scalar = float | Tensor


def damped(hess: Tensor, damping: Scalar) -> Tensor:
    """H + Δ."""
    if isinstance(damping, Tensor) and damping.dim() == 2:
        return hess + damping
    total = hess.clone()
    total.diagonal().add_(damping)
    return total


def pull(damping: Scalar, distance: Tensor) -> Tensor:
    """Δ(μ−m₀), the gradient of the prior."""
    if isinstance(damping, Tensor) and damping.dim() == 2:
        return damping @ distance
    return damping * distance


class Factored(NamedTuple):
    """A curvature with the Cholesky factor of H + Δ."""

    hess: Tensor
    factor: Tensor
    """L, lower triangular."""


def factorize(hess: Tensor, damping: Scalar) -> Factored:
    """L with LLᵀ = H + Δ; of the positive part of H where H + Δ/1000 is indefinite. NaN if there is nothing to invert.

    >>> factorize(torch.tensor([[3.0, 0.0], [0.0, -5.0]]), damping=1.0).factor.round(decimals=4)
    tensor([[2., 0.],
            [0., 1.]])
    """
    factor, failed = torch.linalg.cholesky_ex(damped(hess, damping))
    # An eigenvalue of H just above −δ would make a direction far less certain than under the prior.
    _, nearly = torch.linalg.cholesky_ex(damped(hess, 1e-3 * damping))
    if bool(failed) or bool(nearly):
        values, vectors = torch.linalg.eigh(hess)
        # A hair above zero, because the product is rounded.
        floor = torch.finfo(hess.dtype).eps * len(values) * values.abs().max()
        hess = (vectors * values.clamp_min(floor)) @ vectors.T
        factor, failed = torch.linalg.cholesky_ex(damped(hess, damping))
        if bool(failed):  # neither curvature nor prior: the step will be left out
            factor = torch.full_like(factor, torch.nan)
    return Factored(hess, factor)


def perturbation(factor: Tensor, noise: Tensor, ess: float) -> Tensor:
    """L⁻ᵀε/√ess: what a sample adds to the mean."""
    return torch.linalg.solve_triangular(factor.T, noise.unsqueeze(-1), upper=True).squeeze(-1) / ess**0.5


class Step(NamedTuple):
    """What one update leaves behind."""

    mean: Tensor
    curvature: Factored
    momentum: Tensor | None
    clipped: Tensor
    """Which elements of the step were at the clip radius."""


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
    clip_radius: Scalar,
    newest_weight: float | None = None,
) -> Step | None:
    """One step from ĝ (``grad``) and Ĥ (``hess_estimate``), the averages over this step's samples.

    ``newest_weight`` is what Ĥ weighs in the average, 1−β₂ if it is not given. The result is ``None`` if anything is
    not finite: every weight depends on every other one, so none can be left out by itself.
    """
    if not bool(torch.isfinite(grad).all() & torch.isfinite(hess_estimate).all()):
        return None
    beta1, beta2 = betas
    weight = 1 - beta2 if newest_weight is None else newest_weight
    curvature = factorize(torch.lerp(hess, hess_estimate, weight), damping)
    new_momentum, debiased = None, grad
    if momentum is not None:
        new_momentum = torch.lerp(momentum, grad, 1 - beta1)
        debiased = new_momentum / (1 - beta1**step)
    gradient = debiased + pull(damping, mean - prior_mean)
    direction = torch.cholesky_solve(gradient.unsqueeze(-1), curvature.factor).squeeze(-1)
    radius = torch.as_tensor(clip_radius, dtype=mean.dtype, device=mean.device)
    new_mean = mean - lr * torch.minimum(torch.maximum(direction, -radius), radius)
    if not bool(torch.isfinite(new_mean).all()):
        return None
    return Step(new_mean, curvature, new_momentum, direction.abs() > radius)

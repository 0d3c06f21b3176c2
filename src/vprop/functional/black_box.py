r"""Gradients of the negative ELBO of q = N(μ, σ²) in μ and σ, and the steps that black-box methods take with them.

    L = ess·E_q[ℓ] + KL(q ‖ prior)
    ∇_μ L = ess·E[ĝ] + λ(μ−m₀)
    ∇_σ L = ess·E[ĝε] + λσ − 1/σ

Both are divided by ess, so that a step size means the same whatever N is. A step leaves σ between half and twice what
it was: 1/σ is then finite for ever, and σ can neither reach zero nor be thrown to infinity by the gradient of a tiny σ.
"""

from __future__ import annotations

import torch
from torch import Tensor

Scalar = float | Tensor


def mean_gradient(mean: Tensor, grad: Tensor, damping: Scalar, prior_mean: Scalar) -> Tensor:
    """∇_μ L / ess = ĝ + δ(μ−m₀)."""
    return grad + damping * (mean - prior_mean)


def std_gradient(std: Tensor, grad_noise: Tensor, ess: float, damping: Scalar) -> Tensor:
    """∇_σ L / ess = E[ĝε] + δσ − 1/(ess·σ)."""
    return grad_noise + damping * std - (ess * std).reciprocal()


def bounded(new_std: Tensor, std: Tensor) -> Tensor:
    """The new σ, kept between half and twice the old one."""
    return torch.maximum(torch.minimum(new_std, 2 * std), std / 2)


def rmsprop_direction(grad: Tensor, square_avg: Tensor, beta2: float, eps: float) -> tuple[Tensor, Tensor]:
    """(G/(√v+eps), v) with v ← β₂v + (1−β₂)G²."""
    square_avg = torch.lerp(square_avg, grad.square(), 1 - beta2)
    return grad / (square_avg.sqrt() + eps), square_avg


def adam_direction(
    grad: Tensor, avg: Tensor, square_avg: Tensor, step: Scalar, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(m̂/(√v̂+eps), m, v), debiased as Adam does."""
    avg = torch.lerp(avg, grad, 1 - betas[0])
    square_avg = torch.lerp(square_avg, grad.square(), 1 - betas[1])
    corrected = (square_avg / (1 - betas[1] ** step)).sqrt() + eps
    return avg / (1 - betas[0] ** step) / corrected, avg, square_avg

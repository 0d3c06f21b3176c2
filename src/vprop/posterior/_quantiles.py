"""Quantiles of samples, of normal distributions and of their mixtures, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from vprop.checks import invalid, is_finite


def check_probability(name: str, value: object) -> float:
    """``value`` as a float, if it is strictly between 0 and 1."""
    if not is_finite(value) or not 0 < float(value) < 1:  # type: ignore[arg-type]
        raise invalid(name, value, "a number between 0 and 1", f"Pass e.g. {name}=0.9.")
    return float(value)  # type: ignore[arg-type]


def sample_quantile(values: Tensor, q: float) -> Tensor:
    """Of samples in the first dimension, linear between neighbours (torch.quantile takes 2²⁴ elements at most)."""
    ordered, place = values.sort(0).values, q * (len(values) - 1)
    low = int(place)
    return ordered[low].lerp(ordered[min(low + 1, len(values) - 1)], place - low)


def normal_quantile(mean: Tensor, variance: Tensor, q: float) -> Tensor:
    """μ + σ·Φ⁻¹(q).

    >>> round(float(normal_quantile(torch.tensor(1.0), torch.tensor(4.0), 0.975)), 3)
    4.92
    """
    return mean + variance.sqrt() * _standard(q, mean)


def mixture_quantile(means: Tensor, variances: Tensor, q: float) -> Tensor:
    """The t with 1/S Σₛ Φ((t−μₛ)/σₛ) = q, for S normal distributions in the first dimension.

    It lies between the smallest and the largest of their own quantiles, because there the sum is at most and at least
    q; bisection halves that interval until the floating-point numbers end. Without any variance it is a step's place.

    >>> means = torch.tensor([-10.0, 10.0])
    >>> round(float(mixture_quantile(means, torch.ones(2), 0.25)), 3)  # the median of the first
    -10.0
    """
    if q > 0.5:  # 1 − q has the digits there that q has not in float32
        return -mixture_quantile(-means, variances, 1 - q)
    stds = variances.sqrt()
    own = means + stds * _standard(q, means)
    low, high = own.min(0).values, own.max(0).values
    stds = stds.clamp_min(torch.finfo(stds.dtype).tiny)
    for _ in range(60 if means.dtype == torch.float64 else 32):
        middle = low + (high - low) / 2
        below = torch.special.ndtr((middle - means) / stds).mean(0) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + (high - low) / 2


def _standard(q: float, like: Tensor) -> Tensor:
    return torch.special.ndtri(torch.tensor(q, dtype=torch.float64, device="cpu")).to(like)

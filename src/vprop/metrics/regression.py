"""Regression: errors of the mean, and scores of a Gaussian with a mean and a variance for each observation.

``mean`` and ``y`` have one shape, ``variance`` has it as well or is one number. Of a ``Prediction`` pass ``mean`` and
``variance``, that of an observation, rather than ``epistemic_variance``, that of its mean. NaN gives NaN.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from vprop.metrics._arguments import check_level, has_nan, invalid, real, shape_of


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root of the mean squared error, √(1/n Σᵢ (yᵢ − μᵢ)²).

    >>> round(rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0])), 4)
    3.5355
    """
    mean, y = _pair(mean, y)
    return math.sqrt(float((y - mean).square().mean()))


def gaussian_nll(mean: Tensor, variance: float | Tensor, y: Tensor) -> float:
    """Mean negative log-density of ``y``, 1/n Σᵢ ½ (log 2πσᵢ² + (yᵢ − μᵢ)²/σᵢ²), in nats.

    >>> round(gaussian_nll(torch.tensor([0.0]), 1.0, torch.tensor([1.0])), 4)  # (log 2π + 1) / 2
    1.4189
    """
    mean, y = _pair(mean, y)
    variance = _variance(variance, mean)
    if bool((variance == 0).any()):
        remedy = "Add the variance of the noise, or clamp it: a certain observation has no density."
        raise invalid("variance", "has zeros", "> 0 for a log-density", remedy)
    return float(0.5 * ((2 * math.pi * variance).log() + (y - mean).square() / variance).mean())


def crps_gaussian(mean: Tensor, variance: float | Tensor, y: Tensor) -> float:
    """Mean continuous ranked probability score of N(μ, σ²), in the units of ``y``; smaller is better.

    ∫ (F(x) − 1{x ≥ y})² dx, which for a Gaussian is σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y−μ)/σ (Gneiting and
    Raftery, 2007). Without variance it is the absolute error |y−μ|.

    >>> round(crps_gaussian(torch.tensor([0.0]), 1.0, torch.tensor([0.0])), 4)  # (√2 − 1) / √π
    0.2337
    """
    mean, y = _pair(mean, y)
    std = _variance(variance, mean).sqrt()
    distance = y - mean
    z = torch.where(distance == 0, distance, distance / std)  # 0/0 is 0 here: no variance, and right
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    scores = distance * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    return float(scores.mean())


def coverage(mean: Tensor, variance: float | Tensor, y: Tensor, level: float = 0.9) -> float:
    """Share of ``y`` inside the central interval that holds ``level`` of N(μ, σ²), its ends included.

    The interval is μ ± σ Φ⁻¹((1 + level)/2). Error bars of the right size give a coverage of about ``level``, too small
    ones less, too large ones more.

    >>> coverage(torch.zeros(4), 1.0, torch.tensor([-2.0, -1.0, 1.0, 1.5]))  # inside ±1.645
    0.75
    """
    check_level(level)
    mean, y = _pair(mean, y)
    std = _variance(variance, mean).sqrt()
    if has_nan(mean, std, y):
        return math.nan
    half_width = math.sqrt(2) * torch.erfinv(torch.tensor(float(level), dtype=torch.float64, device="cpu")).item()
    return float(((y - mean).abs() <= half_width * std).double().mean())


def _pair(mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, of one shape: (n,) and (n, 1) would silently become (n, n)."""
    mean, y = real("mean", mean), real("y", y)
    if mean.shape != y.shape:
        found, allowed = f"has shape {shape_of(mean)}", f"that of y, {shape_of(y)}"
        raise invalid("mean", found, allowed, "Reshape one of them, mean.reshape(y.shape).")
    return mean, y.to(mean.device)


def _variance(variance: float | Tensor, mean: Tensor) -> Tensor:
    if isinstance(variance, Real) and not isinstance(variance, bool):
        variance = torch.tensor(float(variance), dtype=torch.float64, device=mean.device)
    wide = real("variance", variance).to(mean.device)
    if wide.numel() == 1:
        wide = wide.reshape(())
    elif wide.shape != mean.shape:
        found, allowed = f"has shape {shape_of(wide)}", f"one number or of the shape of mean, {shape_of(mean)}"
        raise invalid("variance", found, allowed, "Expand it, variance.expand(mean.shape).")
    if bool((wide < 0).any()):
        remedy = "It is the variance, not its logarithm."
        raise invalid("variance", f"has the smallest value {float(wide.min()):.6g}", ">= 0", remedy)
    return wide.expand(mean.shape)

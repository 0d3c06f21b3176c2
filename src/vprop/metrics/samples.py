"""Regression with any predictive distribution, from samples of it.

``samples`` has the samples first, then the shape of ``y``. They are samples of *observations*; those of a
``Prediction``, ``s``, are of the mean, so add the noise: ``s + noise_std * torch.randn_like(s)``. NaN gives NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.metrics._arguments import check_level, has_nan, invalid, real, shape_of


def crps_samples(samples: Tensor, y: Tensor) -> float:
    """Mean continuous ranked probability score, in the units of ``y``; smaller is better.

    The fair estimate from S samples, 1/S Σₖ |xₖ − y| − 1/(2S(S−1)) Σₖₗ |xₖ − xₗ|: its expectation is the score of the
    distribution that the samples come from, whatever S (Ferro, 2014), while 1/(2S²) would score their histogram and
    favour many samples. It can be negative. The double sum is one over sorted samples, 2 Σₖ (2k − S − 1) x₍ₖ₎.

    >>> round(crps_samples(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([2.0])), 4)  # 3/3 - 8/12
    0.3333
    """
    samples, y = _samples_of(samples, y)
    count = len(samples)
    if count < 2:
        raise invalid("samples", f"has {count} sample", "at least 2", "The spread of one sample is unknown.")
    error = (samples - y).sort(0).values  # relative to y: a common offset would cost digits in the sum below
    ranks = torch.arange(1, count + 1, dtype=torch.float64, device=samples.device)
    spread = torch.tensordot(2 * ranks - count - 1, error, dims=1) / (count * (count - 1))
    return float((error.abs().mean(0) - spread).mean())


def sample_coverage(samples: Tensor, y: Tensor, level: float = 0.9) -> float:
    """Share of ``y`` inside the central interval that holds ``level`` of the samples, its ends included.

    The ends are the order statistics at positions (S+1)(1 ∓ level)/2, linear in between: an observation from the same
    distribution as the S samples is as likely to fall into any of the S+1 gaps, so the expected coverage is ``level``.
    That takes at least 2/(1−level) − 1 samples, 19 for 90 %: the interval may not end beyond the outermost ones.

    >>> samples = torch.arange(1.0, 20.0)[:, None].expand(19, 3)
    >>> sample_coverage(samples, torch.tensor([0.5, 1.0, 19.0]))  # from 1 to 19
    0.6666666666666666
    """
    check_level(level)
    samples, y = _samples_of(samples, y)
    position = _position(len(samples), level)
    if has_nan(samples, y):
        return math.nan
    ordered = samples.sort(0).values
    below, between = math.floor(position), position - math.floor(position)
    low = torch.lerp(ordered[below - 1], ordered[below], between)
    high = torch.lerp(ordered[-below], ordered[-below - 1], between)
    return float(((low <= y) & (y <= high)).double().mean())


def _position(count: int, level: float) -> float:
    """How many samples in from either side the interval ends, 1 being the outermost."""
    position = (count + 1) * (1 - level) / 2
    if math.isclose(position, round(position), rel_tol=1e-9):
        position = round(position)  # 20 * (1 - 0.9) / 2 is one, but for rounding
    if position < 1:
        needed = math.ceil(2 / (1 - level) - 1 - 1e-9)
        remedy = "Draw more samples or lower the level."
        raise invalid("samples", f"has {count} samples", f"at least {needed} for level={level!r}", remedy)
    return position


def _samples_of(samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    samples, y = real("samples", samples), real("y", y)
    if samples.shape[1:] != y.shape or samples.dim() == 0:
        allowed = f"the samples first and then the shape of y, {shape_of(y)}"
        raise invalid(
            "samples", f"has shape {shape_of(samples)}", allowed, "Use samples.movedim(-1, 0) if they are last."
        )
    return samples, y.to(samples.device)

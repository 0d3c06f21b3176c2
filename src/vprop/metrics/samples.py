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

    An observation from the same distribution as the S samples is as likely to fall into any of the S+1 gaps that they
    leave, so the interval from the r-th smallest to the r-th largest sample holds it with probability 1 − 2r/(S+1),
    whatever the distribution. Between two of these, ``level`` is a mixture: an observation that is inside the outer
    interval only counts as the share that the outer one has in it. So the expected coverage is ``level`` exactly, which
    ends between two samples (where a distribution's shape matters) would miss: 0.908 for 0.9 and 32 normal samples.
    The widest interval, r = 1, holds 1 − 2/(S+1): a level takes at least 2/(1−level) − 1 samples, 19 for 90 %.

    >>> samples = torch.arange(1.0, 20.0)[:, None].expand(19, 3)
    >>> sample_coverage(samples, torch.tensor([0.5, 1.0, 19.0]))  # from 1 to 19
    0.6666666666666666
    """
    check_level(level)
    samples, y = _samples_of(samples, y)
    rank, share = _outer_interval(len(samples), level)
    if has_nan(samples, y):
        return math.nan
    ordered = samples.sort(0).values
    outer, inner = (_inside(ordered, rank + further, y) for further in (0, 1))
    return share * outer + (1 - share) * inner


def _inside(ordered: Tensor, rank: int, y: Tensor) -> float:
    """Share of ``y`` from the ``rank``-th smallest to the ``rank``-th largest sample; past the middle there is none."""
    if 2 * rank > len(ordered) + 1:
        return 0.0
    return float(((ordered[rank - 1] <= y) & (y <= ordered[-rank])).double().mean())


def _outer_interval(count: int, level: float) -> tuple[int, float]:
    """Rank r of the sample where the narrowest interval ends that holds ``level`` or more, 1 being the outermost.

    And its share w in the mixture with the next one inside: w·cᵣ + (1−w)·cᵣ₊₁ = level, with cᵣ = 1 − 2r/(count+1).

    >>> _outer_interval(19, 0.9), _outer_interval(5, 0.5)
    ((1, 1.0), (1, 0.5))
    """
    position = (count + 1) * (1 - level) / 2
    if math.isclose(position, round(position), rel_tol=1e-9):
        position = round(position)  # 20 * (1 - 0.9) / 2 is one, but for rounding
    if position < 1:
        needed = math.ceil(2 / (1 - level) - 1 - 1e-9)
        remedy = "Draw more samples or lower the level."
        raise invalid("samples", f"has {count} samples", f"at least {needed} for level={level!r}", remedy)
    rank = math.floor(position)
    inner = min(rank + 1, (count + 1) / 2)  # an interval that would end past the middle is empty: it holds 0, not less
    return rank, (inner - position) / (inner - rank) if rank < inner else 1.0


def _samples_of(samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    samples, y = real("samples", samples), real("y", y)
    if samples.shape[1:] != y.shape or samples.dim() == 0:
        allowed = f"the samples first and then the shape of y, {shape_of(y)}"
        raise invalid(
            "samples", f"has shape {shape_of(samples)}", allowed, "Use samples.movedim(-1, 0) if they are last."
        )
    return samples, y.to(samples.device)

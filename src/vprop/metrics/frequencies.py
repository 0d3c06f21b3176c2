"""A reliability diagram that says how much of it is chance: bins with enough examples in them, and error bars."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vprop.checks import is_number, shown
from vprop.metrics._arguments import check_bins, check_level, invalid
from vprop.metrics._labelled import Task
from vprop.metrics.calibration import bin_edges, confidence_and_hits


class CalibrationCurve(NamedTuple):
    """Mean confidence, frequency and its error bar in each bin, and how many examples are in it.

    ``low`` and ``high`` bound the frequency that the examples of the bin are a sample of, at the ``level`` that was
    asked for. Calibration is in doubt where the mean confidence is outside of them. ``small`` says which bins have
    fewer examples than ``least`` although they were merged: all data together are too few.
    """

    confidence: list[float]
    accuracy: list[float]
    low: list[float]
    high: list[float]
    examples: list[int]
    small: list[bool]


def calibration_curve(
    probs: Tensor,
    labels: Tensor,
    *,
    task: Task | None = None,
    bins: int = 15,
    least: int = 20,
    level: float = 0.95,
) -> CalibrationCurve:
    """How often predictions of some confidence are right, in bins that hold at least ``least`` examples.

    Bins of equal width, as in :func:`reliability`; one that holds too few is merged with its neighbour above, and the
    last one with that below. A binary task is about the probability of label 1, a multiclass one about that of the
    predicted class. The error bar is Wilson's interval: the frequencies p for which the number of hits, k of n, is
    within z standard deviations of what p expects, |k/n − p| ≤ z·√(p(1−p)/n),

        p = (k/n + z²/2n ± z·√(k/n·(1−k/n)/n + z²/4n²)) / (1 + z²/n)

    which stays inside of [0, 1] and has a width where all are right, as k/n ± z·√(k/n·(1−k/n)/n) has not.

    >>> curve = calibration_curve(torch.tensor([[0.75, 0.25]] * 20), torch.tensor([0] * 14 + [1] * 6))
    >>> [round(value, 3) for value in (*curve.confidence, *curve.accuracy, *curve.low, *curve.high)], curve.examples
    ([0.75, 0.7, 0.481, 0.855], [20])
    """
    check_bins(bins)
    check_level(level)
    if not is_number(least, whole=True) or least < 1:
        raise ValueError(f"Invalid least={shown(least)}: must be an integer >= 1. 20 is the default.")
    confidence, hits, dtype = confidence_and_hits(probs, labels, task)
    number = torch.bucketize(confidence.contiguous(), bin_edges(bins, dtype, confidence), right=True)
    curve = CalibrationCurve([], [], [], [], [], [])
    for members in _merged([int(size) for size in torch.bincount(number, minlength=bins)], least):
        inside = (number >= members.start) & (number < members.stop)
        count, right = int(inside.sum()), int(hits[inside].sum())
        low, high = wilson_interval(right, count, level)
        curve.confidence.append(float(confidence[inside].mean()))
        curve.accuracy.append(right / count)
        curve.low.append(low)
        curve.high.append(high)
        curve.examples.append(count)
        curve.small.append(count < least)
    return curve


def wilson_interval(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """The frequencies of which ``hits`` out of ``count`` is not an unlikely sample; see :func:`calibration_curve`.

    >>> [round(end, 4) for end in wilson_interval(0, 10)]  # 0 and z²/(n + z²)
    [0.0, 0.2775]
    """
    check_level(level)
    if not is_number(hits, whole=True) or not is_number(count, whole=True) or not 0 <= hits <= count or count == 0:
        found = f"is {shown(hits)} of {shown(count)}"
        raise invalid("hits", found, "an integer from 0 to count, and count >= 1", "Pass sums of 0s and 1s.")
    wide = torch.tensor((1 + float(level)) / 2, dtype=torch.float64, device="cpu")
    z = float(torch.special.ndtri(wide))
    share, spread = hits / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _merged(counts: list[int], least: int) -> list[range]:
    """Neighbouring bins together, so that each run of them holds ``least`` examples if all of them do.

    >>> _merged([30, 5, 0, 25, 3], 20)
    [range(0, 1), range(1, 5)]
    """
    runs, start, held = [], 0, 0
    for number, count in enumerate(counts):
        held += count
        if held >= least:
            runs.append(range(start, number + 1))
            start, held = number + 1, 0
    if not runs:
        return [range(0, len(counts))]
    runs[-1] = range(runs[-1].start, len(counts)) if held else runs[-1]
    return runs

"""Ranges of axes that a diverging curve cannot squash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Curve = Sequence["float | None"]


def limits(curves: list[Curve], lines: list[float], *, higher_is_better: bool) -> tuple[float, float] | None:
    """A range with all lines, the late part of every curve that has not diverged, and 90% of those curves' points.

    >>> low, high = limits([[-9.0, -3.0, -2.0, -2.0], [-9.0, -1e6, -1e9, None]], [-1.5], higher_is_better=True)
    >>> -12 < low < -2, -1.5 < high < 0
    (True, True)
    """
    sign = 1 if higher_is_better else -1
    levels = [sign * line for line in lines]
    kept = _kept(curves, levels, sign)
    if not kept and not levels:
        return None
    pool = np.concatenate(kept) if kept else np.array(levels)
    best = max([*levels, float(np.quantile(pool, 0.99))])
    worst = min([*levels, float(np.quantile(pool, 0.1)), *(min(_late(curve), float(curve[-1])) for curve in kept)])
    pad = 0.07 * (best - worst) or 0.05 * abs(best) or 1.0
    ends = sorted((sign * (best + 1.3 * pad), sign * (worst - pad)))  # more room where the lines' labels are
    return ends[0], ends[1]


def distance_limits(curves: list[Curve], reference: float) -> tuple[float, float] | None:
    """The range of ``reference`` − curve, for a logarithmic axis."""
    kept = _kept(curves, [reference], 1)
    pool = reference - np.concatenate(kept) if kept else np.array([])
    pool = pool[pool > 0]
    if not len(pool):
        return None
    low, high = float(np.quantile(pool, 0.01)), float(np.quantile(pool, 0.97))
    return low / 1.5, max(high, 10 * low) * 1.5


def first_and_last(methods: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """The smallest positive and the largest value of ``passes``, for a logarithmic axis."""
    values = [value for method in methods for value in method[key] if value is not None and value > 0]
    return (min(values), max(values)) if values else (1.0, 10.0)


def _kept(curves: list[Curve], levels: list[float], sign: int) -> list[np.ndarray]:
    """The curves that stay in sight, times ``sign`` so that higher is better; all of them if every one diverged."""
    arrays = [(sign * np.array([v for v in curve if v is not None]), curve[-1] is None) for curve in curves if curve]
    arrays = [(array, ended) for array, ended in arrays if array.size]
    if not arrays:
        return []
    best = max([*levels, *(float(np.quantile(array, 0.95)) for array, _ in arrays)])
    start_gap = float(np.median([best - array[0] for array, _ in arrays]))
    gaps = [best - _late(array) for array, _ in arrays]
    usual = float(np.quantile(gaps, 0.5, method="lower"))
    kept = [
        array
        for (array, ended_in_null), gap in zip(arrays, gaps, strict=True)
        # worse than where it began, or worse than most by orders of magnitude
        if not ended_in_null and gap <= max(4 * start_gap, 3 * usual) and gap <= 1000 * max(usual, 1e-12)
    ]
    return kept or [array for array, _ in arrays]


def _late(array: np.ndarray) -> float:
    """The level of the last quarter."""
    return float(np.median(array[-max(1, len(array) // 4) :]))

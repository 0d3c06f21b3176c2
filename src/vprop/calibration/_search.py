"""The least value of a function of one positive number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_GOLDEN = (math.sqrt(5) - 1) / 2


class Minimum(NamedTuple):
    """Where a function is least, its value there and at 1, and whether that is at an end of the range."""

    value: float
    loss: float
    loss_at_one: float
    at_limit: bool


def minimum(
    loss: Callable[[float], float], low: float, high: float, *, step: float = 0.5, tolerance: float = 1e-6
) -> Minimum:
    """The least ``loss(value)`` for ``value`` from ``low`` < 1 to ``high`` > 1.

    A grid in log(value) with ``step`` between its points, one of them value 1, then a golden-section search between the
    neighbours of its best point until log(value) is known to ``tolerance``. The grid finds the right valley where
    there are several that are wider than its steps; the result is never worse than at 1.

    >>> found = minimum(lambda value: value - 2 * math.log(value), 0.01, 100.0)
    >>> round(found.value, 4), round(found.loss, 4), found.loss_at_one
    (2.0, 0.6137, 1.0)
    """
    below, above = (math.ceil(abs(math.log(end)) / step) for end in (low, high))
    points = [max(math.log(low), min(math.log(high), i * step)) for i in range(-below, above + 1)]
    seen = {point: loss(math.exp(point)) for point in points}
    best = min(points, key=lambda point: (_rank(seen[point]), abs(point)))  # the one closest to 1 where all is flat
    place, at_one = points.index(best), seen[0.0]
    if place in (0, len(points) - 1):
        return Minimum(math.exp(best), seen[best], at_one, at_limit=True)
    left, right = points[place - 1], points[place + 1]
    while right - left > tolerance:
        inner, outer = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        for point in (inner, outer):
            if point not in seen:
                seen[point] = loss(math.exp(point))
        if _rank(seen[inner]) <= _rank(seen[outer]):
            right = outer
        else:
            left = inner
    best = min(seen, key=lambda point: (_rank(seen[point]), abs(point)))
    return Minimum(math.exp(best), seen[best], at_one, at_limit=False)


def _rank(loss: float) -> float:
    """NaN, of a model that overflows, is worse than any number."""
    return math.inf if math.isnan(loss) else loss

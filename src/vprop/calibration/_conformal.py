"""The quantile that split conformal prediction rests on.

Scores of n calibration examples and of a new one are exchangeable, if the examples are: the new score is as likely to
have any of the n+1 ranks among them. It is at most the k-th smallest of the n with probability k/(n+1) or more (more
only by ties), so that

    k = ⌈(n+1)·level⌉           P(new score ≤ k-th smallest score) ≥ level, and < level + 1/(n+1) without ties

whatever the model and the distribution. k ≤ n takes n ≥ level/(1−level): with fewer examples no threshold that the
examples tell would do, only an infinite one.

A score that is tied with the threshold counts as below it, and with few different inputs (features that are classes
themselves) many are. The same input in a batch of another size has other roundings, so that the comparison must let
them pass: else the ties, and with them the coverage, would be a matter of chance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-5
"""Relative difference of two predictions for one input in float32, generously."""


def needed_examples(level: float) -> int:
    """The least n with ⌈(n+1)·level⌉ ≤ n.

    >>> [needed_examples(level) for level in (0.5, 0.8, 0.9, 0.95, 0.99)]
    [1, 4, 9, 19, 99]
    """
    return math.ceil(level / (1 - level) - 1e-9)


def conformal_quantile(scores: Tensor, level: float, where: str) -> Tensor:
    """The ⌈(n+1)·level⌉-th smallest of the scores (n, …), for each column by itself."""
    count, needed = len(scores), needed_examples(level)
    if count < needed:
        raise ValueError(
            f"{where}: the calibration set has {count} example{'' if count == 1 else 's'}, must have at least {needed} "
            f"for level={level:g}: with fewer no threshold is high enough. Hold out more data, or lower the level to "
            f"{count / (count + 1):.3g} or less."
        )
    if bool(torch.isnan(scores).any()):
        raise ValueError(
            f"{where}: there are NaN among the scores. They come from targets that are NaN, or from a model that "
            "has diverged."
        )
    rank = math.ceil((count + 1) * level - 1e-9)  # 10·0.9 is 9, but for rounding
    return scores.sort(0).values[rank - 1]

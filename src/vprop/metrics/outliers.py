"""Telling inputs unlike the training data from those like it, by a score: what lies behind :func:`auroc`.

As for :func:`auroc`, scores are uncertainties of any scale, the inputs unlike the training data are the positives, and
an input is called one of them where its score is at or above a threshold. Inputs with one score are called alike, so
ties are one step of a curve and their order does not matter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vprop.checks import is_number, shown
from vprop.metrics._arguments import has_nan, real


class OutlierCurve(NamedTuple):
    """What each threshold finds, from the highest threshold (nothing is called an outlier) to the lowest.

    ``true_positive_rate`` is the share of the unknown inputs that are found (the recall), ``false_positive_rate`` that
    of the known ones which are called unknown, ``precision`` the share of unknown inputs among all that are called so
    (1 where none is). The first threshold is infinite.
    """

    threshold: Tensor
    true_positive_rate: Tensor
    false_positive_rate: Tensor
    precision: Tensor


def outlier_curve(scores_in: Tensor, scores_out: Tensor) -> OutlierCurve:
    """Rates and precision at every threshold that makes a difference: the ROC and the precision–recall curve.

    >>> curve = outlier_curve(torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.75]))
    >>> curve.threshold.tolist()[1:]
    [0.75, 0.5, 0.0]
    >>> curve.true_positive_rate.tolist(), curve.false_positive_rate.tolist()
    ([0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 0.5, 1.0])
    """
    known, unknown = real("scores_in", scores_in).flatten(), real("scores_out", scores_out).flatten()
    if has_nan(known, unknown):
        raise ValueError(
            "Invalid scores: there are NaN among them, must be numbers, which can be put in order. NaN comes from a "
            "model that has diverged."
        )
    unknown = unknown.to(known.device)
    thresholds = torch.cat([known, unknown]).unique().flip(0)
    found, mistaken = (_at_or_above(scores, thresholds) for scores in (unknown, known))
    none = torch.zeros(1, dtype=torch.float64, device=known.device)
    return OutlierCurve(
        torch.cat([none + math.inf, thresholds]),
        torch.cat([none, found / len(unknown)]),
        torch.cat([none, mistaken / len(known)]),
        torch.cat([none + 1, found / (found + mistaken)]),
    )


def aupr(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the precision–recall curve, unknown inputs being the positives: the average precision.

    Σₜ (Rₜ − Rₜ₋₁)·Pₜ over thresholds from the highest to the lowest, with Pₜ and Rₜ precision and recall at t: the
    mean, over unknown inputs, of the precision at their own scores. Straight lines between the points would promise
    precisions that no threshold has. Chance is the share of unknown inputs, n_out/(n_in + n_out), not ½: unlike the
    AUROC it depends on how many there are. NaN among the scores gives NaN.

    >>> aupr(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))  # (1 + 2/3) / 2
    0.8333333333333333
    """
    if has_nan(real("scores_in", scores_in), real("scores_out", scores_out)):
        return math.nan
    curve = outlier_curve(scores_in, scores_out)
    return float((curve.true_positive_rate.diff() * curve.precision[1:]).sum())


def fpr_at_tpr(scores_in: Tensor, scores_out: Tensor, tpr: float = 0.95) -> float:
    """Share of known inputs that are called unknown when at least ``tpr`` of the unknown ones are found.

    The threshold is the highest with which so many are found: the ⌈tpr·n_out⌉-th highest score of an unknown input. 0
    is perfect, chance is about ``tpr``. Some papers take the *known* inputs for the positives; pass
    ``fpr_at_tpr(-scores_out, -scores_in)`` for their figure. NaN among the scores gives NaN.

    >>> fpr_at_tpr(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))  # all found at 0.35: one of four
    0.25
    """
    if not is_number(tpr) or not 0 < tpr <= 1:
        raise ValueError(f"Invalid tpr={shown(tpr)}: must be a number in (0, 1]. 0.95 is the default.")
    known, unknown = real("scores_in", scores_in).flatten(), real("scores_out", scores_out).flatten()
    if has_nan(known, unknown):
        return math.nan
    needed = max(1, math.ceil(float(tpr) * len(unknown) - 1e-9))  # 0.95·20 is 19, but for rounding
    threshold = unknown.sort(descending=True).values[needed - 1].to(known.device)
    return float((known >= threshold).double().mean())


def _at_or_above(scores: Tensor, thresholds: Tensor) -> Tensor:
    """How many scores are at or above each threshold."""
    below = torch.searchsorted(scores.sort().values, thresholds, side="left")
    return (len(scores) - below).double()

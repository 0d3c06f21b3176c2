"""Scores of predictions: of the labels, and of how well uncertainty tells outliers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vprop import metrics
from vprop.lab.deep.predictions import Averaged, log_loss
from vprop.lab.engine.store import finite_or_none

LABEL_SCORES = ("accuracy", "nll", "ece", "brier")
OUTLIER_SCORES = ("auroc_entropy", "fpr95_entropy", "auroc_information", "fpr95_information")


def score_labels(probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Accuracy, log-loss, calibration error in 15 bins, Brier score; ``None`` for all if the network diverged."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(LABEL_SCORES)
    labels = labels.flatten()
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": finite_or_none(log_loss(probs, labels)),
        "ece": metrics.expected_calibration_error(probs, labels),
        "brier": metrics.brier(probs, labels),
    }


def diagram(probs: Tensor, labels: Tensor) -> dict[str, list[float]] | None:
    """The reliability diagram in 15 bins; none of a network that diverged."""
    if not bool(torch.isfinite(probs).all()):
        return None
    found = metrics.reliability(probs, labels.flatten())
    values = {"confidence": found.confidence, "accuracy": found.accuracy, "share": found.share}
    return {name: [round(value, 5) for value in numbers] for name, numbers in values.items()}


def score_outliers(known: Averaged, unknown: Averaged) -> dict[str, float | None]:
    """AUROC, and the share of outliers that pass for known when 95 % of the known do, by two uncertainties.

    The entropy of the mean probabilities, and the mutual information of label and weights: its part that the draws
    disagree about. The second is left out where there is one draw only, and nothing to disagree.
    """
    if not (bool(torch.isfinite(known.probs).all()) and bool(torch.isfinite(unknown.probs).all())):
        return dict.fromkeys(OUTLIER_SCORES)
    entropies = [torch.special.entr(one.probs).sum(-1) for one in (known, unknown)]
    scores: dict[str, float | None] = {
        "auroc_entropy": metrics.auroc(*entropies),
        "fpr95_entropy": false_positives(*entropies),
    }
    shared = [entropy - one.expected_entropy for entropy, one in zip(entropies, (known, unknown), strict=True)]
    if known.draws > 1:
        scores |= {"auroc_information": metrics.auroc(*shared), "fpr95_information": false_positives(*shared)}
    return scores


def false_positives(known: Tensor, unknown: Tensor, share: float = 0.95) -> float:
    """The share of unknown inputs whose score is no higher than that which ``share`` of the known ones have.

    >>> false_positives(torch.arange(100.0), torch.tensor([1.0, 94.0, 95.0, 200.0]))
    0.5
    """
    known = known.double().sort().values
    bound = known[max(0, -(-round(share * 1e9) * len(known) // 10**9) - 1)]
    return float((unknown.double() <= bound).double().mean())

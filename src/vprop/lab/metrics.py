"""How good predicted probabilities are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of examples whose most probable class is right."""
    return float((probs.argmax(-1) == labels).double().mean())


def log_loss(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the labels, in nats."""
    return float(-probs.double().gather(-1, labels[:, None]).clamp_min(1e-300).log().mean())


class Reliability(NamedTuple):
    """A reliability diagram: mean confidence, accuracy and share of the examples in each non-empty bin."""

    confidence: list[float]
    accuracy: list[float]
    share: list[float]

    @property
    def expected_calibration_error(self) -> float:
        """The mean distance of confidence and accuracy, weighted by share."""
        return sum(s * abs(c - a) for c, a, s in zip(self.confidence, self.accuracy, self.share, strict=True))


def reliability(probs: Tensor, labels: Tensor, bins: int = 10) -> Reliability:
    """Confidence of the predicted class against how often it is right, in ``bins`` bins of equal width.

    >>> import torch
    >>> reliability(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])).expected_calibration_error
    0.25
    """
    confidence, predicted = probs.double().max(-1)
    right = (predicted == labels).double()
    bin_number = (confidence * bins).long().clamp_max(bins - 1)
    result = Reliability([], [], [])
    for i in range(bins):
        inside = bin_number == i
        if inside.any():
            result.confidence.append(float(confidence[inside].mean()))
            result.accuracy.append(float(right[inside].mean()))
            result.share.append(float(inside.double().mean()))
    return result

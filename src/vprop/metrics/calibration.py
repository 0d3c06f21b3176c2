"""Whether predicted probabilities are the frequencies that then happen.

Probabilities are put into B bins of equal width: bin b holds b/B ≤ p < (b+1)/B, the last one p = 1 as well. Edges are
rounded to the dtype of the probabilities, so that 0.7 lies on an edge in float32 as in float64. torchmetrics bins alike
except that it gives p = 1 a bin of its own, one more than was asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vprop.metrics._arguments import check_bins
from vprop.metrics._labelled import Labelled, Task, labelled


class Reliability(NamedTuple):
    """A reliability diagram: mean confidence, accuracy and share of the examples in each non-empty bin.

    For binary tasks they are the mean probability of label 1 and how often the label is 1.
    """

    confidence: list[float]
    accuracy: list[float]
    share: list[float]

    @property
    def expected_calibration_error(self) -> float:
        """The mean distance of confidence and accuracy, weighted by share."""
        return sum(s * abs(c - a) for c, a, s in zip(self.confidence, self.accuracy, self.share, strict=True))


def reliability(probs: Tensor, labels: Tensor, *, task: Task | None = None, bins: int = 15) -> Reliability:
    """Confidence against how often it is right, in ``bins`` bins of equal width.

    Multiclass: the probability of the predicted class, against the share of examples where that class is the label.
    Binary: the probability of label 1, whichever label it favours, against the share of examples with label 1.
    Multilabel tasks have a diagram for each label, ``reliability(probs[:, i], labels[:, i])``.

    >>> reliability(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    Reliability(confidence=[0.75], accuracy=[0.5], share=[1.0])
    >>> reliability(torch.tensor([0.25, 0.25]), torch.tensor([0, 1]))
    Reliability(confidence=[0.25], accuracy=[0.5], share=[1.0])
    """
    check_bins(bins)
    confidence, hits, dtype = confidence_and_hits(probs, labels, task)
    return _diagram(confidence, hits, bin_edges(bins, dtype, confidence))


def expected_calibration_error(probs: Tensor, labels: Tensor, *, task: Task | None = None, bins: int = 15) -> float:
    """Expected calibration error, Σ_b share_b · |confidence_b − accuracy_b| over ``bins`` bins of equal width (l1).

    0 is perfect calibration, 1 the worst. Confidence and accuracy are those of ``reliability``: of the predicted class
    for multiclass tasks (as in Guo et al., 2017), of label 1 for binary ones; two classes passed as (n, 2) therefore
    have another error than the same probabilities passed as (n,). Multilabel: the mean over labels of their binary
    errors. The figure depends on ``bins``, and is biased upwards for few examples per bin.

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    >>> probs, labels = torch.tensor([[0.25, 1.0], [0.25, 0.0]]), torch.tensor([[0, 1], [1, 0]])
    >>> expected_calibration_error(probs, labels)  # 0.25 for the first label, 0 for the second
    0.125
    """
    check_bins(bins)
    data = labelled(probs, labels, task)
    edges = bin_edges(bins, data.dtype, data.probs)
    errors = [_diagram(*column, edges).expected_calibration_error for column in _columns(data)]
    return sum(errors) / len(errors)


def confidence_and_hits(probs: Tensor, labels: Tensor, task: Task | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """For each example the confidence, whether it was right (1 or 0), and the dtype that confidences came in.

    Of the predicted class, or, for a binary task, of label 1.
    """
    data = labelled(probs, labels, task)
    if data.task == "multilabel":
        raise ValueError(
            "Invalid task='multilabel': must be 'binary' or 'multiclass' for one diagram. Draw one for each label, "
            "reliability(probs[:, i], labels[:, i]); expected_calibration_error averages over them."
        )
    ((confidence, hits),) = _columns(data)
    return confidence, hits, data.dtype


def bin_edges(bins: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The inner edges of bins of equal width, rounded to the dtype of the probabilities."""
    return (torch.arange(1, bins, dtype=torch.float64, device=like.device) / bins).to(dtype).to(like)


def _columns(data: Labelled) -> list[tuple[Tensor, Tensor]]:
    """Confidence and hits: once for classes, once for each label otherwise."""
    if data.task == "multiclass":
        confidence, predicted = data.probs.max(-1)
        return [(confidence, (predicted == data.labels).double())]
    return list(zip(data.probs.unbind(-1), data.labels.unbind(-1), strict=True))


def _diagram(confidence: Tensor, right: Tensor, inner_edges: Tensor) -> Reliability:
    bin_number = torch.bucketize(confidence.contiguous(), inner_edges, right=True)
    result = Reliability([], [], [])
    for number in range(len(inner_edges) + 1):
        inside = bin_number == number
        if inside.any():
            result.confidence.append(float(confidence[inside].mean()))
            result.accuracy.append(float(right[inside].mean()))
            result.share.append(float(inside.double().mean()))
    return result

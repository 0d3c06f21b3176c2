"""Selective prediction: what errors are left if the least certain predictions are not made.

Examples are accepted from the most certain to the least. The risk at coverage c is the mean loss over the accepted
share c of them. Uncertainty that knows what it gets wrong keeps the risk low until the coverage is high.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vprop.checks import is_number, shown
from vprop.metrics._arguments import has_nan, invalid, real, shape_of


class RiskCoverage(NamedTuple):
    """``risk[i]`` is the mean loss over the share ``coverage[i]`` = (i+1)/n of the most certain examples."""

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """AURC, 1/n Σᵢ riskᵢ: the mean risk over all coverages. Smaller is better; the mean loss is chance."""
        return float(self.risk.mean())

    def risk_at(self, coverage: float) -> float:
        """The risk when at least this share of the examples is accepted, and no more than it takes."""
        if not is_number(coverage) or not 0 < coverage <= 1:
            raise ValueError(f"Invalid coverage={shown(coverage)}: must be a number in (0, 1]. 1 accepts everything.")
        count = max(1, math.ceil(float(coverage) * len(self.risk) - 1e-9))
        return float(self.risk[count - 1])


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """The risk at every coverage, with ``loss`` that of each example: 0 and 1 for right and wrong, or a squared error.

    With ties the order among them is a matter of chance, and the risk is its expectation over all orders: j of the g
    examples of a tied group, together with the loss L, have the expected loss j·L/g. So the curve does not depend on
    the order in which examples come, and a constant uncertainty has the mean loss at every coverage.

    >>> curve = risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 0.0]))
    >>> curve.risk.tolist()
    [0.0, 0.0, 0.3333333333333333]
    >>> risk_coverage(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).risk.tolist()
    [0.5, 0.5]
    """
    scores, losses = real("uncertainty", uncertainty), real("loss", loss)
    if scores.shape != losses.shape:
        remedy = (
            "Pass one uncertainty and one loss for each example, e.g. prediction.entropy and probs.argmax(-1) != y."
        )
        raise invalid("uncertainty", f"has shape {shape_of(scores)}", f"that of loss, {shape_of(losses)}", remedy)
    scores, losses = scores.flatten(), losses.flatten().to(scores.device)
    if has_nan(scores, losses):
        remedy = "NaN comes from a model that has diverged."
        raise invalid("uncertainty or loss", "has NaN", "numbers, which can be put in order", remedy)
    _, group, size = scores.unique(return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=torch.float64, device=scores.device).index_add_(0, group, losses)
    # Every example counts as the mean of its group: the expectation over the orders within it.
    expected = (total / size).repeat_interleave(size)
    accepted = torch.arange(1, len(losses) + 1, dtype=torch.float64, device=scores.device)
    return RiskCoverage(accepted / len(losses), expected.cumsum(0) / accepted)


def aurc(uncertainty: Tensor, loss: Tensor) -> float:
    """Area under the risk–coverage curve, 1/n Σᵢ riskᵢ; see :func:`risk_coverage`.

    The mean loss for an uncertainty that knows nothing, less for one that is high where the loss is.

    >>> round(aurc(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 0.0])), 4)
    0.1111
    """
    return risk_coverage(uncertainty, loss).area

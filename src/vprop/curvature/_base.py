"""What an estimator of the curvature is: it folds the samples of a step, one at a time, into running averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Folded:
    """One parameter's samples of the current step, folded so that memory does not grow with their number."""

    grad: Tensor
    """Mean of the samples' gradients, ĝ."""
    product: Tensor
    """The estimator's running statistic of products of gradients."""
    count: int = 1
    """Samples folded so far."""
    partner: Tensor | None = None
    """The gradient at +ε while its antithetic partner is still to come."""


class CurvatureEstimator(ABC):
    """Turns the gradients at the samples of one step into ĥ."""

    @abstractmethod
    def fold(self, folded: Folded | None, grad: Tensor) -> Folded:
        """Take in the next sample's gradient, in the order of the samples. ``None`` starts a step.

        The first gradient may be kept by reference; ``folded`` may be changed in place.
        """

    @abstractmethod
    def hess(self, folded: Folded, ess: float) -> Tensor:
        """ĥ from all samples of the step."""

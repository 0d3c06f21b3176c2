"""Which estimator of products of gradients the arguments of an optimizer ask for."""

from __future__ import annotations

from vprop.curvature._base import CurvatureEstimator, Multiply
from vprop.curvature.centered import AntitheticSpread, SampleSpread
from vprop.curvature.sampled_fisher import SampledFisher
from vprop.curvature.squared_gradient import SquaredGradient


def from_gradients(multiply: Multiply, *, centered: bool, antithetic: bool, sampled_fisher: bool) -> CurvatureEstimator:
    """The estimator, for the diagonal (``torch.mul``) or the whole matrix (``torch.outer``)."""
    if sampled_fisher:
        return SampledFisher(multiply)
    if not centered:
        return SquaredGradient(multiply)
    return AntitheticSpread(multiply) if antithetic else SampleSpread(multiply)

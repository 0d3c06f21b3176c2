"""Which estimator the arguments of an optimizer ask for."""

from __future__ import annotations

import torch

from vprop.curvature._base import CurvatureEstimator, Multiply
from vprop.curvature.centered import AntitheticSpread, SampleSpread
from vprop.curvature.hessian import HessianDiagonal
from vprop.curvature.hutchinson import Hutchinson
from vprop.curvature.per_example import PerExampleGaussNewton
from vprop.curvature.price import Price
from vprop.curvature.sampled_fisher import SampledFisher
from vprop.curvature.squared_gradient import SquaredGradient

NAMES = ("squared_gradient", "centered", "gauss_newton", "hessian", "hutchinson", "price", "sampled_fisher")
"""The estimators of a diagonal that can be asked for by name."""


def from_gradients(multiply: Multiply, *, centered: bool, antithetic: bool, sampled_fisher: bool) -> CurvatureEstimator:
    """The estimator of products of gradients, for the diagonal (``torch.mul``) or the matrix (``torch.outer``)."""
    if sampled_fisher:
        return SampledFisher(multiply)
    if not centered:
        return SquaredGradient(multiply)
    return AntitheticSpread(multiply) if antithetic else SampleSpread(multiply)


def by_name(name: str, *, antithetic: bool, chunk_size: int | None) -> CurvatureEstimator:
    """The estimator of a diagonal with one of :data:`NAMES`; ``chunk_size`` bounds the memory of some."""
    if name == "price":
        return Price()
    if name == "hutchinson":
        return Hutchinson()
    if name == "gauss_newton":
        return PerExampleGaussNewton(chunk_size)
    if name == "hessian":
        return HessianDiagonal(chunk_size)
    return from_gradients(
        torch.mul, centered=name == "centered", antithetic=antithetic, sampled_fisher=name == "sampled_fisher"
    )

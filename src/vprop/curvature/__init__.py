"""Estimators of the curvature ĥ ≈ E_q[diag ∇²ℓ] (or of the whole matrix), one per file."""

from vprop.curvature._base import CurvatureEstimator, Evidence, Folded, ObservedAverage
from vprop.curvature.centered import AntitheticSpread, SampleSpread
from vprop.curvature.choice import NAMES, by_name, from_gradients
from vprop.curvature.hessian import Hessian, HessianDiagonal
from vprop.curvature.hutchinson import Hutchinson
from vprop.curvature.noise_product import NoiseProduct
from vprop.curvature.per_example import PerExampleGaussNewton
from vprop.curvature.price import Price
from vprop.curvature.sampled_fisher import SampledFisher
from vprop.curvature.squared_gradient import MeanSquare, SquaredGradient

__all__ = [
    "NAMES",
    "AntitheticSpread",
    "CurvatureEstimator",
    "Evidence",
    "Folded",
    "Hessian",
    "HessianDiagonal",
    "Hutchinson",
    "MeanSquare",
    "NoiseProduct",
    "ObservedAverage",
    "PerExampleGaussNewton",
    "Price",
    "SampleSpread",
    "SampledFisher",
    "SquaredGradient",
    "by_name",
    "from_gradients",
]

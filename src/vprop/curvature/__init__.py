"""Estimators of the curvature ĥ ≈ E_q[diag ∇²ℓ], one per file."""

from vprop.curvature._base import CurvatureEstimator, Folded
from vprop.curvature.centered import AntitheticSpread, SampleSpread
from vprop.curvature.squared_gradient import SquaredGradient

__all__ = ["AntitheticSpread", "CurvatureEstimator", "Folded", "SampleSpread", "SquaredGradient"]

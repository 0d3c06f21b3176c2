"""Gaussian posteriors: questions to a trained model."""

from vprop.posterior._base import ElboEstimate, Posterior
from vprop.posterior.diagonal import DiagonalPosterior
from vprop.posterior.io import load_posterior
from vprop.posterior.prediction import Likelihood, Prediction
from vprop.posterior.prior import GaussianPrior

__all__ = [
    "DiagonalPosterior",
    "ElboEstimate",
    "GaussianPrior",
    "Likelihood",
    "Posterior",
    "Prediction",
    "load_posterior",
]

"""Gaussian posteriors: questions to a trained model."""

from vprop.likelihood import Likelihood
from vprop.posterior._base import ElboEstimate, Posterior
from vprop.posterior.composed import ComposedPosterior
from vprop.posterior.diagonal import DiagonalPosterior
from vprop.posterior.eigenbasis import EigenbasisPosterior
from vprop.posterior.full import FullPosterior
from vprop.posterior.io import load_posterior
from vprop.posterior.merge import merge
from vprop.posterior.prediction import Prediction
from vprop.posterior.prior import GaussianPrior

__all__ = [
    "ComposedPosterior",
    "DiagonalPosterior",
    "EigenbasisPosterior",
    "ElboEstimate",
    "FullPosterior",
    "GaussianPrior",
    "Likelihood",
    "Posterior",
    "Prediction",
    "load_posterior",
    "merge",
]

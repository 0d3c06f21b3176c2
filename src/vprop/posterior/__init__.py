"""Gaussian posteriors: questions to a trained model."""

from vprop.likelihood import Likelihood
from vprop.posterior._base import ElboEstimate, Posterior
from vprop.posterior.calibrated import Scales
from vprop.posterior.composed import ComposedPosterior
from vprop.posterior.diagonal import DiagonalPosterior
from vprop.posterior.eigenbasis import EigenbasisPosterior
from vprop.posterior.full import FullPosterior
from vprop.posterior.io import load_posterior
from vprop.posterior.linearized import LinearizedPrediction
from vprop.posterior.merge import merge
from vprop.posterior.mixture import Mixture
from vprop.posterior.prediction import Prediction
from vprop.posterior.predictive.batch_norm import set_batch_norm
from vprop.posterior.prior import GaussianPrior
from vprop.posterior.pruning import PrunedPosterior
from vprop.posterior.sensitivity import Sensitivity
from vprop.posterior.summary import PredictionSummary

__all__ = [
    "ComposedPosterior",
    "DiagonalPosterior",
    "EigenbasisPosterior",
    "ElboEstimate",
    "FullPosterior",
    "GaussianPrior",
    "Likelihood",
    "LinearizedPrediction",
    "Mixture",
    "Posterior",
    "Prediction",
    "PredictionSummary",
    "PrunedPosterior",
    "Scales",
    "Sensitivity",
    "load_posterior",
    "merge",
    "set_batch_norm",
]

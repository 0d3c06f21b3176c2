"""PyTorch optimizers that perform Gaussian variational inference."""

from vprop import acquisition, calibration, curvature, metrics
from vprop._version import __version__
from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from vprop.objective import Objective
from vprop.optim import (
    CVI,
    IVON,
    VOGN,
    VON,
    VONG,
    AutoPrior,
    CosineCycles,
    MeanField,
    Vadam,
    VariationalOptimizer,
    Vario,
    Vprop,
    lr_find,
    train_mixture,
)
from vprop.posterior import GaussianPrior, Mixture, Posterior, Prediction, load_posterior, merge

__all__ = [
    "CVI",
    "IVON",
    "VOGN",
    "VON",
    "VONG",
    "AutoPrior",
    "CosineCycles",
    "GaussianLikelihood",
    "GaussianPrior",
    "HeteroscedasticGaussianLikelihood",
    "MeanField",
    "Mixture",
    "Objective",
    "Posterior",
    "Prediction",
    "Vadam",
    "VariationalOptimizer",
    "Vario",
    "Vprop",
    "__version__",
    "acquisition",
    "calibration",
    "curvature",
    "load_posterior",
    "lr_find",
    "merge",
    "metrics",
    "train_mixture",
]

"""PyTorch optimizers that perform Gaussian variational inference."""

from vprop._version import __version__
from vprop.objective import Objective
from vprop.optim import CVI, VOGN, VON, VONG, VariationalOptimizer, Vprop
from vprop.posterior import Posterior, Prediction, load_posterior

__all__ = [
    "CVI",
    "VOGN",
    "VON",
    "VONG",
    "Objective",
    "Posterior",
    "Prediction",
    "VariationalOptimizer",
    "Vprop",
    "__version__",
    "load_posterior",
]

"""Hyperparameters: each is declared once, and constructors, signatures, checks and documentation follow."""

from vprop.optim.hyperparameters.checks import check_edited, check_hyperparameters, check_samples, not_centered, rate
from vprop.optim.hyperparameters.constructors import OF_OTHERS, with_hyperparameters
from vprop.optim.hyperparameters.declaration import Hyperparameter, declared_in
from vprop.optim.hyperparameters.shared import LR, Basic, Floored, Shared, SharedByFull

__all__ = [
    "LR",
    "OF_OTHERS",
    "Basic",
    "Floored",
    "Hyperparameter",
    "Shared",
    "SharedByFull",
    "check_edited",
    "check_hyperparameters",
    "check_samples",
    "declared_in",
    "not_centered",
    "rate",
    "with_hyperparameters",
]

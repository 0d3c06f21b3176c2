"""A problem: data, a model, a loss and a prior, as methods meet them.

What answers are scored by is for the experiments to say.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from vprop import Objective
from vprop.lab.data import Dataset
from vprop.likelihood import Likelihood


class Problem(ABC):
    """What is trained on which rows; ``test_x`` and ``test_y`` are those that predictions are scored on."""

    name: ClassVar[str]
    likelihood: ClassVar[Likelihood]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    """The mean over the rows of −log p(y|x, θ)."""
    hess_init: ClassVar[float]
    """The curvature per example that every Gaussian starts with, so that all start with the same variance."""
    prior_precision: float = 1.0
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def __init__(self, data: Dataset) -> None:
        self.data = data

    @abstractmethod
    def model(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """A model with its initial weights."""

    @property
    def num_data(self) -> int:
        """N: the training rows in use."""
        return len(self.train_x)

    @property
    def num_parameters(self) -> int:
        """How many weights the model has."""
        return sum(p.numel() for p in self.model(0).parameters())

    def objective(self, model: nn.Module, rows: Tensor | slice | None = None) -> Objective:
        """The mean loss on some rows of the training data, or on all of them."""
        x, y = (self.train_x, self.train_y) if rows is None else (self.train_x[rows], self.train_y[rows])
        return Objective(model, self.loss_fn, x, y)


def fingerprint(data: Dataset) -> str:
    """A hash of the numbers themselves, so that a cached run is never taken for one on other data."""
    digest = hashlib.sha256()
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

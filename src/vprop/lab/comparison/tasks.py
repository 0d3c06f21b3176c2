"""What methods are compared on: a few small tasks, and the part of the training data that settings are chosen on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from vprop.lab.data import Dataset, load
from vprop.lab.data.load import scikit_learn
from vprop.lab.engine.binary import LogisticRegression, SmallNetwork
from vprop.lab.engine.method import ProblemName
from vprop.lab.engine.problem import Problem
from vprop.likelihood import Likelihood

Part = Literal["tuning", "final"]

VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class TableSpec:
    """One table: which model on which data, and how much is spent on it. Decides the outcome of a run."""

    name: str
    """Of the file with its results, and of its place in the page."""
    title: str
    problem: ProblemName
    data: str
    batch: int
    gradients: int
    """Mini-batch gradients that every run may evaluate."""
    seeds: int = 3
    settings: int = 6
    """How many settings every method tries."""
    samples: int = 64
    """Weight samples that a prediction is averaged over."""
    rows: int | None = None
    """How many training and test rows are used, the first ones; ``None`` for all."""
    timing_rounds: int = 40


FULL = (
    TableSpec("a1a", "Logistic regression on a1a", "logreg", "a1a", batch=32, gradients=2000),
    TableSpec("australian", "Logistic regression on Australian", "logreg", "australian", batch=32, gradients=1500),
    TableSpec("mlp", "A small network on a1a", "mlp", "a1a", batch=32, gradients=2000),
    TableSpec("cnn", "A small convolutional network on Fashion-MNIST", "cnn", "fashion_mnist", batch=128, gradients=780,
         samples=32, rows=5000, timing_rounds=20),
)  # fmt: skip

_LITTLE = {"batch": 32, "gradients": 8, "seeds": 2, "settings": 2, "samples": 4, "timing_rounds": 2}
SHORT = (
    TableSpec("logreg-short", "Logistic regression on breast cancer data", "logreg", "breast_cancer", **_LITTLE),
    TableSpec("mlp-short", "A small network on breast cancer data", "mlp", "breast_cancer", **_LITTLE),
    TableSpec("cnn-short", "A small convolutional network on digits", "cnn", "digits", rows=200, **_LITTLE),
)
"""Data that ship with scikit-learn, a few steps: to see that everything runs."""


@lru_cache(maxsize=4)
def task(spec: TableSpec, part: Part, data_dir: Path | None) -> Problem:
    """The task on all of its training data, or with a part of them in place of the test data."""
    data = load_data(spec, data_dir)
    if part == "tuning":
        data = validation_split(data)
    return PROBLEMS[spec.problem](data)


@lru_cache(maxsize=4)
def load_data(spec: TableSpec, data_dir: Path | None) -> Dataset:
    """The rows of the data set that the task uses."""
    data = _digits() if spec.data == "digits" else load(spec.data, data_dir)
    if spec.rows is None:
        return data
    # Copies, so that the rows that are not used are not kept in memory.
    tensors = {name: getattr(data, name)[: spec.rows].clone() for name in ("train_x", "train_y", "test_x", "test_y")}
    return dataclasses.replace(data, **tensors)


def validation_split(data: Dataset) -> Dataset:
    """The last part of the training rows as test data, the others as training data; the test data are left out.

    What a setting is chosen by can then not depend on the test data: they are not there.
    """
    first = len(data.train_x) - round(VALIDATION_SHARE * len(data.train_x))
    return Dataset(
        data.name, data.train_x[:first], data.train_y[:first], data.train_x[first:], data.train_y[first:], data.source
    )


class ConvolutionalNetwork(Problem):
    """Grey images of ten classes."""

    name, hess_init = "cnn", 1.0
    likelihood: ClassVar[Likelihood] = "categorical"
    loss_fn = staticmethod(F.cross_entropy)

    def __init__(self, data: Dataset) -> None:
        super().__init__(data)
        self.train_x, self.test_x = data.train_x[:, None], data.test_x[:, None]
        self.train_y, self.test_y = data.train_y, data.test_y

    def model(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """torch's initialisation under ``seed``."""
        return convolutional_network(self.train_x.shape[-1], seed, dropout)


def convolutional_network(size: int, seed: int, dropout: float = 0.0) -> nn.Module:
    """Two convolutions that halve the image, of 8 and 16 channels, and a linear layer; ``size`` is a multiple of 4.

    Dropout, if any, in front of the linear layer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(8, 16, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Flatten(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(16 * (size // 4) ** 2, 10),
        )


PROBLEMS: dict[ProblemName, type[Problem]] = {
    "logreg": LogisticRegression,
    "mlp": SmallNetwork,
    "cnn": ConvolutionalNetwork,
}
"""Models, priors and precision of the first two are those of the paper's experiments."""


def _digits() -> Dataset:
    digits = scikit_learn("digits").load_digits()
    x, y = torch.as_tensor(digits.images).float() / 16, torch.as_tensor(digits.target).long()
    half = len(x) // 2
    return Dataset("digits", x[:half], y[:half], x[half:], y[half:], source="scikit-learn")

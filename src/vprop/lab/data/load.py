"""Data sets as tensors, split into training and test rows the same way every time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vprop.lab.data.errors import DataError
from vprop.lab.data.find import Source, fetch
from vprop.lab.data.idx import parse_idx


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    Binary sets: ``x`` float64, ``y`` float64 in {0, 1}. Images: ``x`` float32 in [0, 1], ``y`` int64.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    source: Source  # where it came from, for reports


_Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


def load(name: str, data_dir: str | os.PathLike[str] | None = None, *, download: bool = True, seed: int = 0) -> Dataset:
    """The data set called ``name``.

    ``seed`` chooses the split of the sets that are published without one (australian, breast_cancer).
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: must be from 0 to 2**32 - 1. The default is 0.")
    located = fetch(name, data_dir, download=download)
    return Dataset(name, *_LOADERS[name](located.paths, seed), source=located.source)


def _a1a(paths: tuple[Path, ...], seed: int) -> _Arrays:
    (train_x, train_y), (test_x, test_y) = (parse_libsvm(path, 123) for path in paths)
    return train_x, _zero_one(train_y), test_x, _zero_one(test_y)


def _australian(paths: tuple[Path, ...], seed: int) -> _Arrays:
    x, y = parse_libsvm(paths[0], 14)
    train, test = _halves(len(y), seed)
    x, y = _with_bias(x), _zero_one(y)
    return x[train], y[train], x[test], y[test]


def _breast_cancer(paths: tuple[Path, ...], seed: int) -> _Arrays:
    arrays = scikit_learn("breast_cancer").load_breast_cancer(return_X_y=True)
    x, y = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    train, test = _halves(len(y), seed)
    mean, std = x[train].mean(0), x[train].std(0, correction=0)  # the test rows must not show in the scaling
    x = _with_bias((x - mean) / std)
    return x[train], y[train], x[test], y[test]


def _fashion_mnist(paths: tuple[Path, ...], seed: int) -> _Arrays:
    train_x, train_y, test_x, test_y = (parse_idx(path, dims) for path, dims in zip(paths, (3, 1, 3, 1), strict=True))
    return train_x.float().div_(255), train_y.long(), test_x.float().div_(255), test_y.long()


_LOADERS: dict[str, Callable[[tuple[Path, ...], int], _Arrays]] = {
    "a1a": _a1a,
    "australian": _australian,
    "breast_cancer": _breast_cancer,
    "fashion_mnist": _fashion_mnist,
}


def parse_libsvm(path: Path, num_features: int) -> tuple[Tensor, Tensor]:
    """Rows and labels; a file need not use its last features, so it does not tell how many there are."""
    x, y = scikit_learn(path.name).load_svmlight_file(str(path), n_features=num_features, zero_based=False)
    return torch.from_numpy(x.toarray()), torch.from_numpy(y)


def scikit_learn(name: str) -> Any:
    """``sklearn.datasets``, for the data set called ``name``."""
    try:
        return import_module("sklearn.datasets")
    except ImportError as error:
        raise DataError(f"The data set {name} needs scikit-learn: pip install scikit-learn") from error


def _halves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    # RandomState, for numpy promises that its numbers never change: the split stays that of earlier reports.
    order = torch.from_numpy(np.random.RandomState(seed).permutation(count))
    return order[: count // 2], order[count // 2 :]


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1)


def _zero_one(y: Tensor) -> Tensor:
    return (y > 0).to(y.dtype)

"""From arrays to tensors: rows with their weights, and the standardization of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor


@dataclass(frozen=True)
class Standardization:
    """z = (x − mean)/scale, column by column; what is constant is only shifted.

    Beyond ±``linear_within`` only the logarithm of what is beyond counts. A feature that is zero in nearly all rows has
    a tiny standard deviation, and where it is not zero it would outweigh all others.
    """

    mean: np.ndarray
    scale: np.ndarray
    linear_within: float = math.inf

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray, linear_within: float = math.inf) -> Standardization:
        """Mean and standard deviation of the columns, each row counting ``weights`` times."""
        values = np.ascontiguousarray(values, dtype=np.float64)  # sums round differently in another order
        mean = np.average(values, axis=0, weights=weights)
        scale = np.sqrt(np.average(np.square(values - mean), axis=0, weights=weights))
        # A constant column has the rounding of its mean for a standard deviation: it must not be blown up.
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(values).max(axis=0)
        return cls(mean, np.where(constant, 1.0, scale), linear_within)

    @classmethod
    def none(cls, columns: int) -> Standardization:
        """Leaves everything as it is."""
        return cls(np.zeros(columns), np.ones(columns))

    def apply(self, values: np.ndarray) -> np.ndarray:
        """In units of the standard deviation, as float64."""
        z = (np.ascontiguousarray(values, dtype=np.float64) - self.mean) / self.scale
        if math.isinf(self.linear_within):
            return z
        near = np.clip(z, -self.linear_within, self.linear_within)
        return near + np.sign(z) * np.log1p(np.abs(z - near))


@dataclass(frozen=True)
class Rows:
    """Training data: inputs, encoded targets, and weights with mean 1, so that a mean over rows is a weighted mean.

    Weights are (rows,), or (networks, rows) where networks that are trained side by side see different rows.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    count: float
    """How many examples the rows stand for: the sum of the weights as the user gave them."""

    def __len__(self) -> int:
        return len(self.x)

    def pick(self, numbers: Tensor) -> Rows:
        """Some of the rows, with the weights that they have here."""
        return Rows(self.x[numbers], self.y[numbers], self.weights[..., numbers], self.count)


def make_rows(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray, dtype: torch.dtype, device: torch.device | str
) -> Rows:
    """Tensors on the device. Copies: arrays may be read-only, which tensors cannot be."""
    count = float(weights.sum())
    scaled = torch.tensor(weights * (len(weights) / count), dtype=dtype, device=device)
    targets = torch.tensor(y, dtype=dtype if y.dtype.kind == "f" else torch.int64, device=device)
    return Rows(torch.tensor(x, dtype=dtype, device=device), targets, scaled, count)


def row_weights(sample_weight: object, x: np.ndarray) -> np.ndarray:
    """One weight per row, none negative and not all zero; ones by default."""
    weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
    if not weights.any():  # newer versions of scikit-learn have refused by now
        raise ValueError(
            "Invalid sample_weight: is zero for all rows, must be positive for some. Nothing can be learned."
        )
    return weights

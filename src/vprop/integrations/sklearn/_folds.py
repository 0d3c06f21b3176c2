"""Networks that have not seen some of the rows, to learn from those what the noise of new rows is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vprop.integrations.sklearn._data import Rows

ENOUGH_ROWS = 1000
"""Held-out rows that are enough to learn the noise from: its standard deviation is then known to about 3 %."""

MOST_ROWS = 5000
"""Of one fold, so that large data lose few rows to it."""

LEAST_TO_SPLIT = 4
"""Rows that can be split at all."""


@dataclass(frozen=True)
class Folds:
    """Rows for networks side by side, of which the ones of fold k do not see the rows in ``held_out[k]``."""

    rows: Rows
    """All rows, with weights of (networks, rows)."""

    held_out: list[Tensor]
    members: int

    @property
    def networks(self) -> int:
        """How many are trained side by side."""
        return len(self.held_out) * self.members


def make_folds(rows: Rows, folds: int, members: int, shuffle: np.random.RandomState) -> Folds:
    """Up to ``folds`` folds with ``members`` networks each; fewer where they hold out enough rows already."""
    count = len(rows)
    folds = min(folds, count // 2)
    size = min(math.ceil(count / folds), MOST_ROWS)
    order = torch.as_tensor(shuffle.permutation(count), device=rows.x.device)
    parts = order.split(size)[: min(folds, math.ceil(ENOUGH_ROWS / size))]
    weights = rows.weights.repeat(len(parts) * members, 1)
    for fold, part in enumerate(parts):
        weights[fold * members : (fold + 1) * members, part] = 0
    shares = weights.mean(1, keepdim=True)
    return Folds(Rows(rows.x, rows.y, weights / shares, rows.count * float(shares.mean())), list(parts), members)


def held_out_outputs(folds: Folds, outputs: Tensor) -> np.ndarray:
    """(samples, rows, columns) for the held-out rows, each from the networks that were trained without it.

    ``outputs`` are (draws, networks, rows, columns) for those rows, fold after fold.
    """
    parts = outputs.split([len(part) for part in folds.held_out], dim=2)
    own = [part[:, fold * folds.members : (fold + 1) * folds.members].flatten(0, 1) for fold, part in enumerate(parts)]
    return torch.cat(own, dim=1).cpu().numpy()

"""The Gaussian prior N(m₀, 1/λ), with one entry or one number per parameter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GaussianPrior(NamedTuple):
    """Prior means and precisions by parameter name; each is a tensor like the parameter, or 0-dimensional."""

    mean: dict[str, Tensor]
    precision: dict[str, Tensor]

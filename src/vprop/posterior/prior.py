"""The Gaussian prior N(m₀, 1/λ), with one entry or one number per parameter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GaussianPrior(NamedTuple):
    """Prior means and precisions by parameter name; each is a tensor like the parameter, or 0-dimensional.

    A prior with correlations (full structure only) has ``precision_matrix`` over all parameters in their order, and
    ``precision`` is its diagonal.
    """

    mean: dict[str, Tensor]
    precision: dict[str, Tensor]
    precision_matrix: Tensor | None = None

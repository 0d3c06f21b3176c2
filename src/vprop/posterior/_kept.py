"""A posterior over the weights that pruning keeps, gathered into one parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.posterior.prior import GaussianPrior

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

KEPT = "kept"
"""The name of that parameter."""


def kept_prior(posterior: Posterior, kept: Tensor) -> GaussianPrior:
    """The prior of the kept weights given that the others are zero."""
    prior = posterior.prior
    mean, precision = posterior._flat(prior.mean), posterior._flat(prior.precision)
    matrix = prior.precision_matrix
    if matrix is None:
        return GaussianPrior({KEPT: mean[kept]}, {KEPT: precision[kept]})
    own = matrix[kept][:, kept]
    shift = torch.linalg.lstsq(own, (matrix[kept][:, ~kept] @ mean[~kept]).unsqueeze(-1)).solution.squeeze(-1)
    return GaussianPrior({KEPT: mean[kept] + shift}, {KEPT: own.diagonal().clone()}, own)


def rest_of(posterior: Posterior) -> dict[str, Any]:
    """The further arguments of ``Posterior.__init__``, as this posterior has them."""
    names = ("ess", "temperature", "seed", "snapshot", "likelihood", "noise_variance", "buffers", "scales")
    return {name: getattr(posterior, name) for name in names}

"""What calibration has changed of a posterior, and outputs of the model with it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vprop.likelihood import LikelihoodLike, LikelihoodModule, split_heteroscedastic


class Scales(NamedTuple):
    """What :mod:`vprop.calibration` found on held-out data; all ones for a posterior as it was trained.

    ``temperature`` divides logits in :meth:`Posterior.predict`; it has nothing to do with the ``temperature`` of an
    optimizer, which widens the posterior. ``noise`` multiplies the variance of an observation: it is already in
    ``noise_variance``, and added to the log-variances that a model returns. ``variance`` multiplies the variance of the
    weights, and is already in it.
    """

    temperature: float = 1.0
    noise: float = 1.0
    variance: float = 1.0


def scaled_outputs(outputs: Tensor, likelihood: LikelihoodLike | None, scales: Scales) -> Tensor:
    """Outputs of the model as the calibrated posterior has them: logits f/T, log-variances s + log c."""
    kind = likelihood.likelihood if isinstance(likelihood, LikelihoodModule) else likelihood
    if kind in ("categorical", "bernoulli") and scales.temperature != 1:
        return outputs / scales.temperature
    if kind == "heteroscedastic" and scales.noise != 1:
        mean, log_variance = split_heteroscedastic(outputs)
        return torch.cat([mean, log_variance + math.log(scales.noise)], dim=-1)
    return outputs


def scaled_moments(
    mean: Tensor, covariance: Tensor, likelihood: LikelihoodLike | None, scales: Scales
) -> tuple[Tensor, Tensor]:
    """The same for normal outputs: E[f/T] = E[f]/T and Cov[f/T] = Cov[f]/T²; a shift leaves the covariance alone."""
    kind = likelihood.likelihood if isinstance(likelihood, LikelihoodModule) else likelihood
    if kind in ("categorical", "bernoulli"):
        covariance = covariance / scales.temperature**2
    return scaled_outputs(mean, likelihood, scales), covariance

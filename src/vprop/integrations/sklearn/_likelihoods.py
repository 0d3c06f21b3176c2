"""Negative log-likelihoods row by row, for all members at once, and what else they learn."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_NOISE = 1e-6
"""Of the noise variance, in units of the target's: data without any noise would make the likelihood unbounded."""


class RowLikelihood(Protocol):
    """What training and scoring ask of a likelihood."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log p(y|outputs): (members, rows)."""
        ...

    def observe(self, outputs: Tensor, y: Tensor, weights: Tensor) -> None:
        """Learn from outputs at sampled weights what is not a weight."""
        ...

    def predictive_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log of the predictive density, from outputs at samples (samples, rows, outputs): (rows,)."""
        ...

    def posterior_arguments(self) -> dict[str, Any]:
        """What ``optimizer.posterior`` is told."""
        ...


class Categorical:
    """Classes, from softmax logits."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log p(y|outputs): (members, rows)."""
        members, rows, _ = outputs.shape
        return F.cross_entropy(outputs.flatten(0, 1), y.repeat(members), reduction="none").view(members, rows)

    def observe(self, outputs: Tensor, y: Tensor, weights: Tensor) -> None:
        """There is nothing else to learn."""

    def predictive_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log of the mean probability of the label."""
        logs = outputs.log_softmax(-1)[:, torch.arange(len(y), device=y.device), y]
        return math.log(len(logs)) - logs.logsumexp(0)

    def posterior_arguments(self) -> dict[str, Any]:
        """What ``optimizer.posterior`` is told."""
        return {"likelihood": "categorical"}


class Gaussian:
    """Targets with a noise variance for each member and output, which is learned.

    The variance that maximizes the ELBO is E_q of the squared residual, a mean over rows and weight samples. It is
    followed by an average as long as that of the curvature, which is proportional to the precision of the noise.
    """

    def __init__(self, members: int, outputs: int, decay: float, like: Tensor) -> None:
        self.noise = torch.ones(members, 1, outputs, dtype=like.dtype, device=like.device)
        self.decay = decay

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log p(y|outputs), summed over a row's outputs: (members, rows)."""
        return (0.5 * ((y - outputs).square() / self.noise + (2 * math.pi * self.noise).log())).sum(-1)

    @torch.no_grad()
    def observe(self, outputs: Tensor, y: Tensor, weights: Tensor) -> None:
        """Move the variance towards the mean squared residual."""
        self.noise = self.decay * self.noise + (1 - self.decay) * self._mean_square(outputs, y, weights)

    def settle(self, outputs: Tensor, y: Tensor, weights: Tensor) -> None:
        """Set the variance to its best value, from outputs at several draws: (draws, members, rows, outputs)."""
        self.noise = self._mean_square(outputs, y, weights).mean(0).to(self.noise)

    def _mean_square(self, outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        squares = (y - outputs).square() * weights.unsqueeze(-1)
        return squares.mean(-2, keepdim=True).clamp_min(LEAST_NOISE)

    def predictive_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log of a Gaussian with the predictive mean and variance."""
        variance = outputs.var(0, unbiased=len(outputs) > 1) + self.noise.mean(0).to(outputs)
        error = (y - outputs.mean(0)).square()
        return (0.5 * (error / variance + (2 * math.pi * variance).log())).sum(-1)

    def posterior_arguments(self) -> dict[str, Any]:
        """What ``optimizer.posterior`` is told."""
        return {"likelihood": "gaussian", "noise_variance": self.noise.clone()}

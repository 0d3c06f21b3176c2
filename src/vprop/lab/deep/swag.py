"""SWAG (Maddox et al., 2019): a Gaussian fitted to the weights that SGD visits at a constant step size.

With θ₁ … θₜ the weights at the ends of the last epochs, θ̄ their mean, v the mean of their squares minus θ̄², and the
columns of D the last K deviations θᵢ − θ̄ᵢ from the mean so far,

    θ = θ̄ + √(v/2)·z₁ + D·z₂/√(2(K−1)),     z₁, z₂ ~ N(0, I),

whose covariance is half diagonal, half of low rank.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

RANK = 20


class SWAG:
    """Collects weights of ``model``, and draws from the Gaussian that they make."""

    def __init__(self, model: nn.Module, rank: int = RANK) -> None:
        self.model = model
        flat = self._weights()
        self.count, self.mean, self.square = 0, torch.zeros_like(flat), torch.zeros_like(flat)
        self.deviations: deque[Tensor] = deque(maxlen=rank)

    def _weights(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def collect(self) -> None:
        """Take in the weights as they are now."""
        weights = self._weights()
        self.count += 1
        self.mean += (weights - self.mean) / self.count
        self.square += (weights.square() - self.square) / self.count
        self.deviations.append(weights - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """What was collected."""
        tensors = {"mean": self.mean, "square": self.square, "deviations": list(self.deviations)}
        return {"count": self.count, **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was collected before."""
        self.count, self.mean, self.square = state["count"], state["mean"], state["square"]
        self.deviations.extend(state["deviations"])

    @property
    def variance(self) -> Tensor:
        """Of the diagonal part, before it is halved; rounding may make it a little negative, which is none."""
        return (self.square - self.mean.square()).clamp_min(0)

    def write_mean(self) -> None:
        """Into the model."""
        self._need_two()
        vector_to_parameters(self.mean.clone(), self.model.parameters())

    def write_sample(self, generator: torch.Generator) -> None:
        """Draw weights into the model."""
        self._need_two()

        def normal(count: int) -> Tensor:
            return torch.randn(count, generator=generator, device=self.mean.device, dtype=self.mean.dtype)

        low_rank = torch.stack(list(self.deviations)).T @ normal(len(self.deviations))
        diagonal = (self.variance / 2).sqrt() * normal(len(self.mean))
        sample = self.mean + diagonal + low_rank / (2 * (len(self.deviations) - 1)) ** 0.5
        vector_to_parameters(sample, self.model.parameters())

    def _need_two(self) -> None:
        if self.count < 2:
            raise ValueError(f"SWAG has collected {self.count} weights, needs at least 2: train for more epochs.")

"""A linear model trained on all rows at once, and its coefficients in the units of the features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vprop.integrations.sklearn._data import Rows, Standardization
from vprop.integrations.sklearn._prediction import stacked_outputs
from vprop.objective import Objective
from vprop.optim import CVI, VON, AutoPrior, VariationalOptimizer
from vprop.posterior import FullPosterior, Posterior

INTERCEPT_PRECISION = 0.01


@dataclass
class LinearLearner:
    """A linear layer with its optimizer."""

    model: nn.Linear
    optimizer: VariationalOptimizer

    @classmethod
    def make(
        cls, model: nn.Linear, groups: Any, prior: dict[str, Any], full: bool, num_data: float, seed: int
    ) -> LinearLearner:
        """Exact Hessians, a pair of samples in each step, an average over the last ten steps or so."""
        constructor = VON if full else CVI
        arguments: dict[str, Any] = {"mc_samples": 2, "antithetic": True, "hess_init": 0.25, "seed": seed, **prior}
        return cls(model, constructor(groups, lr=0.5, num_data=num_data, betas=(0.0, 0.9), **arguments))

    @property
    def likelihood(self) -> str:
        """Of its outputs: one logit is that of the second of two classes."""
        return "bernoulli" if self.model.out_features == 1 else "categorical"

    def objective(self, rows: Rows) -> Objective:
        """The weighted mean loss over the rows. Its likelihood is named, so that Hessians are quick."""

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            return (row_losses(logits, y) * rows.weights).mean()

        return Objective(self.model, loss, rows.x, rows.y, likelihood=self.likelihood)  # type: ignore[arg-type]

    def step(self, rows: Rows, step_size: float) -> float:
        """One step; returns the mean loss over the weight samples."""
        for group in self.optimizer.param_groups:
            group["lr"] = step_size
        return float(self.optimizer.step(self.objective(rows)))

    @torch.no_grad()
    def loss_at_mean(self, rows: Rows) -> float:
        """The mean loss over the rows, without noise in the weights."""
        return float((row_losses(self.model(rows.x), rows.y) * rows.weights).mean())

    def posterior(self) -> Posterior:
        """A snapshot of the posterior."""
        return self.optimizer.posterior(self.model, likelihood=self.likelihood)  # type: ignore[arg-type]


def row_losses(logits: Tensor, y: Tensor) -> Tensor:
    """−log p(y|logits) for each row."""
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits), reduction="none")
    return F.cross_entropy(logits, y, reduction="none")


def make_prior(model: nn.Linear, precision: float | AutoPrior, earlier: Posterior | None) -> tuple[Any, dict[str, Any]]:
    """Parameter groups and further arguments of the optimizer: the prior, or what an earlier posterior makes of it."""
    if earlier is not None:
        return model.parameters(), earlier.as_prior()
    groups = [{"params": [model.weight], "prior_precision": precision}]
    if model.bias is not None:
        groups.append({"params": [model.bias], "prior_precision": INTERCEPT_PRECISION})
    return groups, {}


def predictive_score(posterior: Posterior, rows: Rows, seed: int) -> float:
    """Mean predictive log-likelihood of held-out rows."""
    outputs = stacked_outputs(posterior, rows.x, 16, seed)
    losses = torch.stack([row_losses(draw, rows.y) for draw in outputs])
    logs = (-losses).logsumexp(0) - np.log(len(outputs))
    return float((logs * rows.weights).mean())


def coefficients(posterior: Posterior, inputs: Standardization) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the coefficients of the features as they were given."""
    mean, std = posterior.mean["weight"], posterior.variance["weight"].sqrt()
    return mean.cpu().numpy() / inputs.scale, std.cpu().numpy() / inputs.scale


def intercepts(posterior: Posterior, inputs: Standardization) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the intercepts for features as they were given: b − Σⱼ wⱼ·meanⱼ/scaleⱼ."""
    weight = posterior.mean["weight"].cpu().numpy()
    outputs, features = weight.shape
    # Each intercept is a linear combination of weights and biases, in the order of the posterior.
    shift = np.zeros((outputs, outputs * features))
    for row in range(outputs):
        shift[row, row * features : (row + 1) * features] = -inputs.mean / inputs.scale
    values = weight.reshape(-1)
    if "bias" in posterior.mean:
        shift = np.hstack([shift, np.eye(outputs)])
        values = np.concatenate([values, posterior.mean["bias"].cpu().numpy()])
    if isinstance(posterior, FullPosterior):
        variance = ((shift @ posterior.covariance.cpu().numpy()) * shift).sum(1)
    else:
        flat = torch.cat([variance.flatten() for variance in posterior.variance.values()])
        variance = np.square(shift) @ flat.cpu().numpy()
    return shift @ values, np.sqrt(variance)

"""The training loop: passes over mini-batches, step sizes that decay, early stopping, progress."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from vprop.integrations.sklearn._data import Rows
from vprop.integrations.sklearn._likelihoods import RowLikelihood
from vprop.optim import VariationalOptimizer


@dataclass
class Learner:
    """A network with its optimizer and likelihood: what training changes, and what is copied to be put back."""

    network: nn.Module
    optimizer: VariationalOptimizer
    likelihood: RowLikelihood

    def posterior(self) -> Any:
        """A snapshot of the posterior."""
        return self.optimizer.posterior(self.network, **self.likelihood.posterior_arguments())

    def set(self, **hyperparameters: float) -> None:
        """Change hyperparameters in all groups."""
        for group in self.optimizer.param_groups:
            group.update(hyperparameters)

    def step(self, batch: Rows) -> float:
        """One step of the optimizer; returns the mean loss over rows, members and weight samples.

        The loss is *summed* over members: each has the gradient of its own mean loss, as if it were alone.
        """

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            outputs = self.network(batch.x)
            loss = (self.likelihood.losses(outputs, batch.y) * batch.weights).mean(1).sum()
            loss.backward()
            self.likelihood.observe(outputs.detach(), batch.y, batch.weights)
            return loss.detach() / len(outputs)

        return float(self.optimizer.step(closure))

    @torch.no_grad()
    def loss_at_mean(self, rows: Rows) -> float:
        """The mean loss over rows and members, without noise in the weights."""
        return float((self.likelihood.losses(self.network(rows.x), rows.y) * rows.weights).mean())

    def run(self, rows: Rows, batch_size: int, shuffle: np.random.RandomState, step_size: Callable[[], float]) -> float:
        """One pass over the rows in a new order; returns the mean loss."""
        if batch_size >= len(rows):
            batches = [rows]
        else:
            order = torch.as_tensor(shuffle.permutation(len(rows)), device=rows.x.device)
            batches = [rows.pick(numbers) for numbers in order.split(batch_size)]
        total = 0.0
        for batch in batches:
            self.set(lr=step_size())
            total += len(batch) * self.step(batch)
        return total / len(rows)


class CosineSteps:
    """Step sizes that fall from ``first`` to zero along half a cosine, over ``count`` steps."""

    def __init__(self, first: float, count: int) -> None:
        self.first, self.count, self.made = first, count, 0

    def __call__(self) -> float:
        """The next one."""
        share = min(1.0, self.made / self.count)
        self.made += 1
        return self.first * 0.5 * (1 + math.cos(math.pi * share))


@dataclass
class Progress:
    """Loss curves, and when to stop: after ``patience`` passes in which the score rose by less than ``tol``."""

    patience: int
    tol: float
    verbose: bool
    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: Any = None
    best_score: float = -math.inf
    _waited: int = 0

    def note(self, loss: float, learner: Any, score: float | None) -> bool:
        """Take note of a pass, with the held-out log-likelihood if there is one; returns whether to stop."""
        self.losses.append(loss)
        self._report(score)
        if score is None:
            return False
        self.scores.append(score)
        self._waited = 0 if score > self.best_score + self.tol else self._waited + 1
        if score > self.best_score:
            self.best_score, self.best = score, copy.deepcopy(learner)
        if self._waited < self.patience:
            return False
        if self.verbose:
            print(f"Validation score did not improve by tol={self.tol:g} for {self.patience} iterations. Stopping.")
        return True

    def _report(self, score: float | None) -> None:
        if self.verbose:
            print(f"Iteration {len(self.losses)}, loss = {self.losses[-1]:.6f}")
            if score is not None:
                print(f"Validation score: {score:.6f}")


def warn_if_diverged(first: float, last: float) -> None:
    """Say so if the loss at the mean has ended above where it began.

    That at sampled weights may well rise: a posterior that few data leave wide starts out narrow. And with hardly any
    data the noise of a target may be found larger than its spread; hence not any rise, but one to twice the start.
    """
    if not last <= first + max(1.0, abs(first)):
        warnings.warn(
            f"Training diverged: the loss went from {first:.4g} to {last:.4g}. Lower learning_rate_init, or bring the "
            "features to unit scale (standardize=True).",
            ConvergenceWarning,
            stacklevel=4,
        )

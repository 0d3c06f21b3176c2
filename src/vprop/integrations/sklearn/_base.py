"""What the estimators share: seeds, validation of the data, fit and partial_fit of networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from vprop.integrations.sklearn._arguments import check_network, hidden_sizes
from vprop.integrations.sklearn._data import Rows, Standardization, make_rows, row_weights
from vprop.integrations.sklearn._likelihoods import RowLikelihood
from vprop.integrations.sklearn._network import ACTIVATIONS, make_network
from vprop.integrations.sklearn._prediction import draws_for, stacked_outputs
from vprop.integrations.sklearn._training import CosineSteps, Learner, Progress, warn_if_diverged
from vprop.optim import IVON, VariationalOptimizer, Vario, Vprop

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs, encoded targets, weights."""

ROWS_AT_ONCE = 8192
"""Of a prediction, to bound the memory: there is an output for each weight sample."""

STREAMING_SHARE = 1 / 3
"""Step size of partial_fit as a share of learning_rate_init: a schedule may start higher than a constant can be."""


class SampledEstimator(BaseEstimator):
    """An estimator with a posterior: randomness from ``random_state`` alone, early stopping, sampled outputs."""

    _linear_within = math.inf
    """Standard deviations beyond which features count logarithmically."""

    def _keep(self, arguments: dict[str, Any]) -> None:
        """Let the arguments of a constructor be attributes, under their names and as they are, as scikit-learn asks."""
        for name, value in arguments.items():
            if name not in ("self", "__class__"):
                setattr(self, name, value)

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there is a posterior: a fit that failed or was interrupted leaves other attributes behind."""
        return hasattr(self, "posterior_")

    def _take_seeds(self) -> None:
        """Seeds of everything random, so that neither torch's nor NumPy's global state is used."""
        seeds = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=4)
        self._network_seed, self._noise_seed, self._prediction_seed, shuffle_seed = (int(seed) for seed in seeds)
        self._shuffle = np.random.RandomState(shuffle_seed)

    def _take_scales(self, X: np.ndarray, weights: np.ndarray) -> None:
        if self.standardize:
            self._inputs = Standardization.of(X, weights, self._linear_within)
        else:
            self._inputs = Standardization.none(X.shape[1])

    def _rows(self, parts: Parts, dtype: torch.dtype) -> Rows:
        X, targets, weights = parts
        return make_rows(self._inputs.apply(X), targets, weights, dtype, self.device)

    def _held_out(
        self, X: np.ndarray, targets: np.ndarray, weights: np.ndarray, stratify: bool
    ) -> tuple[Parts, Parts | None]:
        """Training and, for early stopping, validation data."""
        if not self.early_stopping:
            return (X, targets, weights), None
        parts = train_test_split(
            X,
            targets,
            weights,
            test_size=self.validation_fraction,
            random_state=self._shuffle,
            stratify=targets if stratify else None,
        )
        return (parts[0], parts[2], parts[4]), (parts[1], parts[3], parts[5])

    def _output_blocks(self, X: Any) -> Iterator[Tensor]:
        """(samples, rows, outputs) for new data, some rows at a time, on the CPU, in standardized units."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        for first in range(0, len(X), ROWS_AT_ONCE):
            x = torch.tensor(self._inputs.apply(X[first : first + ROWS_AT_ONCE]), device=self.device)
            outputs = stacked_outputs(self.posterior_, x, self._draws(), self._prediction_seed)
            yield outputs.flatten(0, outputs.dim() - 3).cpu()

    def _draws(self) -> int:
        return int(self.n_posterior_samples)

    def _forget(self) -> None:
        """Drop what an earlier fit has learned."""
        for name in (
            "_learner",
            "posterior_",
            "validation_scores_",
            "best_validation_score_",
            "held_out_log_density_",
            "prior_precision_",
            "_shapes",
            "_unseen",
        ):
            self.__dict__.pop(name, None)

    def _take_progress(self, progress: Progress) -> None:
        """The attributes that training leaves behind."""
        self.loss_curve_ = progress.losses
        self.n_iter_ = len(progress.losses)
        if progress.scores:
            self.validation_scores_ = progress.scores
            self.best_validation_score_ = progress.best_score


class BayesianMLP(SampledEstimator):
    """A multilayer perceptron whose weights have a Gaussian posterior: the part that tasks share."""

    # -- what a task provides --------------------------------------------------------------------------------

    _optimizers: tuple[str, ...] = ("vprop", "ivon")
    """Values of ``optimizer``."""

    _decides = False
    """Whether ``learning_rate_init``, ``betas`` and ``prior_precision`` may be left for the estimator to choose."""

    @abstractmethod
    def _rows_in_a_batch(self, rows: int) -> int:
        """``batch_size="auto"``, for so many rows of training data."""

    @abstractmethod
    def _likelihood(self, networks: int, outputs: int, like: Tensor) -> RowLikelihood:
        """A new likelihood for so many networks with this many outputs."""

    @abstractmethod
    def _settle(self, learner: Learner, rows: Rows, held_out: Rows | None) -> None:
        """What remains to be learned after the last step; ``held_out`` are the rows of early stopping."""

    # -- fit -------------------------------------------------------------------------------------------------

    def _fit(
        self, X: np.ndarray, targets: np.ndarray, weights: np.ndarray, outputs: int, stratify: bool = False
    ) -> None:
        """Train from the beginning. ``targets`` are encoded, and no weight is zero."""
        self._take_seeds()
        train, validation = self._held_out(X, targets, weights, stratify)
        self._take_scales(train[0], train[2])
        # In one batch weights are the same as repeated rows, to rounding, which float64 makes small. Beside the noise
        # of mini-batches rounding is nothing, and float32 is several times as fast.
        dtype = torch.float64 if len(train[0]) <= self._batch_size(len(train[0])) else torch.float32
        rows = self._rows(train, dtype)
        held_out = None if validation is None else self._rows(validation, torch.float64)
        self._choose(rows, early_stopping=held_out is not None)
        self._learner = self._new_learner(outputs, rows)
        self._seen = rows.count
        start = self._learner.loss_at_mean(rows)
        progress = Progress(self.n_iter_no_change, self.tol, bool(self.verbose))
        self._train(self._learner, progress, rows, held_out, self._shuffle)
        if progress.best is not None:
            self._learner = progress.best
        self._settle(self._learner, rows, held_out)
        self._take_progress(progress)
        self.posterior_ = self._learner.posterior()
        warn_if_diverged(start, self._learner.loss_at_mean(rows))

    def _train(
        self,
        learner: Learner,
        progress: Progress,
        rows: Rows,
        held_out: Rows | None,
        shuffle: np.random.RandomState,
    ) -> None:
        batch_size = self._batch_size(len(rows))
        steps = CosineSteps(self._learning_rate(), self.max_iter * math.ceil(len(rows) / batch_size))
        for _ in range(self.max_iter):
            loss = learner.run(rows, batch_size, shuffle, steps)
            score = None if held_out is None else self._score(held_out)
            if progress.note(loss, learner, score):
                break

    def _partial_fit(self, X: np.ndarray, targets: np.ndarray, weights: np.ndarray, outputs: int) -> None:
        """One pass over further data, which the posterior then counts as seen."""
        first = not hasattr(self, "posterior_")  # a training that was interrupted has left a learner without one
        if first:
            self._take_seeds()
            self._take_scales(X, weights)
            self.loss_curve_: list[float] = []
            self.n_iter_ = 0
            self._seen = 0.0
        rows = self._rows((X, targets, weights), torch.float32 if first else self._stream_dtype())
        if first:
            self._learner = self._new_learner(outputs, rows)
        seen = self._seen + rows.count
        self._learner.set(num_data=seen)
        if self.optimizer == "vario":
            self._learner.set(batch_size=self._examples_in_a_batch(rows))
        start = self._learner.loss_at_mean(rows)
        step_size = STREAMING_SHARE * self._learning_rate()
        loss = self._learner.run(rows, self._batch_size(len(rows)), self._shuffle, lambda: step_size)
        self._seen = seen  # not before: after an interrupt the same rows may come again
        self.loss_curve_.append(loss)
        self.n_iter_ += 1
        if self.verbose:
            print(f"Iteration {self.n_iter_}, loss = {loss:.6f}")
        self.posterior_ = self._learner.posterior()
        warn_if_diverged(start, self._learner.loss_at_mean(rows))

    def _stream_dtype(self) -> torch.dtype:
        return next(self._learner.network.parameters()).dtype

    def _batch_size(self, rows: int) -> int:
        return self._rows_in_a_batch(rows) if self.batch_size == "auto" else int(self.batch_size)

    def _learning_rate(self) -> float:
        return float(self.learning_rate_init)

    def _prior(self) -> float:
        return float(self.prior_precision)

    def _choose(self, rows: Rows, early_stopping: bool) -> None:
        """What is decided by held-out rows before ``fit`` trains the networks that predict."""

    def _betas(self) -> tuple[float, float]:
        first, second = self.betas
        return first, second

    # -- parts -----------------------------------------------------------------------------------------------

    def _new_learner(self, outputs: int, rows: Rows, networks: int | None = None) -> Learner:
        hidden = hidden_sizes(self.hidden_layer_sizes)
        count = self.n_members if networks is None else networks
        network = make_network(count, rows.x.shape[1], hidden, outputs, self.activation, self._network_seed).to(rows.x)
        return Learner(network, self._new_optimizer(network, rows), self._likelihood(count, outputs, rows.x))

    def _new_optimizer(self, network: torch.nn.Module, rows: Rows) -> VariationalOptimizer:
        arguments: dict[str, Any] = {
            "lr": self._learning_rate(),
            "num_data": rows.count,
            "prior_precision": self._prior(),
            "betas": self._betas(),
            "temperature": self.temperature,
            "seed": self._noise_seed,
        }
        if self.optimizer == "ivon":
            return IVON(network.parameters(), mc_samples=2, antithetic=True, **arguments)
        if self.optimizer == "vario":
            examples, limit = self._examples_in_a_batch(rows), self.weight_noise_limit
            return Vario(network.parameters(), batch_size=examples, noise_limit=limit, **arguments)
        return Vprop(network.parameters(), **arguments)

    def _examples_in_a_batch(self, rows: Rows) -> float:
        """M: a row of weight k stands for k examples, in a mini-batch as in all the data."""
        return max(1.0, min(self._batch_size(len(rows)), len(rows)) * rows.count / len(rows))

    def _check_arguments(self) -> None:
        check_network(self, tuple(ACTIVATIONS), self._optimizers, self._decides)

    def _checked_weights(
        self, sample_weight: Any, X: np.ndarray, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows that count, and how much. A row of weight zero is as good as absent: it must not fill batches."""
        weights = row_weights(sample_weight, X)
        counts = weights > 0
        return (X, y, weights) if counts.all() else (X[counts], y[counts], weights[counts])

    # -- questions to the posterior --------------------------------------------------------------------------

    def _draws(self) -> int:
        return draws_for(self.n_posterior_samples, self.n_members)

    def _score(self, rows: Rows) -> float:
        """Mean predictive log-likelihood of held-out rows."""
        posterior = self._learner.posterior()
        outputs = stacked_outputs(posterior, rows.x, draws_for(16, self.n_members), self._prediction_seed)
        losses = self._learner.likelihood.predictive_losses(outputs.flatten(0, 1), rows.y)
        return -float((losses * rows.weights).mean())

"""A Bayesian neural network for regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from vprop.integrations.sklearn._base import BayesianMLP
from vprop.integrations.sklearn._data import Rows, Standardization
from vprop.integrations.sklearn._likelihoods import Gaussian
from vprop.integrations.sklearn._prediction import draws_for, stacked_outputs
from vprop.integrations.sklearn._training import Learner


class BayesianMLPRegressor(RegressorMixin, BayesianMLP):
    """A multilayer perceptron with a Gaussian posterior over its weights, for regression with error bars.

    Like :class:`sklearn.neural_network.MLPRegressor`, trained by :class:`vprop.Vprop` in place of Adam, with Gaussian
    noise of constant variance that is learned. ``predict(X, return_std=True)`` gives the standard deviation of a new
    observation: noise, and what the data leave open about the function. Several networks are trained side by side, each
    with a posterior of its own; the prediction is that of their equal mixture.

    Args:
        hidden_layer_sizes: units of each hidden layer.
        activation: "relu", "tanh", "logistic" or "identity", of the hidden layers.
        n_members: how many networks, each from its own initial weights. One Gaussian is one mode of the posterior;
            several cost little more on small networks.
        optimizer: "vprop", or "ivon" with pairs of weight samples, which costs two to three times as much and comes
            closer to the Gaussian that maximizes the ELBO, a wider one.
        prior_precision: λ of the prior N(0, 1/λ) of every weight. Larger shrinks more.
        temperature: 1 is Bayes; below 1 the posterior is narrower (and the prior weaker).
        learning_rate_init: size of the first steps, 1 being Newton's. It falls to zero along half a cosine over
            ``max_iter`` passes.
        betas: momentum of the gradient, and decay of the curvature and of the noise variance.
        batch_size: rows in a mini-batch; "auto" is 64.
        max_iter: passes over the training data.
        standardize: bring every feature, and every target, to mean 0 and standard deviation 1 on the training data
            first. Without it targets should be of unit scale: the prior expects that.
        n_posterior_samples: weight samples that a prediction averages over, together for all members.
        early_stopping: in ``fit``, hold out ``validation_fraction`` of the rows, stop when their predictive
            log-density has not risen by ``tol`` for ``n_iter_no_change`` passes, and keep the best posterior.
        validation_fraction: share of the rows that early stopping holds out.
        n_iter_no_change: passes without progress before early stopping.
        tol: progress that counts, in nats per row.
        random_state: an integer for the same result every time. No global random state is read (unless this is
            ``None``) or changed.
        verbose: print the loss of every pass.
        device: where to train and predict, as torch names it.

    Attributes:
        noise_std_: standard deviation of the noise, in units of the target: a number, or one per output.
        posterior_: the :class:`vprop.posterior.DiagonalPosterior`, over standardized features and targets; outputs are
            (members, rows, targets).
        loss_curve_: mean negative log-density at sampled weights, standardized, for each pass.
        n_iter_: number of passes made.
        validation_scores_, best_validation_score_: mean predictive log-density of the held-out rows, standardized.
        n_features_in_, feature_names_in_: as always.

    Notes:
        ``sample_weight`` and ``partial_fit`` are as in :class:`BayesianMLPClassifier`; targets too are standardized by
        the rows of the first call. ``y`` may have several columns.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> y = X[:, 0] + 0.1 * np.random.RandomState(0).randn(200)
    >>> model = BayesianMLPRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X, return_std=True)
    >>> bool(0.07 < model.noise_std_ < 0.15), bool((std > model.noise_std_).all())
    (True, True)
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        *,
        n_members: int = 4,
        optimizer: str = "vprop",
        prior_precision: float = 1.0,
        temperature: float = 1.0,
        learning_rate_init: float = 0.3,
        betas: tuple[float, float] = (0.9, 0.98),
        batch_size: int | str = "auto",
        max_iter: int = 200,
        standardize: bool = True,
        n_posterior_samples: int = 128,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        device: str = "cpu",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.n_members = n_members
        self.optimizer = optimizer
        self.prior_precision = prior_precision
        self.temperature = temperature
        self.learning_rate_init = learning_rate_init
        self.betas = betas
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.standardize = standardize
        self.n_posterior_samples = n_posterior_samples
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose
        self.device = device

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """Train from the beginning on ``X`` (rows, features) with the targets ``y``, of one or more columns."""
        X, y, weights = self._checked(X, y, sample_weight, first=True)
        self._forget()
        self._take_target_scale(y, weights)
        self._fit(X, self._targets.apply(y), weights, y.shape[1])
        self._take_noise()
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """One pass over further rows, which are taken for new examples (see Notes above)."""
        first = not hasattr(self, "_learner")
        X, y, weights = self._checked(X, y, sample_weight, first)
        if first:
            self._take_target_scale(y, weights)
        elif y.shape[1] != len(self._targets.mean):
            raise ValueError(
                f"Invalid y: has {y.shape[1]} columns, must have {len(self._targets.mean)} as in the first call to "
                "partial_fit. Call fit to start again."
            )
        self._partial_fit(X, self._targets.apply(y), weights, y.shape[1])
        self._take_noise()
        return self

    def predict(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The predictive mean of each row; with ``return_std`` also the standard deviation of a new observation.

        The standard deviation covers both the noise (``noise_std_``) and the spread of the function under the
        posterior, which shrinks where there are more data.
        """
        means, stds = [], []
        for outputs in self._output_blocks(X):
            variance = outputs.var(0, unbiased=len(outputs) > 1) + self._noise_variance().mean(0)
            means.append(outputs.mean(0).numpy() * self._targets.scale + self._targets.mean)
            stds.append(variance.sqrt().numpy() * self._targets.scale)
        mean, std = self._in_units(np.concatenate(means)), self._in_units(np.concatenate(stds))
        return (mean, std) if return_std else mean

    # -- parts -----------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, sample_weight: Any, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._check_arguments()
        X, y = validate_data(self, X, y, reset=first, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        columns = y.reshape(len(y), -1).astype(np.float64)
        if first:
            self._one_dimensional = y.ndim == 1
        return self._checked_weights(sample_weight, X, columns)

    def _take_target_scale(self, y: np.ndarray, weights: np.ndarray) -> None:
        self._targets = Standardization.of(y, weights) if self.standardize else Standardization.none(y.shape[1])

    def _take_noise(self) -> None:
        std = self._noise_variance().mean(0)[0].sqrt().numpy() * self._targets.scale
        self.noise_std_ = float(std[0]) if self._one_dimensional else std

    _rows_in_a_batch = 64

    def _likelihood(self, outputs: int, like: Tensor) -> Gaussian:
        return Gaussian(self.n_members, outputs, self.betas[1], like)

    def _settle(self, learner: Learner, rows: Rows) -> None:
        """Set the noise to its best value: until now it was an average that lags behind."""
        draws = draws_for(16, self.n_members)
        outputs = stacked_outputs(learner.posterior(), rows.x, draws, self._prediction_seed)
        assert isinstance(learner.likelihood, Gaussian)
        learner.likelihood.settle(outputs, rows.y, rows.weights)

    def _noise_variance(self) -> Tensor:
        """(members, 1, outputs), standardized."""
        return self.posterior_.noise_variance.double().cpu()

    def _in_units(self, values: np.ndarray) -> np.ndarray:
        """In the shape of the targets that were given to fit."""
        return values[:, 0] if self._one_dimensional else values

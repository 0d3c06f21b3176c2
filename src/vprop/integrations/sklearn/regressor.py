"""A Bayesian neural network for regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from vprop.checks import invalid, is_finite
from vprop.integrations.sklearn._arguments import check_regression
from vprop.integrations.sklearn._base import BayesianMLP
from vprop.integrations.sklearn._conformal import IntervalsMixin
from vprop.integrations.sklearn._data import Rows, Standardization
from vprop.integrations.sklearn._folds import LEAST_TO_SPLIT, held_out_outputs, make_folds
from vprop.integrations.sklearn._likelihoods import Gaussian
from vprop.integrations.sklearn._noise import FAMILIES, Noise, fitted_noise, mixture_log_density, mixture_quantile
from vprop.integrations.sklearn._prediction import draws_for, stacked_outputs
from vprop.integrations.sklearn._training import Learner, Progress

STEPS: dict[str, tuple[float, tuple[float, float]]] = {
    "vprop": (0.3, (0.9, 0.98)),
    "ivon": (0.3, (0.9, 0.98)),
    "vario": (0.01, (0.9, 0.999)),
}
"""``learning_rate_init`` and ``betas`` that suit each optimizer."""

PRIORS = (1.0, 10.0)
"""``prior_precision="auto"``: functions that the rows determine well, and those that hide in noise. The first is taken
where nothing is held out."""

NOISE_DECAY = 0.98
"""Of the average that follows the noise variance during training."""


class BayesianMLPRegressor(IntervalsMixin, RegressorMixin, BayesianMLP):
    """A multilayer perceptron with a Gaussian posterior over its weights, for regression with error bars.

    Like :class:`sklearn.neural_network.MLPRegressor`, trained by :class:`vprop.Vario` in place of Adam, with noise of
    constant size that is learned. ``predict(X, return_std=True)`` gives the standard deviation of a new observation:
    noise, and what the data leave open about the function. ``interval`` gives the bounds that a new observation is
    between with a probability, ``log_density`` how probable observations are. Several networks are trained side by
    side, each with a posterior of its own; the prediction is that of their equal mixture.

    Residuals of the rows that a network was trained on are smaller than those of new ones, so noise that is learned
    from them makes intervals too narrow. Therefore further networks are trained, each without some of the rows
    (cross-validation), and the noise is the one under which those held-out rows are most probable. The posterior does
    not depend on that; it is trained on all rows.

    Args:
        hidden_layer_sizes: units of each hidden layer.
        activation: "relu", "tanh", "logistic" or "identity", of the hidden layers.
        n_members: how many networks, each from its own initial weights. One Gaussian is one mode of the posterior;
            several cost little more on small networks.
        optimizer: "vario"; "vprop", the paper's; or "ivon" with pairs of weight samples, which costs two to three times
            as much and comes closer to the Gaussian that maximizes the ELBO, a wider one.
        noise: "student_t" or "normal", the distribution of targets around the function. Student's t allows for
            outliers; its degrees of freedom, infinitely many (the normal) among them, are learned as the scale is.
        noise_folds: how many parts the rows are split into to learn the noise; each part in turn is held out, until
            1000 rows have been. 0 learns it from the residuals of training, which takes a fraction of the time.
        weight_noise_limit: with "vario", the largest standard deviation of a weight, as a share of the root mean square
            of its layer's weights. More of it fits less closely: try 0.05 for nearly noiseless data, 0.2 for few rows.
            Up to some thousand rows most weights are at that limit, so that the posterior is no wider with fewer rows;
            ``noise_std_``, which held-out rows decide, then is.
        prior_precision: λ of the prior N(0, 1/λ) of every weight. Larger shrinks more. "auto" is 1 or 10, whichever
            makes the held-out rows of ``noise_folds`` more probable, at the cost of training the networks without them
            twice; 1 where there are no such rows.
        temperature: 1 is Bayes; below 1 the posterior is narrower (and the prior weaker).
        learning_rate_init: size of the first steps, as for Adam with "vario", and 1 being Newton's with the others;
            ``None`` is 0.01 with "vario" and 0.3 with the others. It falls to zero along half a cosine over
            ``max_iter`` passes.
        betas: momentum of the gradient, and decay of the curvature; ``None`` is (0.9, 0.999) with "vario" and
            (0.9, 0.98) with the others.
        batch_size: rows in a mini-batch; "auto" is 64, and one 64th of more than 4096 rows, but at most 512.
        max_iter: passes over the training data. Best results on some hundred rows take more than the default: about
            16,000 steps, a step being one mini-batch.
        standardize: bring every feature, and every target, to mean 0 and standard deviation 1 on the training data
            first. Without it targets should be of unit scale: the prior expects that.
        n_posterior_samples: weight samples that a prediction averages over, together for all members.
        early_stopping: in ``fit``, hold out ``validation_fraction`` of the rows, stop when their predictive
            log-density has not risen by ``tol`` for ``n_iter_no_change`` passes, and keep the best posterior. The noise
            is then learned from those rows, without further networks.
        validation_fraction: share of the rows that early stopping holds out.
        n_iter_no_change: passes without progress before early stopping.
        tol: progress that counts, in nats per row.
        random_state: an integer for the same result every time. No global random state is read (unless this is
            ``None``) or changed.
        verbose: print the loss of every pass.
        device: where to train and predict, as torch names it.

    Attributes:
        noise_std_: standard deviation of the noise, in units of the target: a number, or one per output.
        noise_dof_: degrees of freedom of the noise, infinity for the normal: a number, or one per output.
        held_out_log_density_: mean predictive log-density of the rows that the noise was learned from, in units of the
            target: a score to choose arguments by. Not there with ``noise_folds=0``.
        prior_precision_: λ as given or chosen.
        posterior_: the :class:`vprop.posterior.DiagonalPosterior`, over standardized features and targets; outputs are
            (members, rows, targets).
        loss_curve_: mean negative log-density at sampled weights, standardized, for each pass.
        n_iter_: number of passes made.
        validation_scores_, best_validation_score_: mean predictive log-density of the held-out rows, standardized.
        n_features_in_, feature_names_in_: as always.

    Notes:
        ``sample_weight`` and ``partial_fit`` are as in :class:`BayesianMLPClassifier`; targets too are standardized by
        the rows of the first call. ``partial_fit`` follows the size of the noise on the rows it is given; after ``fit``
        it keeps the shape, and the ratio to the residuals of training, that were learned there. ``y`` may have several
        columns.

        Copies of a row should be one row with a weight: of copies, some may be held out while others are trained on.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> y = X[:, 0] + 0.1 * np.random.RandomState(0).randn(200)
    >>> model = BayesianMLPRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X, return_std=True)
    >>> bool(0.07 < model.noise_std_ < 0.15), bool((std > model.noise_std_).all())
    (True, True)
    >>> lower, upper = model.interval(X, level=0.9)
    >>> bool(0.8 < np.mean((lower < y) & (y < upper)) < 1)
    True
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        *,
        n_members: int = 4,
        optimizer: str = "vario",
        noise: str = "student_t",
        noise_folds: int = 5,
        weight_noise_limit: float = 0.1,
        prior_precision: float | str = "auto",
        temperature: float = 1.0,
        learning_rate_init: float | None = None,
        betas: tuple[float, float] | None = None,
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
        self._keep(locals())

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
        first = not hasattr(self, "posterior_")
        X, y, weights = self._checked(X, y, sample_weight, first)
        if first:
            self._take_target_scale(y, weights)
            self.prior_precision_ = PRIORS[0] if self.prior_precision == "auto" else float(self.prior_precision)
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
            variance = outputs.var(0, unbiased=len(outputs) > 1).numpy() + [noise.variance for noise in self._noises()]
            means.append(outputs.mean(0).numpy() * self._targets.scale + self._targets.mean)
            stds.append(np.sqrt(variance) * self._targets.scale)
        mean, std = self._in_units(np.concatenate(means)), self._in_units(np.concatenate(stds))
        return (mean, std) if return_std else mean

    def interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Bounds that a new observation is between with the probability ``level``, below and above equally likely.

        They are quantiles of the mixture over weight samples and members, with the noise around each.
        """
        if not is_finite(level) or not 0 < level < 1:
            raise invalid("level", level, "a number between 0 and 1", "0.9 leaves 5 % on either side.")
        bounds: list[list[np.ndarray]] = [[], []]
        for outputs in self._output_blocks(X):
            for bound, probability in zip(bounds, ((1 - level) / 2, (1 + level) / 2), strict=True):
                columns = [
                    mixture_quantile(outputs[:, :, column].numpy(), noise, probability)
                    for column, noise in enumerate(self._noises())
                ]
                bound.append(np.stack(columns, axis=1) * self._targets.scale + self._targets.mean)
        lower, upper = (self._in_units(np.concatenate(bound)) for bound in bounds)
        return lower, upper

    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """log p(y|x) of each row, in units of the target; their mean over new rows is the test log-likelihood.

        The density is a mixture over weight samples and members. Several columns of ``y`` count together.
        """
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        y = y.reshape(len(y), -1).astype(np.float64)
        if y.shape[1] != len(self._targets.mean):
            raise ValueError(f"Invalid y: has {y.shape[1]} columns, must have {len(self._targets.mean)} as in fit.")
        columns = self._targets.apply(y)
        logs, first = [], 0
        for outputs in self._output_blocks(X):
            rows = columns[first : first + outputs.shape[1]]
            logs.append(mixture_log_density(outputs.numpy(), rows, self._noises()))
            first += len(rows)
        return np.concatenate(logs) - np.log(self._targets.scale).sum()

    # -- parts -----------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, sample_weight: Any, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._check_arguments()
        X, y = validate_data(self, X, y, reset=first, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        checked = self._checked_weights(sample_weight, X, y.reshape(len(y), -1).astype(np.float64))
        if first:  # now that nothing is refused any more: an earlier fit keeps the shape of its answers
            self._one_dimensional = y.ndim == 1
        return checked

    def _take_target_scale(self, y: np.ndarray, weights: np.ndarray) -> None:
        self._targets = Standardization.of(y, weights) if self.standardize else Standardization.none(y.shape[1])

    _optimizers = tuple(STEPS)
    _unseen: tuple[np.ndarray, Rows] | None
    prior_precision_: float
    _decides = True

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_regression(self, tuple(FAMILIES))

    def _learning_rate(self) -> float:
        default, _ = STEPS[self.optimizer]
        return default if self.learning_rate_init is None else float(self.learning_rate_init)

    def _betas(self) -> tuple[float, float]:
        _, default = STEPS[self.optimizer]
        return default if self.betas is None else (self.betas[0], self.betas[1])

    def _rows_in_a_batch(self, rows: int) -> int:
        return min(max(64, rows // 64), 512)

    def _likelihood(self, networks: int, outputs: int, like: Tensor) -> Gaussian:
        return Gaussian(networks, outputs, NOISE_DECAY, like)

    # -- the noise -------------------------------------------------------------------------------------------

    def _settle(self, learner: Learner, rows: Rows, held_out: Rows | None) -> None:
        """Set the noise to its best value: until now it was an average that lags behind."""
        draws = draws_for(16, self.n_members)
        outputs = stacked_outputs(learner.posterior(), rows.x, draws, self._prediction_seed)
        assert isinstance(learner.likelihood, Gaussian)
        learner.likelihood.settle(outputs, rows.y, rows.weights)
        trained = self._training_scales(learner)
        self._shapes = [(1.0, math.inf)] * len(trained)
        if held_out is not None:
            outputs = stacked_outputs(learner.posterior(), held_out.x, self._draws(), self._prediction_seed)
            known = outputs.flatten(0, 1).cpu().numpy(), held_out
        elif self._unseen is not None:
            known = self._unseen
            self._unseen = None  # as large as all predictions for the held-out rows
        elif self.noise == "normal":
            return
        else:
            known = outputs.flatten(0, 1).cpu().numpy(), rows
        noises, density = self._fitted(*known)
        self._shapes = [(noise.scale / scale, noise.dof) for noise, scale in zip(noises, trained, strict=True)]
        if known[1] is not rows:
            self.held_out_log_density_ = density

    def _prior(self) -> float:
        return self.prior_precision_

    def _choose(self, rows: Rows, early_stopping: bool) -> None:
        """The prior, and outputs for held-out rows to learn the noise from."""
        candidates = PRIORS if self.prior_precision == "auto" else (float(self.prior_precision),)
        self.prior_precision_ = candidates[0]
        self._unseen = None
        if early_stopping or not self.noise_folds or len(rows) < LEAST_TO_SPLIT:
            return
        best = -math.inf
        for candidate in candidates:
            previous, self.prior_precision_ = self.prior_precision_, candidate
            unseen = self._held_out_in_turn(rows)
            _, density = self._fitted(*unseen)
            if density > best or self._unseen is None:
                best, self._unseen = density, unseen
            else:
                self.prior_precision_ = previous

    def _held_out_in_turn(self, rows: Rows) -> tuple[np.ndarray, Rows]:
        """Outputs for rows, each of networks that were trained without it; and these rows."""
        shuffle = np.random.RandomState(self._noise_seed)
        folds = make_folds(rows, self.noise_folds, self.n_members, shuffle)
        learner = self._new_learner(rows.y.shape[1], folds.rows, folds.networks)
        self._train(learner, Progress(self.n_iter_no_change, self.tol, False), folds.rows, None, shuffle)
        held_out = rows.pick(torch.cat(folds.held_out))
        outputs = stacked_outputs(learner.posterior(), held_out.x, self._draws(), self._prediction_seed)
        return held_out_outputs(folds, outputs), held_out

    def _fitted(self, outputs: np.ndarray, rows: Rows) -> tuple[list[Noise], float]:
        """The best noise of each column, and the mean log-density of the rows in units of the targets."""
        y, weights = rows.y.double().cpu().numpy(), rows.weights.double().cpu().numpy()
        noises = [fitted_noise(outputs[:, :, c], y[:, c], weights, self.noise)[0] for c in range(y.shape[1])]
        density = np.average(mixture_log_density(outputs, y, noises), weights=weights)
        return noises, float(density - np.log(self._targets.scale).sum())

    def _training_scales(self, learner: Learner) -> list[float]:
        """Of the noise in each column as training has it, standardized."""
        assert isinstance(learner.likelihood, Gaussian)
        return [math.sqrt(value) for value in learner.likelihood.noise.double().mean(0)[0].tolist()]

    def _noises(self) -> list[Noise]:
        """The noise of each column of the target, standardized."""
        trained = self._training_scales(self._learner)
        shapes = getattr(self, "_shapes", None) or [(1.0, math.inf)] * len(trained)
        return [Noise(ratio * scale, dof) for (ratio, dof), scale in zip(shapes, trained, strict=True)]

    def _take_noise(self) -> None:
        self._forget_intervals()
        noises = self._noises()
        variances = torch.tensor([noise.variance for noise in noises], dtype=torch.float64, device="cpu")
        std = variances.sqrt().numpy() * self._targets.scale
        dof = np.array([noise.dof for noise in noises])
        self.noise_std_ = float(std[0]) if self._one_dimensional else std
        self.noise_dof_ = float(dof[0]) if self._one_dimensional else dof
        learner = self._learner
        assert isinstance(learner.likelihood, Gaussian)
        variance = variances.to(learner.likelihood.noise).expand_as(learner.likelihood.noise).clone()
        self.posterior_ = learner.optimizer.posterior(learner.network, likelihood="gaussian", noise_variance=variance)

    def _in_units(self, values: np.ndarray) -> np.ndarray:
        """In the shape of the targets that were given to fit."""
        return values[:, 0] if self._one_dimensional else values

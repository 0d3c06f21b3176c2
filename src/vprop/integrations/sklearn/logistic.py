"""Bayesian logistic regression, for two classes or more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from vprop.help.auto_prior import AutoPrior
from vprop.integrations.sklearn._arguments import check_choice, check_flag, check_positive, check_shared
from vprop.integrations.sklearn._base import SampledEstimator
from vprop.integrations.sklearn._classes import ClassesMixin
from vprop.integrations.sklearn._data import Rows, row_weights
from vprop.integrations.sklearn._linear import LinearLearner, coefficients, intercepts, make_prior, predictive_score
from vprop.integrations.sklearn._training import CosineSteps, Progress, warn_if_diverged

LARGEST_FULL = 500
"""Weights up to which ``covariance="auto"`` takes the full one: beyond, its factorization takes most of the time."""


class BayesianLogisticRegression(ClassesMixin, ClassifierMixin, SampledEstimator):
    """Logistic regression with a Gaussian posterior over its coefficients; multinomial for three classes or more.

    Trained on all rows at once by :class:`vprop.VON` (full covariance) or :class:`vprop.CVI` (diagonal), with exact
    Hessians at sampled weights: the Gaussian that maximizes the evidence lower bound, up to the noise of sampling.

    Args:
        prior_precision: λ of the prior N(0, 1/λ) of the coefficients of standardized features. It stands for ``C=1/λ``
            of scikit-learn's ``LogisticRegression``. "auto" finds the value that maximizes the evidence lower bound.
        covariance: "full", "diagonal", or "auto": full up to 500 weights.
        fit_intercept: have intercepts. Their prior is N(0, 10²), next to none: shrinking them would be a
            statement about how frequent the classes are. Without them ``standardize`` only scales the features: a shift
            would be an intercept, and would take a column of ones away.
        learning_rate_init: size of the first steps, 1 being Newton's; falls to zero along half a cosine.
        max_iter: steps.
        standardize: bring every feature to mean 0 and standard deviation 1 on the training data first. ``coef_`` is in
            the original units all the same.
        n_posterior_samples: weight samples that a prediction averages over.
        early_stopping: in ``fit``, hold out ``validation_fraction`` of the rows, stop when their predictive
            log-likelihood has not risen by ``tol`` for ``n_iter_no_change`` steps, and keep the best posterior.
            The loss is convex and has a prior: there is seldom a need.
        validation_fraction: share of the rows that early stopping holds out.
        n_iter_no_change: steps without progress before early stopping.
        tol: progress that counts, in nats per row.
        random_state: an integer for the same result every time. No global random state is read (unless this is
            ``None``) or changed.
        verbose: print the loss of every step.
        device: where to train and predict, as torch names it.

    Attributes:
        classes_: the class labels.
        coef_, coef_std_: posterior mean and standard deviation of the coefficients, in the units of the features:
            (1, features) for two classes, else (classes, features).
        intercept_, intercept_std_: the same of the intercepts.
        prior_precision_: λ that was used, after "auto" the one that was found; only of ``fit`` and the first
            ``partial_fit``.
        posterior_: the :class:`vprop.posterior.Posterior`, over standardized features.
        elbo_: evidence lower bound of the training data, in nats; after ``partial_fit`` of its rows, given the earlier.
        loss_curve_: mean negative log-likelihood at sampled weights, for each step.
        n_iter_: number of steps made.
        validation_scores_, best_validation_score_: mean predictive log-likelihood of the held-out rows.
        n_features_in_, feature_names_in_: as always.

    Notes:
        ``sample_weight`` of k is the same as k copies of a row: the posterior counts Σ weights examples.

        ``partial_fit`` is Bayes' rule: the posterior of the earlier calls is the prior of this one, whose rows count as
        new examples. With the full covariance a stream ends where ``fit`` on all rows would, up to the Gaussian
        approximation. Features are standardized by the rows of the first call.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BayesianLogisticRegression(random_state=0).fit(X, y)
    >>> model.coef_.shape, model.coef_std_.shape, bool(model.score(X, y) > 0.97)
    ((1, 30), (1, 30), True)
    """

    def __init__(
        self,
        prior_precision: float | str = 0.5,
        *,
        covariance: str = "auto",
        fit_intercept: bool = True,
        learning_rate_init: float = 0.5,
        max_iter: int = 100,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianLogisticRegression:
        """Train from the beginning on ``X`` (rows, features) with the labels ``y``."""
        self._check_arguments()
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        weights = row_weights(sample_weight, X)
        self._forget()
        self._take_classes(y)
        self._learn(X, y, weights, may_hold_out=True)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> BayesianLogisticRegression:
        """Learn from further rows (see Notes above); ``classes`` lists all labels, in the first call at least."""
        self._check_arguments()
        first = not hasattr(self, "posterior_")
        X, y = validate_data(self, X, y, reset=first, dtype=[np.float64, np.float32])
        weights = row_weights(sample_weight, X)
        self._take_all_classes(classes, first)
        self._learn(X, y, weights, may_hold_out=False)
        return self

    def _take_scales(self, X: np.ndarray, weights: np.ndarray) -> None:
        super()._take_scales(X, weights)
        if not self.fit_intercept:
            self._inputs = replace(self._inputs, mean=np.zeros_like(self._inputs.mean))

    def _learn(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray, may_hold_out: bool) -> None:
        """Train with the posterior so far, if there is one, as the prior."""
        targets, counts = self._encode(y), weights > 0
        X, targets, weights = X[counts], targets[counts], weights[counts]
        earlier = getattr(self, "posterior_", None)
        if earlier is None:
            self._take_seeds()
        train, validation = (X, targets, weights), None
        if may_hold_out:
            train, validation = self._held_out(X, targets, weights, stratify=True)
        if earlier is None:
            self._take_scales(train[0], train[2])
        rows = self._rows(train, torch.float64)
        held_out = None if validation is None else self._rows(validation, torch.float64)
        learner = self._new_learner(rows, earlier)
        start = learner.loss_at_mean(rows)
        progress, learner = self._train(learner, rows, held_out)
        self._take_progress(progress)
        self._take_result(learner, rows, first=earlier is None)
        warn_if_diverged(start, learner.loss_at_mean(rows))

    def _train(self, learner: LinearLearner, rows: Rows, held_out: Rows | None) -> tuple[Progress, LinearLearner]:
        progress = Progress(self.n_iter_no_change, self.tol, bool(self.verbose))
        steps = CosineSteps(self.learning_rate_init, self.max_iter)
        for _ in range(self.max_iter):
            loss = learner.step(rows, steps())
            score = None if held_out is None else predictive_score(learner.posterior(), held_out, self._prediction_seed)
            if progress.note(loss, learner, score):
                break
        return progress, learner if progress.best is None else progress.best

    def _new_learner(self, rows: Rows, earlier: Any) -> LinearLearner:
        # Two classes need one logit; one class has the probability 1 whatever its logit.
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        model = nn.Linear(rows.x.shape[1], outputs, bias=bool(self.fit_intercept), device="meta", dtype=torch.float64)
        model = model.to_empty(device=self.device)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.zeros_like(p) if earlier is None else earlier.mean[name])
        size = sum(p.numel() for p in model.parameters())
        full = self.covariance == "full" or (self.covariance == "auto" and size <= LARGEST_FULL)
        precision: AutoPrior | float
        if self.prior_precision == "auto":  # the few steps of a fit must be enough for it
            precision = AutoPrior(every=1, warmup=min(20, self.max_iter // 5))
        else:
            precision = float(self.prior_precision)
        groups, prior = make_prior(model, precision, earlier)
        return LinearLearner.make(model, groups, prior, full, rows.count, self._noise_seed)

    def _take_result(self, learner: LinearLearner, rows: Rows, first: bool) -> None:
        self.posterior_ = learner.posterior()
        self.elbo_ = float(self.posterior_.elbo(learner.objective(rows)))
        if first:
            self.prior_precision_ = float(learner.optimizer.param_groups[0]["prior_precision"])
        self.coef_, self.coef_std_ = coefficients(self.posterior_, self._inputs)
        self.intercept_, self.intercept_std_ = intercepts(self.posterior_, self._inputs)

    def _probability_blocks(self, X: Any) -> Iterator[Tensor]:
        for logits in self._output_blocks(X):
            if len(self.classes_) == 2:
                logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
            yield logits.softmax(-1)

    def _check_arguments(self) -> None:
        check_shared(self)
        if self.prior_precision != "auto":
            check_positive(
                self, "prior_precision", "It is λ of the prior N(0, 1/λ); 0.5 is the default, 'auto' finds one."
            )
        check_choice(self, "covariance", ("auto", "full", "diagonal"), "Full takes a matrix over all weights.")
        check_flag(self, "fit_intercept")

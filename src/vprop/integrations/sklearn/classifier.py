"""A Bayesian neural network that classifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from vprop.integrations.sklearn._base import BayesianMLP
from vprop.integrations.sklearn._classes import ClassesMixin
from vprop.integrations.sklearn._data import Rows
from vprop.integrations.sklearn._likelihoods import Categorical
from vprop.integrations.sklearn._training import Learner


class BayesianMLPClassifier(ClassesMixin, ClassifierMixin, BayesianMLP):
    """A multilayer perceptron with a Gaussian posterior over its weights, for classification.

    Like :class:`sklearn.neural_network.MLPClassifier`, trained by :class:`vprop.Vprop` in place of Adam: probabilities
    are averages over weights that the data allow, and so are less sure of themselves where there are few data. Several
    networks are trained side by side, each with a posterior of its own; the prediction is that of their equal mixture.

    Args:
        hidden_layer_sizes: units of each hidden layer.
        activation: "relu", "tanh", "logistic" or "identity", of the hidden layers.
        n_members: how many networks, each from its own initial weights. One Gaussian is one mode of the posterior;
            several cost little more on small networks.
        optimizer: "vprop", or "ivon" with pairs of weight samples, which costs two to three times as much and comes
            closer to the Gaussian that maximizes the ELBO, a wider one, if ``betas`` let it forget its start.
        prior_precision: λ of the prior N(0, 1/λ) of every weight. Larger shrinks more.
        temperature: 1 is Bayes; below 1 the posterior is narrower (and the prior weaker).
        learning_rate_init: size of the first steps, 1 being Newton's. It falls to zero along half a cosine over
            ``max_iter`` passes.
        betas: momentum of the gradient and decay of the curvature, from which the variances come. See Notes.
        batch_size: rows in a mini-batch; "auto" is 128.
        max_iter: passes over the training data.
        standardize: bring every feature to mean 0 and standard deviation 1 on the training data first, and let only the
            logarithm count of what is beyond three standard deviations, so that rare values do not outweigh all else.
        n_posterior_samples: weight samples that a prediction averages over, together for all members.
        early_stopping: in ``fit``, hold out ``validation_fraction`` of the rows, stop when their predictive
            log-likelihood has not risen by ``tol`` for ``n_iter_no_change`` passes, and keep the best posterior.
        validation_fraction: share of the rows that early stopping holds out.
        n_iter_no_change: passes without progress before early stopping.
        tol: progress that counts, in nats per row.
        random_state: an integer for the same result every time. No global random state is read (unless this is
            ``None``) or changed.
        verbose: print the loss of every pass.
        device: where to train and predict, as torch names it.

    Attributes:
        classes_: the class labels.
        posterior_: the :class:`vprop.posterior.DiagonalPosterior`, over standardized features; outputs are
            (members, rows, classes).
        loss_curve_: mean negative log-likelihood at sampled weights, for each pass.
        n_iter_: number of passes made.
        validation_scores_, best_validation_score_: mean predictive log-likelihood of the held-out rows.
        n_features_in_, feature_names_in_: as always.

    Notes:
        The defaults are those that predict best, as judged by held-out log-loss. With them the curvature is a mean over
        a good part of the training, its start (``hess_init=1`` of :class:`vprop.Vprop`) included, so that weights which
        the data hardly determine keep narrower posteriors than Bayes would give them. ``betas=(0.9, 0.99)`` with more
        passes comes closer to Bayes; on small data that underfits.

        ``sample_weight`` of k is the same as k copies of a row: the posterior counts Σ weights examples. With several
        mini-batches the two differ in the order in which rows come; when all rows fit into one batch they agree to
        rounding (training is then in float64, otherwise in float32).

        ``partial_fit`` makes one pass over the rows it is given, with a constant step of a third of
        ``learning_rate_init``. It takes them for *new* examples: the posterior counts all examples seen so far, and
        each batch for a sample of them. Repeating the same rows makes it too narrow. Features are standardized by the
        rows of the first call.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BayesianMLPClassifier(max_iter=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, bool(model.score(X, y) > 0.9)
    ((2, 3), True)
    >>> labels, std = model.predict(X[:2], return_std=True)
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        *,
        n_members: int = 4,
        optimizer: str = "vprop",
        prior_precision: float = 0.5,
        temperature: float = 1.0,
        learning_rate_init: float = 0.3,
        betas: tuple[float, float] = (0.9, 0.999),
        batch_size: int | str = "auto",
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPClassifier:
        """Train from the beginning on ``X`` (rows, features) with the labels ``y``."""
        self._check_arguments()
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        used, labels, weights = self._checked_weights(sample_weight, X, y)
        self._forget()
        self._take_classes(y)
        self._fit(used, self._encode(labels), weights, len(self.classes_), stratify=True)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> BayesianMLPClassifier:
        """One pass over further rows (see Notes above); ``classes`` lists all labels, in the first call at least."""
        self._check_arguments()
        first = not hasattr(self, "posterior_")
        X, y = validate_data(self, X, y, reset=first, dtype=[np.float64, np.float32])
        self._take_all_classes(classes, first)
        X, y, weights = self._checked_weights(sample_weight, X, y)
        self._partial_fit(X, self._encode(y), weights, len(self.classes_))
        return self

    def _probability_blocks(self, X: Any) -> Iterator[Tensor]:
        for logits in self._output_blocks(X):
            yield logits.softmax(-1)

    _linear_within = 3.0

    def _rows_in_a_batch(self, rows: int) -> int:
        return 128

    def _likelihood(self, networks: int, outputs: int, like: Tensor) -> Categorical:
        return Categorical()

    def _settle(self, learner: Learner, rows: Rows, held_out: Rows | None) -> None:
        """Nothing but weights is learned."""

"""Class labels, and predictions from samples of their probabilities."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from vprop.integrations.sklearn._conformal import SetsMixin


class ClassesMixin(SetsMixin):
    """What the classifiers share."""

    classes_: np.ndarray

    @abstractmethod
    def _probability_blocks(self, X: Any) -> Iterator[Tensor]:
        """(samples, rows, classes), some rows at a time."""

    def _take_classes(self, y: Any) -> None:
        """The classes of checked labels."""
        self.classes_ = np.unique(y)
        self._forget_sets()

    def _take_all_classes(self, classes: Any, first: bool) -> None:
        """The classes of a stream, which must be known from its beginning."""
        self._forget_sets()
        if first:
            if classes is None:
                raise ValueError(
                    "Invalid classes=None: must list all classes in the first call to partial_fit. Later batches may "
                    "hold labels that this one does not: pass classes=numpy.unique(all_labels)."
                )
            self.classes_ = unique_labels(classes)
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise ValueError(
                f"Invalid classes={classes!r}: must be those of the first call to partial_fit, {self.classes_!r}. "
                "Leave them out, or call fit to start again."
            )

    def _encode(self, y: Any) -> np.ndarray:
        """Labels as numbers of their classes."""
        check_classification_targets(y)
        labels = column_or_1d(y)
        numbers = np.clip(np.searchsorted(self.classes_, labels), 0, len(self.classes_) - 1)
        unknown = self.classes_[numbers] != labels
        if unknown.any():
            raise ValueError(
                f"Invalid y: has the labels {np.unique(labels[unknown])[:4]}, must be among the classes "
                f"{self.classes_}. Name all classes in the first call to partial_fit."
            )
        return numbers

    def predict_proba(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Probabilities of the classes, averaged over weights of the posterior: (rows, classes).

        With ``return_std`` also the standard deviation of each probability under the posterior: how far the weights
        that the data allow disagree. It vanishes with more data; the probability itself need not become certain.
        """
        means, stds = [], []
        for samples in self._probability_blocks(X):
            total = samples.sum(0)
            means.append((total / total.sum(-1, keepdim=True)).numpy())  # sums to 1 to the last digit
            stds.append(samples.std(0, unbiased=len(samples) > 1).numpy())
        return (np.concatenate(means), np.concatenate(stds)) if return_std else np.concatenate(means)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithm of :meth:`predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The class with the largest probability, for each row.

        With ``return_std`` also the standard deviation, under the posterior, of that class's probability.
        """
        mean, std = self.predict_proba(X, return_std=True)
        best = mean.argmax(1)
        labels = self.classes_[best]
        return (labels, std[np.arange(len(best)), best]) if return_std else labels

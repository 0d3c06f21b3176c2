"""Sets of classes, and intervals, that hold the truth as often as was asked for: split conformal prediction."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self

from vprop.calibration import ConformalIntervals, ConformalSets


class SetsMixin:
    """For classifiers."""

    conformal_sets_: ConformalSets

    @abstractmethod
    def predict_proba(self, X: Any, return_std: bool = False) -> Any:
        """Probabilities of the classes."""

    @abstractmethod
    def _encode(self, y: Any) -> np.ndarray:
        """Labels as numbers of their classes."""

    def calibrate_sets(self, X: Any, y: Any, level: float = 0.9) -> Self:
        """Find, on rows that ``fit`` has not seen, the threshold of sets that hold ``level`` of the labels.

        See :class:`vprop.calibration.ConformalSets`; it is kept as ``conformal_sets_`` until the estimator is trained
        again.
        """
        probs, labels = torch.as_tensor(self.predict_proba(X), device="cpu"), self._encode(y)
        self.conformal_sets_ = ConformalSets.fit(probs, torch.as_tensor(labels, device="cpu"), level)
        return self

    def predict_set(self, X: Any) -> np.ndarray:
        """Which classes are in the set of each row: true or false, (rows, classes) in the order of ``classes_``."""
        check_is_fitted(self)
        _require(self, "conformal_sets_", "calibrate_sets")
        return self.conformal_sets_.of(torch.as_tensor(self.predict_proba(X), device="cpu")).numpy()

    def _forget_sets(self) -> None:
        """They were those of another model."""
        vars(self).pop("conformal_sets_", None)


class IntervalsMixin:
    """For regressors."""

    conformal_intervals_: ConformalIntervals

    @abstractmethod
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean, and standard deviation of a new observation."""

    def calibrate_intervals(self, X: Any, y: Any, level: float = 0.9) -> Self:
        """Find, on rows that ``fit`` has not seen, how wide intervals must be to hold ``level`` of the targets.

        See :class:`vprop.calibration.ConformalIntervals`; it is kept as ``conformal_intervals_`` until the estimator is
        trained again.
        """
        mean, std = (
            torch.as_tensor(part, dtype=torch.float64, device="cpu") for part in self.predict(X, return_std=True)
        )
        targets = torch.tensor(np.asarray(y, dtype=np.float64), device="cpu")  # a copy: pandas lends none to write to
        if mean.dim() == 1 and targets.shape == (len(mean), 1):
            targets = targets[:, 0]  # a column for one target, as fit takes it
        self.conformal_intervals_ = ConformalIntervals.fit(mean, std, targets, level)
        return self

    def predict_interval(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of the calibrated interval of each row.

        ``interval(X, level)`` takes the posterior at its word instead, and needs no further rows.
        """
        check_is_fitted(self)
        _require(self, "conformal_intervals_", "calibrate_intervals")
        mean, std = (
            torch.as_tensor(part, dtype=torch.float64, device="cpu") for part in self.predict(X, return_std=True)
        )
        low, high = self.conformal_intervals_.of(mean, std)
        return low.numpy(), high.numpy()

    def _forget_intervals(self) -> None:
        """They were those of another model."""
        vars(self).pop("conformal_intervals_", None)


def _require(estimator: Any, attribute: str, method: str) -> None:
    if not hasattr(estimator, attribute):
        raise NotFittedError(
            f"This {type(estimator).__name__} has not been calibrated since it was trained. Call {method}(X, y) with "
            "rows that fit has not seen."
        )

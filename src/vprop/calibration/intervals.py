"""Split conformal prediction for regression: intervals that hold the target as often as was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vprop.calibration._conformal import conformal_quantile
from vprop.calibration._held_out import check_kind, held_out_batches, held_out_predictions
from vprop.metrics._arguments import check_level
from vprop.posterior import Posterior
from vprop.posterior.predictive.batch_norm import training_inputs


@dataclass(frozen=True)
class ConformalIntervals:
    """μ(x) ± threshold·σ(x): as wide as the model is unsure, scaled so that they hold the target as often as asked for.

    The score of an example is |y − μ(x)|/σ(x), its error in predicted standard deviations, and the threshold the
    quantile that split conformal prediction takes of held-out ones: about 1.64 for a level of 90 % and a model with the
    right Gaussian error bars, more for one that is too sure of itself. With several outputs each has a threshold of its
    own, and each interval by itself the probability ``level`` or more.

    >>> import torch
    >>> mean, std = torch.zeros(9), torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    >>> y = torch.arange(9.0) * std  # errors of 0, 1, …, 8 standard deviations
    >>> intervals = ConformalIntervals.fit(mean, std, y, level=0.7)  # the seventh smallest
    >>> float(intervals.threshold)
    6.0
    >>> low, high = intervals.of(mean[:2], std[:2])
    >>> [round(end, 3) for end in (*low.tolist(), *high.tolist())]
    [-6.0, -12.0, 6.0, 12.0]
    """

    level: float
    threshold: Tensor
    examples: int
    posterior: Posterior | None = field(default=None, repr=False)
    num_samples: int = field(default=32, repr=False)
    seed: int = field(default=0, repr=False)
    batch_norm: Any = field(default=None, repr=False, compare=False)
    dropout: bool = field(default=False, repr=False)

    @classmethod
    def fit(cls, mean: Tensor, std: Tensor, y: Tensor, level: float = 0.9) -> ConformalIntervals:
        """From means and standard deviations, of any model, and the targets of data that it was not trained on.

        All have the shape (n,), or (n, outputs).
        """
        check_level(level)
        _check_shapes(mean, std, y)
        scores = (y.double() - mean.double()).abs() / _positive(std)
        threshold = conformal_quantile(scores, level, "conformal_intervals")
        return cls(level, threshold, len(scores))

    def of(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Both ends of the intervals, further out by what rounding may take from a target that lies on one.

        Several first dimensions are fine, and none if there is one output, as is one ``std`` for all.
        """
        _check_spread(mean, std)
        outputs = self.threshold.dim()
        if outputs and (mean.dim() <= outputs or self.threshold.shape != mean.shape[-outputs:]):
            shape = ", ".join(["n", *map(str, self.threshold.shape)])
            raise ValueError(
                f"conformal_intervals: mean has shape {tuple(mean.shape)}, must be ({shape}) as in the calibration. "
                "Reshape it."
            )
        wide, dtype = mean.double(), mean.dtype if mean.is_floating_point() else torch.float64
        half = self.threshold.to(std.device) * _positive(std)
        half = half + _roundings(dtype) * (wide.abs() + half)
        return (wide - half).to(dtype), (wide + half).to(dtype)

    def predict(self, x: Any) -> tuple[Tensor, Tensor]:
        """Both ends of the intervals for ``x``, with the posterior and as many samples as in the calibration."""
        if self.posterior is None:
            raise ValueError(
                "These intervals were made of means and standard deviations, and know no posterior. Use "
                "intervals.of(mean, std), or make them with conformal_intervals(posterior, x, y)."
            )
        how: Any = {"batch_norm": self.batch_norm, "dropout": self.dropout}
        prediction = self.posterior.predict(x, self.num_samples, self.seed, **how)
        return self.of(prediction.mean, prediction.variance.sqrt())


def conformal_intervals(
    posterior: Posterior,
    data: Any,
    y: Any = None,
    *,
    level: float = 0.9,
    num_samples: int = 32,
    seed: int = 0,
    batch_norm: Any = None,
    dropout: bool = False,
) -> ConformalIntervals:
    """Intervals that hold the target with probability ``level``, calibrated on held-out data.

    ``data`` are inputs with targets ``y``, or a loader of pairs; neither the training data nor the test data. At least
    level/(1−level) of them, and some hundred for a coverage close to ``level`` in this calibration set and not only on
    average. ``batch_norm`` and ``dropout`` are those of ``posterior.predict``, here and in predictions. See
    :class:`ConformalIntervals`.

    >>> import torch, vprop
    >>> model, x = torch.nn.Linear(2, 1), torch.randn(100, 2)
    >>> y = model(x).detach() + torch.randn(100, 1)
    >>> posterior = vprop.Vprop(model.parameters(), num_data=1000).posterior(model, likelihood="gaussian")
    >>> intervals = conformal_intervals(posterior, x, y, level=0.8)
    >>> low, high = intervals.predict(x)
    >>> bool(((low <= y) & (y <= high)).float().mean() >= 0.8)
    True
    """
    where = "conformal_intervals"
    check_level(level)
    how: Any = {"batch_norm": training_inputs(batch_norm), "dropout": dropout}
    batches = held_out_batches(posterior, data, y, where)
    check_kind(posterior, ("gaussian", "heteroscedastic"), where)
    prediction, targets = held_out_predictions(posterior, batches, num_samples, seed, where, **how)
    fitted = ConformalIntervals.fit(prediction.mean, prediction.variance.sqrt(), targets, level)
    return ConformalIntervals(level, fitted.threshold, fitted.examples, posterior, num_samples, seed, **how)


def _check_shapes(mean: Tensor, *others: Tensor) -> None:
    """Refuse what would be broadcast: (n, 1) beside (n,) are n² intervals."""
    for name, value in zip(("mean", "std", "y"), (mean, *others), strict=False):
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != mean.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"conformal_intervals: {name} is {found}, must be a tensor of shape (n,) or (n, outputs), the same for "
                "mean, std and y. Reshape it."
            )


def _check_spread(mean: Tensor, std: Tensor) -> None:
    """Refuse a std that is not one number, and has not the mean's dimensions: (n,) beside (n, 1) are n² intervals."""
    if isinstance(mean, Tensor) and isinstance(std, Tensor):
        fits = all(length in (1, whole) for length, whole in zip(std.shape, mean.shape, strict=False))
        if std.dim() == 0 or (std.dim() == mean.dim() and fits):
            return
    kinds = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in (mean, std)]
    raise ValueError(
        f"conformal_intervals: mean is {kinds[0]} and std {kinds[1]}, must be tensors of shape (n,) or (n, outputs), "
        "the same for mean, std and y; std may be one number, or have a 1 where it is the same for all. Reshape it."
    )


def _roundings(dtype: torch.dtype) -> float:
    """What arithmetic may have taken from a number, of its size; of 16 bits, where that is much, the last rounding."""
    limits = torch.finfo(dtype)
    return (1 if limits.bits == 16 else 16) * limits.eps


def _positive(std: Tensor) -> Tensor:
    wide = std.double()
    if not bool((wide > 0).all()):
        raise ValueError(
            "conformal_intervals: std has values that are not positive, must be > 0: an interval without a width "
            "cannot be scaled. Make the posterior with noise_variance=..., or add a small number."
        )
    return wide

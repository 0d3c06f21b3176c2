"""A prediction of which a few numbers for each example are kept, and no samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from vprop.posterior._quantiles import normal_quantile
from vprop.posterior.prediction import Prediction, joined


class PredictionSummary(Prediction):
    """What ``posterior.predict(..., keep="summary")`` returns: ``samples`` are gone, and most of the memory with them.

    Of a classifier ``probs``, ``mutual_information`` and ``std`` are kept (and ``entropy`` and ``confidence`` follow),
    of a regression ``mean``, ``epistemic_variance`` and ``aleatoric_variance``. Its quantiles are those of one normal
    distribution with the total variance; a classifier's need the samples.

    >>> import torch
    >>> prediction = Prediction(torch.tensor([[1.0], [3.0]]), "gaussian", 0.5)
    >>> summary = PredictionSummary.of(prediction)
    >>> summary.mean.tolist(), summary.variance.tolist()
    ([2.0], [2.5])
    """

    _FIELDS: ClassVar = {
        "categorical": ("probs", "mutual_information", "std"),
        "bernoulli": ("probs", "mutual_information", "std"),
        "gaussian": ("mean", "epistemic_variance", "aleatoric_variance"),
        "heteroscedastic": ("mean", "epistemic_variance", "aleatoric_variance"),
    }

    def __init__(self, likelihood: Any, values: dict[str, Tensor]) -> None:
        self.likelihood = likelihood
        self._noise_variance = 1.0
        self._values = values

    @classmethod
    def of(cls, prediction: Prediction) -> PredictionSummary:
        """What is kept of a prediction."""
        if prediction.likelihood is None:
            raise ValueError(
                'keep="summary" needs a likelihood, which says what the outputs are. Pass likelihood="categorical", '
                '"bernoulli", "gaussian" or "heteroscedastic" to predict(...) or to optimizer.posterior(model, ...).'
            )
        names = cls._FIELDS[prediction.likelihood]
        return cls(prediction.likelihood, {name: getattr(prediction, name) for name in names})

    def __repr__(self) -> str:
        shape = tuple(next(iter(self._values.values())).shape)
        return f"PredictionSummary({', '.join(self._values)} of shape {shape}, likelihood={self.likelihood!r})"

    @property
    def samples(self) -> NoReturn:  # type: ignore[override]
        """They were not kept."""
        raise AttributeError(
            'This prediction was made with keep="summary": it has no samples. Use keep="samples", the default.'
        )

    def _value(self, name: str) -> Tensor:
        if name not in self._values:
            self._require(*(kind for kind, names in self._FIELDS.items() if name in names))
        return self._values[name]

    @property
    def probs(self) -> Tensor:
        """Predictive probabilities."""
        return self._value("probs")

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of label and weights, in nats."""
        return self._value("mutual_information")

    def _probs_variance(self) -> Tensor:
        return self._value("std").square()

    @property
    def mean(self) -> Tensor:
        """Predictive mean."""
        return self._value("mean")

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of the mean under the posterior."""
        return self._value("epistemic_variance")

    @property
    def aleatoric_variance(self) -> Tensor:
        """Variance of an observation around its mean."""
        return self._value("aleatoric_variance")

    def _quantile(self, q: float) -> Tensor:
        if "probs" in self._values:
            raise AttributeError(
                'Quantiles of probabilities need samples, and this prediction was made with keep="summary". Use '
                'keep="samples", the default; .std was kept.'
            )
        return normal_quantile(self.mean, self.variance, q)

    def _on_cpu(self) -> PredictionSummary:
        return PredictionSummary(self.likelihood, {name: value.cpu() for name, value in self._values.items()})

    @classmethod
    def _joined(cls, parts: Sequence[Any]) -> PredictionSummary:
        names = parts[0]._values
        values = {name: joined([part._values[name] for part in parts], 0) for name in names}
        return PredictionSummary(parts[0].likelihood, values)

    def _raw(self) -> Tensor:
        return next(iter(self._values.values())).unsqueeze(0)

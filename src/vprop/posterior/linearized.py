r"""Predictions from the model's linearisation, whose outputs are normal: means and covariances instead of samples.

With θ ~ N(μ, Σ) and f(x, θ) ≈ f(x, μ) + J(θ−μ), J = ∂f/∂θ at μ, the outputs of an example are N(f(x, μ), JΣJᵀ). What
follows from that needs integrals over a few numbers, not over the weights:

- Regression: y ~ N(f, JΣJᵀ + v), exactly.
- A yes or no with logit z ~ N(m, s²): p = E[σ(z)], by quadrature to 1e-12 (:mod:`vprop.functional.logistic`). Its
  spread and its expected entropy follow from σ² = σ − σ' and H(σ(z)) = log(1+eᶻ) − zσ(z), with Stein's identity for
  E[zσ(z)] = m·E[σ] + s²·E[σ'].
- Classes: softmaxₖ(z) = σ(tₖ) with tₖ = zₖ − log Σᵢ≠ₖ e^zᵢ, one class against the rest. The logarithm is linearised at
  the mean, where its gradient is the softmax a of the other classes; then tₖ is normal with variance cᵀSc, c = eₖ − a,
  and pₖ = E[σ(tₖ)] as above. At last the sum over classes is made 1. It is exact for two classes, and without variance;
  and what is added to all logits alike changes nothing, as it should.

Where classes leave no such way (mutual information, the spread of a probability), logits are drawn from their normal
distribution: ``samples``. That is cheap, because the model is not called for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vprop import noise
from vprop.functional.logistic import expected_sigmoid, expected_slope, expected_softplus
from vprop.likelihood import LikelihoodLike, snapshot_likelihood, split_heteroscedastic
from vprop.likelihood.gaussian import LOG_VARIANCE_LIMIT
from vprop.posterior._quantiles import normal_quantile
from vprop.posterior.prediction import Prediction, joined

_ELEMENTS_AT_ONCE = 1 << 20
"""Of covariance matrices that are worked on together."""
_PARAMETER = (1 << 32) - 1
"""The number under which outputs draw their noise: no model has so many parameters."""


class LinearizedPrediction(Prediction):
    """Outputs that are normal for each example: ``output_mean`` and ``output_covariance``.

    ``output_mean`` has the shape of the model's output, the examples first; ``output_covariance`` is a matrix for
    each example, over its outputs in row-major order. ``samples`` are drawn from these when they are asked for; the
    examples are independent in them, though their true errors are not.

    >>> mean, covariance = torch.tensor([[0.0]]), torch.tensor([[[3.0]]])
    >>> prediction = LinearizedPrediction(mean, covariance, "gaussian", 1.0)
    >>> prediction.std.tolist(), [round(float(end), 2) for end in prediction.interval(0.95)]
    ([[2.0]], [-3.92, 3.92])
    """

    def __init__(
        self,
        output_mean: Tensor,
        output_covariance: Tensor,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
        *,
        num_samples: int = 32,
        seed: int = 0,
        first: int = 0,
    ) -> None:
        self.output_mean = output_mean
        self.output_covariance = output_covariance
        self.likelihood, self._noise_variance = snapshot_likelihood(likelihood, noise_variance)
        self._num_samples, self._seed, self._first = num_samples, seed, first
        self._drawn: Tensor | None = None

    def __repr__(self) -> str:
        return f"LinearizedPrediction(output_mean={tuple(self.output_mean.shape)}, likelihood={self.likelihood!r})"

    @property
    def output_variance(self) -> Tensor:
        """The diagonal of the covariance, like ``output_mean``."""
        return self.output_covariance.diagonal(dim1=-2, dim2=-1).reshape(self.output_mean.shape).clamp_min(0)

    @property
    def samples(self) -> Tensor:  # type: ignore[override]
        """Outputs drawn from N(f, JΣJᵀ), the samples first: as many as ``predict`` was asked for."""
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn

    def _draw(self) -> Tensor:
        mean = (
            self.output_mean.double().flatten(1) if self.output_mean.dim() > 1 else self.output_mean.double()[:, None]
        )
        values, vectors = torch.linalg.eigh(self.output_covariance.double().nan_to_num())  # the mean has the NaN, too
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # also of a singular matrix
        start = self._first * mean.shape[1]  # so that it does not matter how the data are cut

        def eps(sample: int) -> Tensor:
            address = noise.Draw(self._seed, _PARAMETER, 0, sample=sample, stream=noise.Stream.POSTERIOR)
            values = noise.normal(start, start + mean.numel(), address, device=mean.device, dtype=torch.float64)
            return values.view(*mean.shape, 1)

        outputs = [mean + (root @ eps(sample)).squeeze(-1) for sample in range(self._num_samples)]
        return torch.stack(outputs).view(self._num_samples, *self.output_mean.shape).to(self.output_mean.dtype)

    def _by_samples(self) -> Prediction:
        return Prediction(self.samples, self.likelihood)

    # -- classification --------------------------------------------------------------------------------------

    @property
    def probs(self) -> Tensor:
        """Predictive probabilities, without sampling: E[σ(z)], or for each class the same against the rest."""
        self._require("categorical", "bernoulli")
        if self.likelihood == "bernoulli":
            return expected_sigmoid(*self._logits()).to(self._wide())
        return _expected_softmax(self.output_mean, self._class_covariance()).to(self._wide())

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of label and weights, in nats: exact for a yes or no, else from drawn logits."""
        self._require("categorical", "bernoulli")
        if self.likelihood == "categorical":
            return self._by_samples().mutual_information
        mean, std = self._logits()
        within = expected_softplus(mean, std) - mean * expected_sigmoid(mean, std)
        within -= std.square() * expected_slope(mean, std)
        return (self._entropy_of(expected_sigmoid(mean, std)) - within).clamp_min(0).to(self._wide())

    def _probs_variance(self) -> Tensor:
        if self.likelihood == "categorical":
            return self._by_samples()._probs_variance()
        mean, std = self._logits()
        first = expected_sigmoid(mean, std)
        # E[σ²] − E[σ]² with E[σ²] = E[σ] − E[σ'], as E[σ]·E[σ(−z)] − E[σ'], where nothing is lost near 0 and 1.
        return (first * expected_sigmoid(-mean, std) - expected_slope(mean, std)).clamp_min(0).to(self._wide())

    def _logits(self) -> tuple[Tensor, Tensor]:
        return self.output_mean.double(), self.output_variance.double().sqrt()

    def _class_covariance(self) -> Tensor:
        """(…, classes, classes): of the outputs of an example those that are the classes of one label."""
        shape, classes = self.output_mean.shape, self.output_mean.shape[-1]
        labels = self.output_covariance.shape[-1] // classes
        blocks = self.output_covariance.reshape(shape[0], labels, classes, labels, classes)
        return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(*shape, classes)

    # -- regression ------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """Predictive mean: the model's output at the mean of the weights."""
        self._require("gaussian", "heteroscedastic")
        mean = self.output_mean.to(self._wide())
        return mean if self.likelihood == "gaussian" else split_heteroscedastic(mean)[0]

    @property
    def epistemic_variance(self) -> Tensor:
        """The diagonal of JΣJᵀ, for the means."""
        mean = self.mean
        return self.output_variance[..., : mean.shape[-1]] if mean.dim() > 1 else self.output_variance

    @property
    def aleatoric_variance(self) -> Tensor:
        """The noise variance; where log v is an output, E[v] = exp(E[log v] + ½Var[log v])."""
        mean = self.mean
        if self.likelihood == "gaussian":
            return self._noise_like(mean, self._noise_variance)
        log_variance = split_heteroscedastic(self.output_mean)[1] + 0.5 * self.output_variance[..., mean.shape[-1] :]
        return log_variance.clamp_max(LOG_VARIANCE_LIMIT).exp()

    def _quantile(self, q: float) -> Tensor:
        if self.likelihood == "categorical":
            return self._by_samples()._quantile(q)
        if self.likelihood == "bernoulli":  # σ grows with z
            mean, std = self._logits()
            return normal_quantile(mean, std.square(), q).sigmoid().to(self._wide())
        return normal_quantile(self.mean, self.variance, q)

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.output_mean.dtype, torch.float32)

    # -- predictions for batches, put together -----------------------------------------------------------------

    def _on_cpu(self) -> LinearizedPrediction:
        return self._like(self.output_mean.cpu(), self.output_covariance.cpu(), self._noise_on_cpu())

    @classmethod
    def _joined(cls, parts: Sequence[Any]) -> LinearizedPrediction:
        means = joined([part.output_mean for part in parts], 0)
        return parts[0]._like(means, joined([part.output_covariance for part in parts], 0), parts[0]._noise_variance)

    def _like(self, mean: Tensor, covariance: Tensor, noise_variance: float | Tensor) -> LinearizedPrediction:
        settings: Any = {"num_samples": self._num_samples, "seed": self._seed, "first": self._first}
        return LinearizedPrediction(mean, covariance, self.likelihood, noise_variance, **settings)

    def _raw(self) -> Tensor:
        return self.output_mean.unsqueeze(0)


def _expected_softmax(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[softmax(z)], z ~ N(mean, covariance), one class against the rest, in float64; see the top of this file."""
    classes = mean.shape[-1]
    flat, matrices = mean.double().reshape(-1, classes), covariance.double().reshape(-1, classes, classes)
    at_once = max(1, _ELEMENTS_AT_ONCE // classes**2)
    parts = [_against_the_rest(m, c) for m, c in zip(flat.split(at_once), matrices.split(at_once), strict=True)]
    return torch.cat(parts).reshape(mean.shape)


def _against_the_rest(mean: Tensor, covariance: Tensor) -> Tensor:
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    others = mean.unsqueeze(-2).masked_fill(own, -torch.inf)  # row k has the logits of all classes but k
    contrast = own.double() - others.softmax(-1).nan_to_num(0.0)  # a single class has no others
    variance = ((contrast @ covariance) * contrast).sum(-1).clamp_min(0)
    probs = expected_sigmoid(mean - others.logsumexp(-1), variance.sqrt())
    return probs / probs.sum(-1, keepdim=True)

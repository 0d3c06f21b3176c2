"""Summaries of a predictive distribution from samples of the model's output."""

from __future__ import annotations

import torch
from torch import Tensor

from vprop.likelihood import Likelihood, LikelihoodLike, snapshot_likelihood, split_heteroscedastic
from vprop.precision import as_tensor


class Prediction:
    """Model outputs under samples of the weights, and what they say.

    ``samples`` has the samples first, then the shape of the model's output. For classifiers the outputs are
    logits: ``"categorical"`` over the last dimension, ``"bernoulli"`` element by element. For regression
    (``"gaussian"``) they are means, with ``noise_variance`` the variance of an observation around them; or
    (``"heteroscedastic"``) the last dimension holds means and then as many log-variances. ``likelihood`` may also be
    the loss that the model was trained with, if it is one of :mod:`vprop.likelihood`'s.

    Uncertain weights make both mean f and noise v uncertain, and the variances follow the law of total variance,

        Var[y] = Var_q[f] + E_q[v]                 ``variance`` = ``epistemic_variance`` + ``aleatoric_variance``

    >>> import torch
    >>> outputs = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])  # two samples: f = 1 and f = 3, log v = 0
    >>> prediction = Prediction(outputs, "heteroscedastic")
    >>> prediction.mean.tolist(), prediction.epistemic_variance.tolist(), prediction.variance.tolist()
    ([[2.0]], [[2.0]], [[3.0]])
    """

    def __init__(
        self,
        samples: Tensor,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> None:
        if not isinstance(samples, Tensor) or samples.dim() == 0 or len(samples) == 0:
            found = tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__
            raise ValueError(
                f"Invalid samples: is {found}, must be a tensor with at least one sample in its first dimension. "
                "posterior.predict(x) makes one; torch.stack([...]) puts several outputs together."
            )
        self.samples = samples
        self.likelihood: Likelihood | None
        self.likelihood, self._noise_variance = snapshot_likelihood(likelihood, noise_variance)

    def __repr__(self) -> str:
        return f"Prediction(samples={tuple(self.samples.shape)}, likelihood={self.likelihood!r})"

    # -- classification --------------------------------------------------------------------------------------

    @property
    def probs(self) -> Tensor:
        """Predictive probabilities: the mean over samples of the probabilities, not of the logits."""
        return self._sample_probs().mean(0)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution, in nats: the total uncertainty of the label."""
        return self._entropy_of(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of label and weights, in nats: the part of the entropy that more data would remove."""
        expected = self._entropy_of(self._sample_probs()).mean(0)
        return (self.entropy - expected).clamp_min(0)

    def _sample_probs(self) -> Tensor:
        self._require("categorical", "bernoulli")
        logits = self._wide_samples()
        return logits.softmax(-1) if self.likelihood == "categorical" else logits.sigmoid()

    def _entropy_of(self, probs: Tensor) -> Tensor:
        terms = torch.special.entr(probs)
        return terms.sum(-1) if self.likelihood == "categorical" else terms + torch.special.entr(1 - probs)

    # -- regression ------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """Predictive mean."""
        return self._sample_means().mean(0)

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of the mean under the posterior: what more data would remove."""
        return self._sample_means().var(0, unbiased=len(self.samples) > 1)

    @property
    def aleatoric_variance(self) -> Tensor:
        """Variance of an observation around its mean, averaged over samples: what more data would not remove."""
        means = self._sample_means()
        if self.likelihood == "heteroscedastic":
            return split_heteroscedastic(self.samples)[1].exp().mean(0)
        noise = as_tensor(self._noise_variance).to(means)
        try:
            return noise.expand(means.shape[1:])
        except RuntimeError as error:
            raise ValueError(
                f"Invalid noise_variance of shape {tuple(noise.shape)}: must be a number or fit the outputs' shape "
                f"{tuple(means.shape[1:])}. Pass one variance, or one for each element of the last dimension."
            ) from error

    @property
    def variance(self) -> Tensor:
        """Variance of a new observation: epistemic plus aleatoric."""
        return self.epistemic_variance + self.aleatoric_variance

    def _sample_means(self) -> Tensor:
        self._require("gaussian", "heteroscedastic")
        return self._wide_samples() if self.likelihood == "gaussian" else split_heteroscedastic(self.samples)[0]

    def _wide_samples(self) -> Tensor:
        """Outputs of half-precision models are summarised in float32."""
        return self.samples.to(torch.promote_types(self.samples.dtype, torch.float32))

    def _require(self, *allowed: str) -> None:
        if self.likelihood not in allowed:
            names = " or ".join(f"likelihood={name!r}" for name in allowed)
            raise AttributeError(
                f"This prediction has likelihood={self.likelihood!r}; what you asked for needs {names}. Pass it to "
                "posterior.predict(...) or to optimizer.posterior(model, ...)."
            )

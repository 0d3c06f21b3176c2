"""Summaries of a predictive distribution from samples of the model's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vprop.checks import invalid
from vprop.likelihood import Likelihood, LikelihoodLike, snapshot_likelihood, split_heteroscedastic
from vprop.posterior._quantiles import check_probability, mixture_quantile, sample_quantile

_CLASSIFIERS = ("categorical", "bernoulli")
_REGRESSIONS = ("gaussian", "heteroscedastic")


class Prediction:
    """Model outputs under samples of the weights, and what they say.

    ``samples`` has the samples first, then the shape of the model's output. For classifiers the outputs are
    logits: ``"categorical"`` over the last dimension, ``"bernoulli"`` element by element. For regression
    (``"gaussian"``) they are means, with ``noise_variance`` the variance of an observation around them, 1 if it
    is left out; or (``"heteroscedastic"``) the last dimension holds means and then as many log-variances.
    ``likelihood`` may also be the loss that the model was trained with, if it is one of :mod:`vprop.likelihood`'s.

    Uncertain weights make both mean f and noise v uncertain, and the variances follow the law of total variance,

        Var[y] = Var_q[f] + E_q[v]                 ``variance`` = ``epistemic_variance`` + ``aleatoric_variance``

    ``std``, ``quantile`` and ``interval`` are about a new observation in regression, and about the probabilities of the
    classes, which are as uncertain as the weights, in classification.

    >>> import torch
    >>> outputs = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])  # two samples: f = 1 and f = 3, log v = 0
    >>> prediction = Prediction(outputs, "heteroscedastic")
    >>> prediction.mean.tolist(), prediction.epistemic_variance.tolist(), prediction.variance.tolist()
    ([[2.0]], [[2.0]], [[3.0]])
    """

    _noises: Tensor | None = None
    """Of each sample, in the first dimension, where they differ: members of a mixture learned each its own."""

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

    # -- how sure --------------------------------------------------------------------------------------------

    @property
    def std(self) -> Tensor:
        """Standard deviation: of a new observation (regression), of each probability under the posterior (else)."""
        self._require(*_CLASSIFIERS, *_REGRESSIONS)
        return (self._probs_variance() if self.likelihood in _CLASSIFIERS else self.variance).sqrt()

    @property
    def confidence(self) -> Tensor:
        """Probability of the predicted class: of the most probable one, or of the likelier answer to yes or no."""
        probs = self.probs
        return probs.amax(-1) if self.likelihood == "categorical" else torch.maximum(probs, 1 - probs)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The value below which a new observation (regression) or a probability (classification) is with probability q.

        In regression it is that of the mixture 1/S Σₛ N(fₛ, vₛ) that the samples stand for, not of the one normal
        distribution with its variance. Of several ``q`` the results are in the first dimension.
        """
        q = q.tolist() if hasattr(q, "tolist") else q  # of NumPy's linspace and torch's
        if isinstance(q, Sequence) and not isinstance(q, str):
            if not q:
                raise invalid("q", q, "a number between 0 and 1, or several", "Pass e.g. q=[0.05, 0.95].")
            return torch.stack([self.quantile(each) for each in q])
        self._require(*_CLASSIFIERS, *_REGRESSIONS)
        return self._quantile(check_probability("q", q))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Low and high end of the interval that leaves (1−level)/2 on either side."""
        tail = (1 - check_probability("level", level)) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def _quantile(self, q: float) -> Tensor:
        if self.likelihood in _CLASSIFIERS:
            return sample_quantile(self._sample_probs(), q)
        means = self._sample_means()
        return mixture_quantile(means, self._sample_variances().expand_as(means), q)

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

    def _probs_variance(self) -> Tensor:
        return _spread(self._sample_probs())

    def _sample_probs(self) -> Tensor:
        self._require(*_CLASSIFIERS)
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
        return _spread(self._sample_means())

    @property
    def aleatoric_variance(self) -> Tensor:
        """Variance of an observation around its mean, averaged over samples: what more data would not remove."""
        return self._sample_variances().mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance of a new observation: epistemic plus aleatoric."""
        return self.epistemic_variance + self.aleatoric_variance

    def _sample_variances(self) -> Tensor:
        """v of each sample; of one alone if it is the same for all."""
        means = self._sample_means()
        if self.likelihood == "heteroscedastic":
            return split_heteroscedastic(self.samples)[1].exp()
        if self._noises is None:
            return self._noise_like(means[0], self._noise_variance)[None]
        return torch.stack([self._noise_like(mean, noise) for mean, noise in zip(means, self._noises, strict=True)])

    def _noise_like(self, mean: Tensor, noise_variance: float | Tensor) -> Tensor:
        noise = torch.as_tensor(noise_variance, dtype=mean.dtype, device=mean.device)
        try:
            return noise.expand(mean.shape)
        except RuntimeError as error:
            raise ValueError(
                f"Invalid noise_variance of shape {tuple(noise.shape)}: must be a number or fit the outputs' shape "
                f"{tuple(mean.shape)}. Pass one variance, or one for each element of the last dimension."
            ) from error

    def _sample_means(self) -> Tensor:
        self._require(*_REGRESSIONS)
        return self._wide_samples() if self.likelihood == "gaussian" else split_heteroscedastic(self.samples)[0]

    def _wide_samples(self) -> Tensor:
        """Outputs of half-precision models are summarised in float32."""
        return self.samples.to(torch.promote_types(self.samples.dtype, torch.float32))

    # -- predictions for batches, put together -----------------------------------------------------------------

    def _on_cpu(self) -> Prediction:
        """The same with its tensors on the CPU, where there is room for those of many batches."""
        on_cpu = self._of_samples(self.samples.cpu())
        on_cpu._noise_variance = self._noise_on_cpu()
        return on_cpu

    def _of_samples(self, samples: Tensor) -> Prediction:
        """What is said of other samples, with as many draws, by the same likelihood."""
        other = Prediction(samples, self.likelihood)
        other._noise_variance, other._noises = self._noise_variance, self._noises
        return other

    @classmethod
    def _joined(cls, parts: Sequence[Any]) -> Prediction:
        """One prediction for the examples of all parts, which are of this class."""
        return parts[0]._of_samples(joined([part.samples for part in parts], 1))

    def _raw(self) -> Tensor:
        """What the model itself returned, for a look at whether it is finite: examples after the first dimension."""
        return self.samples

    def _noise_on_cpu(self) -> float | Tensor:
        noise = self._noise_variance
        return noise.cpu() if isinstance(noise, Tensor) else noise

    def _require(self, *allowed: str) -> None:
        if self.likelihood not in allowed:
            names = " or ".join(f"likelihood={name!r}" for name in allowed)
            raise AttributeError(
                f"This prediction has likelihood={self.likelihood!r}; what you asked for needs {names}. Pass it to "
                "posterior.predict(...) or to optimizer.posterior(model, ...)."
            )


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors of several batches as one; they may have different numbers of examples, and no other difference."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if any(part.dim() <= dim for part in parts) or len(shapes) > 1:
        found = ", ".join(str(tuple(part.shape[1:])) for part in parts[:4])
        raise ValueError(
            f"predict(): the outputs for several batches do not fit together: they have shapes {found}. The first "
            "dimension must be the examples, and the others the same in all batches: pad texts to one length, or use "
            "posterior.sampled_models(), which leaves the outputs to you."
        )
    return torch.cat(list(parts), dim)


def _spread(values: Tensor) -> Tensor:
    """Variance over the first dimension, 0 of a single value; torch warns of a tensor without elements."""
    return values.var(0, unbiased=len(values) > 1) if values.numel() else values.new_zeros(values.shape[1:])

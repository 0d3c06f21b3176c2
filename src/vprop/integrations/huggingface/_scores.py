"""Scores of predictions that are averaged over draws of the weights, batch by batch.

Probabilities are averaged, not logits. Draws are reduced as they come, because the logits of a language model under
many draws would not fit into memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vprop import metrics
from vprop.integrations.huggingface._targets import kind_of, labelled_logits, logits_of, shifts_labels
from vprop.likelihood import Likelihood, LikelihoodLike, likelihood_of, snapshot_likelihood
from vprop.objective import call_model
from vprop.posterior import Posterior, Prediction
from vprop.wrappers import refuse_sharded


class Scores(ABC):
    """What is kept of the batches so far: a few numbers per label, on the CPU."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}

    @abstractmethod
    def add(self, draws: Iterator[Tensor], labels: Tensor) -> None:
        """Take a batch in."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """The scores of all batches, of all processes."""

    def _keep(self, **vectors: Tensor) -> None:
        for name, vector in vectors.items():
            self._kept.setdefault(name, []).append(vector.cpu())

    def _all(self, name: str) -> Tensor:
        parts = self._kept[name]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, parts)
            parts = [part for process in everyone for part in process]
        return torch.cat(parts)


class CategoricalScores(Scores):
    """Log-loss, accuracy and calibration error over labels; for labels of tokens the perplexity as well."""

    def __init__(self, *, shift: bool) -> None:
        super().__init__()
        self._shift = shift
        self._tokens = False

    def add(self, draws: Iterator[Tensor], labels: Tensor) -> None:
        """Take a batch in."""
        log_prob = torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")
        probs, count = torch.tensor(0.0, device="cpu"), 0
        for logits in draws:
            self._tokens = logits.dim() > 2
            rows, classes = labelled_logits(logits, labels.to(logits.device), shift=self._shift)
            log_probs = rows.float().log_softmax(-1)
            # The label's probability is kept as a logarithm: in float32 it may be 0, and its logarithm −∞.
            log_prob = torch.logaddexp(log_prob, log_probs.gather(-1, classes[:, None]).squeeze(-1).cpu().double())
            probs, count = log_probs.exp_().add_(probs), count + 1
        confidence, predicted = (probs / count).max(-1)
        self._keep(log_prob=log_prob - math.log(count), confidence=confidence, right=predicted == classes)

    def result(self) -> dict[str, float]:
        """The scores of all batches, of all processes."""
        loss, right = -self._all("log_prob").mean(), self._all("right")
        scores = {
            "loss": float(loss),
            "accuracy": float(right.double().mean()),
            # How often the predicted class is right, against its probability: a binary task.
            "calibration_error": metrics.expected_calibration_error(self._all("confidence"), right, task="binary"),
        }
        return scores | {"perplexity": float(loss.exp())} if self._tokens else scores


class BernoulliScores(Scores):
    """Log-loss, accuracy and calibration error over several labels of 0 and 1 per example."""

    def add(self, draws: Iterator[Tensor], labels: Tensor) -> None:
        """Take a batch in."""
        probs = torch.stack([logits.cpu().double().sigmoid() for logits in draws]).mean(0)
        self._keep(probs=probs, labels=labels.reshape(probs.shape))

    def result(self) -> dict[str, float]:
        """The scores of all batches, of all processes."""
        probs, labels = self._all("probs"), self._all("labels")
        return {
            "loss": metrics.nll(probs, labels, task="multilabel"),
            "accuracy": metrics.accuracy(probs, labels, task="multilabel"),
            "calibration_error": metrics.expected_calibration_error(probs, labels, task="multilabel"),
        }


class GaussianScores(Scores):
    """Negative log-density of the targets under mean and variance of the prediction, and the mean's squared error."""

    def __init__(self, likelihood: Likelihood, noise_variance: float | Tensor) -> None:
        super().__init__()
        self._likelihood, self._noise_variance = likelihood, noise_variance

    def add(self, draws: Iterator[Tensor], labels: Tensor) -> None:
        """Take a batch in."""
        outputs = torch.stack([logits.cpu().double() for logits in draws])
        noise = None if self._likelihood == "heteroscedastic" else self._noise_variance
        prediction = Prediction(outputs, self._likelihood, noise)
        mean = prediction.mean
        self._keep(mean=mean, variance=prediction.variance, y=labels.reshape(mean.shape))

    def result(self) -> dict[str, float]:
        """The scores of all batches, of all processes."""
        mean, variance, y = self._all("mean"), self._all("variance"), self._all("y")
        return {"loss": metrics.gaussian_nll(mean, variance, y), "mse": metrics.rmse(mean, y) ** 2}


LOWER_IS_BETTER = {"loss": True, "perplexity": True, "calibration_error": True, "mse": True, "accuracy": False}
"""All names of scores, and the direction of each."""


@torch.no_grad()
def score(
    posterior: Posterior,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_samples: int,
    seed: int,
    label_name: str,
    likelihood: LikelihoodLike | None = None,
    noise_variance: float | Tensor | None = None,
) -> dict[str, float]:
    """Scores of the posterior's predictions; nothing if the batches have no labels.

    The draws are those of ``posterior.predict(…, num_samples, seed)``, the same in each batch. Weights, modes and
    random state are as before.
    """
    model, scores = posterior.model, None
    refuse_sharded(model, "Evaluation with samples (PosteriorCallback without num_samples=0)")
    device = next(model.parameters()).device
    # Each pass over a DataLoader takes a number from torch's random state, which dropout would miss.
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            if batch.get(label_name) is None:
                return {}
            inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            draws = (
                logits_of(call_model(sampled, inputs), model)
                for sampled in posterior._sampled_models(num_samples, seed)
            )
            first = next(draws)  # its shape says what kind of task it is, and the forward sets config.problem_type
            if scores is None:
                scores = _scores_for(posterior, first, inputs[label_name], likelihood, noise_variance)
            scores.add(_with_first(first, draws), inputs[label_name])
    return {} if scores is None else scores.result()


def _with_first(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    yield from rest


def _scores_for(
    posterior: Posterior,
    logits: Tensor,
    labels: Tensor,
    likelihood: LikelihoodLike | None,
    noise_variance: float | Tensor | None,
) -> Scores:
    if likelihood is None:
        likelihood = kind_of(posterior.model, logits, labels)
        if likelihood == "gaussian" and noise_variance is None:
            _, noise_variance = likelihood_of(F.mse_loss) or (None, None)  # the loss of Hugging Face's heads
    kind, noise = snapshot_likelihood(likelihood, noise_variance)
    if kind == "categorical":
        return CategoricalScores(shift=shifts_labels(posterior.model))
    if kind == "bernoulli":
        return BernoulliScores()
    return GaussianScores(kind or "gaussian", noise)

"""Scores of predictions that are averaged over draws of the weights.

Data come in batches, perhaps to several processes. Probabilities are averaged, not logits, and draws are reduced as
they come.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from vprop import metrics
from vprop.likelihood import Likelihood
from vprop.posterior import Prediction

Draws = Iterable[tuple[Tensor, Tensor]]
"""Outputs for a batch under one draw of the weights after the other, each with the batch's targets."""

Parts = tuple[Tensor, ...]
"""What the scores need to know of each target."""

UNLABELLED = -100
"""The class number that the losses of torch and of Hugging Face leave out."""


class Scores(ABC):
    """What is kept of the batches so far: a few numbers per target, on the CPU."""

    def __init__(self) -> None:
        self._batches: list[Parts] = []

    @abstractmethod
    def _reduced(self, draws: Draws) -> Parts:
        """What to keep of a batch."""

    @abstractmethod
    def _scores(self, *parts: Tensor) -> dict[str, float]:
        """Scores by name: ``log_loss`` for all, the others as the likelihood has them."""

    def add(self, draws: Draws) -> None:
        """Take a batch in."""
        self._batches.append(tuple(part.detach().cpu() for part in self._reduced(draws)))

    def result(self, processes: int) -> dict[str, float]:
        """The scores of all batches, of as many processes, each of which must ask."""
        batches = self._batches
        if processes > 1:
            of_each: list[Any] = [None] * processes
            dist.all_gather_object(of_each, batches)  # they may have seen different numbers of targets
            batches = [batch for of_one in of_each for batch in of_one]
        return self._scores(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


class CategoricalScores(Scores):
    """Of outputs (…, classes) with class numbers (…) for targets."""

    def _reduced(self, draws: Draws) -> Parts:
        log_prob = torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")
        probs, count = torch.tensor(0.0, device="cpu"), 0
        for logits, targets in draws:
            targets = targets.to(logits.device)
            labelled = targets != UNLABELLED
            rows, classes = logits[labelled], targets[labelled].long()
            log_probs = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
            # The label's probability is kept as a logarithm: in float32 it may be 0, and its logarithm −∞.
            log_prob = torch.logaddexp(log_prob, log_probs.gather(-1, classes[:, None])[:, 0].cpu().double())
            probs, count = log_probs.exp_().add_(probs), count + 1
        confidence, predicted = (probs / count).max(-1)
        return log_prob - math.log(count), confidence, predicted == classes

    def _scores(self, *parts: Tensor) -> dict[str, float]:
        log_prob, confidence, right = parts
        return {
            "log_loss": -float(log_prob.mean()),
            "accuracy": float(right.double().mean()),
            # How often the predicted class is right, against its probability: a binary task.
            "calibration_error": metrics.expected_calibration_error(confidence, right, task="binary"),
        }


class BernoulliScores(Scores):
    """Of outputs that are logits of targets 0 and 1, element by element."""

    def _reduced(self, draws: Draws) -> Parts:
        total, count = torch.tensor(0.0, dtype=torch.float64, device="cpu"), 0
        for logits, labels in draws:
            total, count, targets = total + logits.cpu().double().sigmoid(), count + 1, labels
        return total / count, targets

    def _scores(self, *parts: Tensor) -> dict[str, float]:
        probs, labels = parts
        one = probs.dim() == 1 or probs.shape[-1] == 1
        task: Literal["binary", "multilabel"] = "binary" if one else "multilabel"
        return {
            "log_loss": metrics.nll(probs, labels, task=task),
            "accuracy": metrics.accuracy(probs, labels, task=task),
            "calibration_error": metrics.expected_calibration_error(probs, labels, task=task),
        }


class GaussianScores(Scores):
    """Of outputs that are means, or means and log-variances, of real targets."""

    def __init__(self, likelihood: Likelihood, noise_variance: float | Tensor) -> None:
        super().__init__()
        self._likelihood = likelihood
        self._noise_variance = None if likelihood == "heteroscedastic" else noise_variance

    def _reduced(self, draws: Draws) -> Parts:
        outputs, targets = zip(*((output.cpu().double(), target) for output, target in draws), strict=True)
        prediction = Prediction(torch.stack(outputs), self._likelihood, self._noise_variance)
        return prediction.mean, prediction.variance, targets[-1]

    def _scores(self, *parts: Tensor) -> dict[str, float]:
        mean, variance, y = parts
        return {
            "log_loss": metrics.gaussian_nll(mean, variance, y),
            "rmse": metrics.rmse(mean, y),
            "coverage": metrics.coverage(mean, variance, y, level=0.9),
        }


def scores_for(likelihood: Likelihood, noise_variance: float | Tensor) -> Scores:
    """Empty scores for outputs of this kind."""
    if likelihood == "categorical":
        return CategoricalScores()
    return BernoulliScores() if likelihood == "bernoulli" else GaussianScores(likelihood, noise_variance)

"""Scores of the posterior's predictions on the batches of a Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vprop.integrations._prediction import sampled_outputs
from vprop.integrations._scores import scores_for
from vprop.integrations.huggingface._targets import aligned, kind_of, logits_of
from vprop.likelihood import Likelihood, LikelihoodLike, likelihood_of, snapshot_likelihood
from vprop.posterior import Posterior
from vprop.wrappers import refuse_sharded

LOWER_IS_BETTER = {"loss": True, "perplexity": True, "calibration_error": True, "mse": True, "accuracy": False}
"""All names of scores, and the direction of each."""


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
    model, scores, tokens = posterior.model, None, False
    refuse_sharded(model, "Evaluation with samples (PosteriorCallback without num_samples=0)")
    device = next(model.parameters()).device
    # Each pass over a DataLoader takes a number from torch's random state, which dropout would miss.
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            if batch.get(label_name) is None:
                return {}
            inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            labels = inputs[label_name]
            models = posterior.sampled_models(num_samples, seed)
            draws = (logits_of(output, model) for output in sampled_outputs(models, inputs))
            first = next(draws)  # its shape says what kind of task it is, and the forward sets config.problem_type
            if scores is None:
                kind, noise = _likelihood(model, first, labels, likelihood, noise_variance)
                scores, tokens = scores_for(kind, noise), kind == "categorical" and first.dim() > 2
            scores.add(_with_labels(chain([first], draws), labels, kind, model))
    return {} if scores is None else _named(scores.result(_num_processes()), tokens)


def _with_labels(
    draws: Iterator[Tensor], labels: Tensor, kind: Likelihood, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    for logits in draws:
        if kind == "categorical":
            yield aligned(logits, labels, model)
        else:
            yield logits, labels.reshape(*logits.shape[:-1], -1)


def _likelihood(
    model: nn.Module,
    logits: Tensor,
    labels: Tensor,
    likelihood: LikelihoodLike | None,
    noise_variance: float | Tensor | None,
) -> tuple[Likelihood, float | Tensor]:
    """What the model's outputs are: as given, or by the rule of Hugging Face's heads."""
    if likelihood is None:
        likelihood = kind_of(model, logits, labels)
        if likelihood == "gaussian" and noise_variance is None:
            _, noise_variance = likelihood_of(F.mse_loss) or (None, None)  # the loss of Hugging Face's heads
    kind, noise = snapshot_likelihood(likelihood, noise_variance)
    return kind or "gaussian", noise


def _named(scores: dict[str, float], tokens: bool) -> dict[str, float]:
    """By the names that the Trainer's users know."""
    loss = scores["log_loss"]
    if "rmse" in scores:
        return {"loss": loss, "mse": scores["rmse"] ** 2}
    named = {"loss": loss, "accuracy": scores["accuracy"], "calibration_error": scores["calibration_error"]}
    return named | {"perplexity": math.exp(loss) if loss < 700 else math.inf} if tokens else named


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

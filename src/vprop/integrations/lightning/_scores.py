"""Scores of averaged predictions over a whole data set, which comes in batches and perhaps to several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vprop import metrics
from vprop.posterior import Prediction

Evidence = tuple[Tensor, ...]
"""What the scores need to know of each example."""

UNLABELLED = -100
"""The class number that torch's cross_entropy leaves out, too."""


def evidence(prediction: Prediction, targets: Tensor) -> Evidence:
    """What the scores need of a batch, on the CPU; of classes not all probabilities, which may be many."""
    if prediction.likelihood == "categorical":
        parts = _of_classes(prediction.probs, targets)
    elif prediction.likelihood == "bernoulli":
        parts = (prediction.probs, targets)
    else:
        parts = (prediction.mean, prediction.variance, targets)
    return tuple(part.detach().cpu() for part in parts)


def _of_classes(probs: Tensor, targets: Tensor) -> Evidence:
    if probs.shape[:-1] != targets.shape:
        raise ValueError(
            f"Invalid targets of shape {tuple(targets.shape)}: must be {tuple(probs.shape[:-1])}, class numbers for "
            f"outputs of shape {tuple(probs.shape)} whose last dimension are the classes. Return such a pair from "
            "PosteriorCallback(forward=...)."
        )
    labelled = targets != UNLABELLED
    probs, targets = probs[labelled], targets[labelled]
    confidence, predicted = probs.max(-1)
    of_target = probs.gather(-1, targets[:, None])[:, 0]
    return of_target, confidence, (predicted == targets).long()


def scores(likelihood: str, parts: Evidence) -> dict[str, float]:
    """Scores by name: log-loss for all, the others as the likelihood has them."""
    if likelihood == "categorical":
        of_target, confidence, right = parts
        return {
            "log_loss": metrics.nll(of_target, torch.ones_like(right), task="binary"),
            "accuracy": float(right.double().mean()),
            "calibration_error": metrics.expected_calibration_error(confidence, right, task="binary"),
        }
    if likelihood == "bernoulli":
        probs, labels = parts
        task: Any = "binary" if probs.dim() == 1 or probs.shape[-1] == 1 else "multilabel"
        return {
            "log_loss": metrics.nll(probs, labels, task=task),
            "accuracy": metrics.accuracy(probs, labels, task=task),
            "calibration_error": metrics.expected_calibration_error(probs, labels, task=task),
        }
    mean, variance, y = parts
    return {
        "log_loss": metrics.gaussian_nll(mean, variance, y),
        "rmse": metrics.rmse(mean, y),
        "coverage": metrics.coverage(mean, variance, y, level=0.9),
    }


def gathered(strategy: Any, batches: list[Evidence]) -> Evidence:
    """The evidence of all batches of all processes, which may have seen different numbers of examples."""
    return tuple(_of_all_processes(strategy, torch.cat(parts)) for parts in zip(*batches, strict=True))


def _of_all_processes(strategy: Any, own: Tensor) -> Tensor:
    own = own.to(strategy.root_device)
    sizes = strategy.all_gather(torch.tensor([len(own)], device=own.device)).flatten().tolist()
    if len(sizes) == 1:
        return own
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    of_all = strategy.all_gather(padded)
    return torch.cat([rows[:size] for rows, size in zip(of_all, sizes, strict=True)])

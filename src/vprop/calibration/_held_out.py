"""Held-out data, one batch after the other, and how probable a posterior's predictions make them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vprop.checks import check_num_samples, check_seed
from vprop.posterior import Posterior, Prediction
from vprop.posterior.predictive.inputs import Place
from vprop.precision import as_tensor

Batch = tuple[Any, Tensor]


def held_out_batches(posterior: Posterior, data: Any, y: Any, where: str) -> list[Batch]:
    """(x, y) of every batch, on the device of the model: one of ``data`` and ``y``, or those of a loader."""
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"{where}(posterior, …): got {type(posterior).__name__}, must be a posterior. Make one with "
            "optimizer.posterior(model, likelihood=...)."
        )
    device = next(iter(posterior.mean.values())).device
    if y is not None:
        pairs: Iterable[Any] = [(data, y)]
    elif isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise TypeError(
            f"{where}(posterior, data): got {type(data).__name__} without targets, must be inputs with y, or a loader "
            f"of pairs (x, y). Pass {where}(posterior, x, y) or {where}(posterior, loader)."
        )
    else:
        pairs = data
    place = Place.of(posterior.model)
    batches = [(place.put(x), targets.to(device)) for x, targets in _pairs(pairs, where)]
    if not batches:
        raise ValueError(f"{where}(posterior, loader): the loader is empty. Pass data that were held out of training.")
    return batches


def _pairs(batches: Iterable[Any], where: str) -> Iterator[Batch]:
    for batch in batches:
        # arrays and data frames are targets as they are inputs; a list of numbers would be rounded to float32
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not hasattr(batch[1], "__array__"):
            kinds = [type(part).__name__ for part in batch] if isinstance(batch, tuple | list) else type(batch).__name__
            raise TypeError(
                f"{where}(posterior, …): got a batch of {kinds}, must be a pair (x, y) with y a tensor or an array. "
                "Several inputs go into one x, a tuple or a dict; torch.tensor(y) makes a tensor of a list."
            )
        yield batch[0], _targets(batch[1], where)


def _targets(y: Any, where: str) -> Tensor:
    try:
        return as_tensor(y)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where}(posterior, …): y is a {type(y).__name__} of {y.__array__().dtype}, must be numbers. Encode what "
            "is text or a category as the numbers that the model was trained on."
        ) from error


def held_out_predictions(
    posterior: Posterior,
    batches: Iterable[Batch],
    num_samples: int,
    seed: int,
    where: str,
    *,
    batch_norm: Any = None,
    dropout: bool = False,
    check: bool = True,
) -> tuple[Prediction, Tensor]:
    """The prediction for all batches together, with their targets; with ``check``, both fit and are finite."""
    check_num_samples(num_samples)
    check_seed(seed)
    if batch_norm is None and dropout is False:
        parts = [(posterior.predict(x, num_samples, seed), y) for x, y in batches]
    else:  # all in one: statistics are estimated once for each draw, and each batch has masks of its own
        pairs = list(batches)
        whole = posterior.predict(iter(pairs), num_samples, seed, batch_norm=batch_norm, dropout=dropout)
        y = torch.cat([targets for _, targets in pairs])
        parts = [(whole._of_samples(whole.samples.to(y.device)), y)]
    for prediction, y in parts if check else []:
        _check(prediction, y, where)
    samples = torch.cat([prediction.samples for prediction, _ in parts], dim=1)
    return parts[0][0]._of_samples(samples), torch.cat([y for _, y in parts])


def check_kind(posterior: Posterior, allowed: tuple[str, ...], where: str) -> None:
    """Refuse a posterior of which it is not known that its outputs are of an allowed kind."""
    if posterior.likelihood not in allowed:
        names = " or ".join(repr(name) for name in allowed)
        raise ValueError(
            f"{where}(posterior, …): the posterior has likelihood={posterior.likelihood!r}, must be {names}. Say what "
            "the model's outputs are when you make it: optimizer.posterior(model, likelihood=...)."
        )


def check_enough(targets: Tensor, where: str) -> int:
    """How many targets there are, if more than one."""
    if targets.numel() < 2:
        found = "one example" if targets.numel() else "empty"
        raise ValueError(
            f"{where}(posterior, …): the held-out data are {found}, must be several examples: any scale that makes one "
            "likely would do. Use a hundred or more."
        )
    return targets.numel()


def _check(prediction: Prediction, y: Tensor, where: str) -> None:
    outputs = tuple(prediction.samples.shape[1:])
    if not bool(torch.isfinite(prediction.samples).all()):
        raise ValueError(
            f"{where}(posterior, …): the model returns NaN or infinite outputs for the held-out data, must be finite. "
            "It has diverged, or the inputs have NaN in them."
        )
    if prediction.likelihood == "categorical":
        _check_classes(outputs, y, where)
        return
    expected = outputs
    if prediction.likelihood == "heteroscedastic":
        expected = (*outputs[:-1], outputs[-1] // 2)
    if tuple(y.shape) != expected:
        raise ValueError(
            f"{where}(posterior, …): y has shape {tuple(y.shape)}, must be that of the predictions, {expected}. "
            "Reshape it, y.unsqueeze(-1) for a column."
        )
    if not bool(torch.isfinite(y).all()):
        raise ValueError(f"{where}(posterior, …): y has NaN or infinite values. Leave these examples out.")
    if prediction.likelihood == "bernoulli" and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"{where}(posterior, …): y has values other than 0 and 1. Use (y > 0) if they are -1 and 1.")


def _check_classes(outputs: tuple[int, ...], y: Tensor, where: str) -> None:
    if tuple(y.shape) != outputs[:-1] or y.is_floating_point():
        raise ValueError(
            f"{where}(posterior, …): y has shape {tuple(y.shape)} and dtype {y.dtype}, must be class numbers of shape "
            f"{outputs[:-1]} for outputs of shape {outputs}. Classes are the last dimension of the outputs."
        )
    if y.numel():
        low, high = int(y.long().min()), int(y.long().max())  # torch has no minimum of some integers
        if low < 0 or high >= outputs[-1]:
            raise ValueError(
                f"{where}(posterior, …): y has values from {low} to {high}, must be class numbers in "
                f"0..{outputs[-1] - 1}, as the model has {outputs[-1]} outputs. Leave out examples without a label."
            )


@torch.no_grad()
def log_loss(prediction: Prediction, y: Tensor) -> float:
    """Mean over targets of −log of the predictive probability, or density, of y, in nats.

    Classes: the mean of the samples' probabilities, as a logarithm throughout, so that none is 0. Regression: the
    density of a Gaussian with the prediction's mean and variance, those that its error bars are made of.
    """
    if prediction.likelihood in ("gaussian", "heteroscedastic"):
        wide = prediction._of_samples(prediction.samples.double())
        mean, variance = wide.mean, wide.variance
        return float(0.5 * ((2 * math.pi * variance).log() + (y.double() - mean).square() / variance).mean())
    logits = prediction.samples.double()
    if prediction.likelihood == "categorical":
        labels = y.long().unsqueeze(-1).expand(len(logits), *y.shape, 1)
        log_probs = logits.log_softmax(-1).gather(-1, labels)
    else:
        log_probs = F.logsigmoid(torch.where(y == 1, logits, -logits))
    return -float((log_probs.logsumexp(0) - math.log(len(logits))).mean())

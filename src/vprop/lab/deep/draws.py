"""The weights that a trained contender predicts with, one draw after the other, as something to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import vprop
from vprop.lab.deep.predictions import Forward
from vprop.lab.deep.swag import SWAG
from vprop.posterior.predictive import batch_norm
from vprop.posterior.predictive.dropout import DrawMasks, Dropping, dropout_layers
from vprop.posterior.predictive.masks import Masks
from vprop.replica import Replica


class Statistics:
    """Of BatchNorm under given weights: means over ``batches``, whose forwards are in 16 bits as predictions are."""

    def __init__(self, batches: Callable[[], Iterable[Tensor]], autocast: torch.dtype | None = None) -> None:
        self.batches, self.autocast = batches, autocast

    def write(self, model: nn.Module | Replica, masks: Masks | None = None) -> None:
        """Into ``model``, for the weights that it has now, under these masks; if it has no BatchNorm, nothing."""
        if not batch_norm.batch_norm_layers(model):
            return
        device = next(iter(model.parameters())).device.type
        with torch.autocast(device, self.autocast or torch.float16, enabled=self.autocast is not None):
            batch_norm.estimate(model, self.batches(), masks)

    @contextmanager
    def inside(self, model: nn.Module | Replica, masks: Masks | None = None) -> Iterator[None]:
        """For a time; then the running ones are there again."""
        buffers = [buffer for layer in batch_norm.batch_norm_layers(model) for buffer in layer.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        self.write(model, masks)
        try:
            yield
        finally:
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)


def posterior(optimizer: Optimizer, model: nn.Module, count: int) -> Iterator[Forward]:
    """Of an optimizer of the library."""
    assert isinstance(optimizer, vprop.VariationalOptimizer)
    return cast(Iterator[Forward], optimizer.posterior(model).sampled_models(count))


def dropout(model: nn.Module, count: int) -> Iterator[Forward]:
    """New masks with every forward; BatchNorm keeps its running statistics."""
    model.eval()
    for layer in dropout_layers(model):
        layer.train()
    torch.manual_seed(0)
    for _ in range(count):
        yield model
    model.eval()


def swag(fitted: SWAG, count: int, statistics: Statistics) -> Iterator[Forward]:
    """Of SWAG's Gaussian, each with statistics of BatchNorm of its own."""
    generator = torch.Generator(fitted.mean.device).manual_seed(0)
    for _ in range(count):
        fitted.write_sample(generator)
        statistics.write(fitted.model)
        yield fitted.model.eval()


def peer(optimizer: Any, model: nn.Module, count: int) -> Iterator[Forward]:
    """Of a package that writes draws into the weights for the time of a ``with``."""
    model.eval()
    for _ in range(count):
        drawn: AbstractContextManager[Any] = optimizer.sampled_params(train=False)
        with drawn:
            yield model


MEAN, OWN, RUNNING, UNMASKED = "mean", "averaged", "running", "unmasked"
"""Kinds of predictions: at the mean of the weights; with statistics of BatchNorm of each draw and dropout masks, where
there are any; the same with the running statistics; the same without masks. Runs of a posterior with dropout that have
no "unmasked" scores are from before there were masks: what they call "averaged" is without."""


def of_one_kind(drawn: Iterable[Forward]) -> Iterator[tuple[str, Forward]]:
    """The only one that there is."""
    return ((OWN, forward) for forward in drawn)


def of_all_kinds(
    drawn: Iterable[Forward], statistics: Statistics, *, dropout: bool = False
) -> Iterator[tuple[str, Forward]]:
    """Each draw of a network with BatchNorm, or with ``dropout``, several times; call each before the next."""
    masks = {OWN: DrawMasks(0), RUNNING: DrawMasks(0)} if dropout else {}
    for number, forward in enumerate(drawn):
        assert isinstance(forward, nn.Module | Replica)
        if batch_norm.batch_norm_layers(forward):
            yield RUNNING, Dropping(forward, masks[RUNNING].of(number)) if dropout else forward
        if dropout:
            with statistics.inside(forward):
                yield UNMASKED, forward
        with statistics.inside(forward, masks[OWN].for_statistics(number) if dropout else None):
            yield OWN, Dropping(forward, masks[OWN].of(number)) if dropout else forward

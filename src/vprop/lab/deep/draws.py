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
from vprop.replica import Replica


class Statistics:
    """Of BatchNorm under given weights: means over ``batches``, whose forwards are in 16 bits as predictions are."""

    def __init__(self, batches: Callable[[], Iterable[Tensor]], autocast: torch.dtype | None = None) -> None:
        self.batches, self.autocast = batches, autocast

    def write(self, model: nn.Module | Replica) -> None:
        """Into ``model``, for the weights that it has now; if it has no BatchNorm, nothing."""
        if not batch_norm.batch_norm_layers(model):
            return
        device = next(iter(model.parameters())).device.type
        with torch.autocast(device, self.autocast or torch.float16, enabled=self.autocast is not None):
            batch_norm.estimate(model, self.batches())

    @contextmanager
    def inside(self, model: nn.Module | Replica) -> Iterator[None]:
        """For a time; then the running ones are there again."""
        buffers = [buffer for layer in batch_norm.batch_norm_layers(model) for buffer in layer.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        self.write(model)
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
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
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


OWN, RUNNING = "averaged", "running"
"""Kinds of predictions: with statistics of BatchNorm of each draw, where there are any, and with the running ones."""


def of_one_kind(drawn: Iterable[Forward]) -> Iterator[tuple[str, Forward]]:
    """The only one that there is."""
    return ((OWN, forward) for forward in drawn)


def of_both_kinds(drawn: Iterable[Forward], statistics: Statistics) -> Iterator[tuple[str, Forward]]:
    """Each draw of a network with BatchNorm twice; call each before the next."""
    for forward in drawn:
        assert isinstance(forward, nn.Module | Replica)
        if batch_norm.batch_norm_layers(forward):
            yield RUNNING, forward
        with statistics.inside(forward):
            yield OWN, forward

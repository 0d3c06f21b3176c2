"""The weights that a trained contender predicts with, one draw after the other, as something to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import vprop
from vprop.lab.deep.predictions import Forward
from vprop.lab.deep.swag import SWAG, set_batch_norm


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


def swag(fitted: SWAG, batches: Callable[[], Iterable[Tensor]], count: int) -> Iterator[Forward]:
    """Of SWAG's Gaussian, each with statistics of BatchNorm of its own."""
    generator = torch.Generator(fitted.mean.device).manual_seed(0)
    for _ in range(count):
        fitted.write_sample(generator)
        set_batch_norm(fitted.model, batches())
        yield fitted.model.eval()


def peer(optimizer: Any, model: nn.Module, count: int) -> Iterator[Forward]:
    """Of a package that writes draws into the weights for the time of a ``with``."""
    model.eval()
    for _ in range(count):
        drawn: AbstractContextManager[Any] = optimizer.sampled_params(train=False)
        with drawn:
            yield model

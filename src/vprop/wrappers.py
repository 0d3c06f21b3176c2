"""Modules that wrap a model to run it in another way, and the model inside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from vprop.parallel.sharding import is_sharded


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile: its names are those of its maker.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> unwrapped(torch.compile(model)) is model
    True
    """
    *_, innermost = _layers(model)
    return innermost


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model with what it wraps, from the outside to the inside."""
    yield model
    if isinstance(model, DistributedDataParallel | DataParallel):
        yield from _layers(model.module)
    elif "_orig_mod" in model._modules:
        yield from _layers(model._orig_mod)  # type: ignore[arg-type]


def data_parallel_group(model: nn.Module) -> Any:
    """The process group over which DistributedDataParallel averages the gradients of ``model``, if it does."""
    for layer in _layers(model):
        if isinstance(layer, DistributedDataParallel):
            return layer.process_group
    _refuse_inner(model)
    return None


def _refuse_inner(model: nn.Module) -> None:
    """Refuse a model of which only parts are averaged over ranks: the curvature of the others would be local."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"The objective's model, {type(model).__name__}, has DistributedDataParallel inside it. Wrap the whole "
            "model in DistributedDataParallel, and build the objective with that."
        )


def has_fsdp(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the model or to a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Refuse to run ``model`` with other weights where its own are spread over ranks: it would not look at them."""
    if has_fsdp(model) or any(is_sharded(p) for p in model.parameters()):
        raise RuntimeError(
            f"{what} of a model whose parameters are spread over ranks (FSDP, tensor parallel) is not possible: such a "
            "model runs with its own weights only. Draw on all ranks with "
            "`with optimizer.sampled_params(train=False): model(x)`, or save the posterior and load it into a model "
            "that is not spread: posterior.save(path), vprop.load_posterior(path, model)."
        )

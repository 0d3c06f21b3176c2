"""Modules that wrap a model to run it in another way, and the model inside them."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from vprop.placement import is_spread


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile: its names are those of its maker.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> unwrapped(torch.compile(model)) is model
    True
    """
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile is among the wrappers of a model."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return "_orig_mod" in model._modules


def data_parallel_group(model: nn.Module) -> Any:
    """The process group over which DistributedDataParallel averages the gradients of ``model``, if it does."""
    outermost = model
    while not isinstance(model, DistributedDataParallel):
        if "_orig_mod" not in model._modules:
            _refuse_inner(outermost)
            return None
        model = model._orig_mod  # type: ignore[assignment]
    return model.process_group


def _refuse_inner(model: nn.Module) -> None:
    """Refuse a model of which only parts are averaged over ranks: the curvature of the others would be local."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"The objective's model, {type(model).__name__}, has DistributedDataParallel inside it. Wrap the whole "
            "model in DistributedDataParallel, and build the objective with that."
        )


def refuse_spread(model: nn.Module, what: str) -> None:
    """Refuse to run ``model`` with other weights where its own are spread over ranks: it would not look at them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    if sharded or any(is_spread(p) for p in model.parameters()):
        raise RuntimeError(
            f"{what} of a model whose parameters are spread over ranks (FSDP, tensor parallel) is not possible: such a "
            "model runs with its own weights only. Draw on all ranks with "
            "`with optimizer.sampled_params(train=False): model(x)`, or save the posterior and load it into a model "
            "that is not spread: posterior.save(path), vprop.load_posterior(path, model)."
        )

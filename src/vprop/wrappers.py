"""Modules that wrap a model to run it in another way, and the model inside them."""

from __future__ import annotations

import sys
from typing import Any

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


def data_parallel_group(model: nn.Module) -> Any:
    """The process group over which DistributedDataParallel averages the gradients of ``model``, if it does."""
    while not isinstance(model, DistributedDataParallel):
        if "_orig_mod" not in model._modules:
            return None
        model = model._orig_mod  # type: ignore[assignment]
    return model.process_group


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

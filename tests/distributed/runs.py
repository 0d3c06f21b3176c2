"""The harness's training run on one rank of several: a part of each batch, on a model that torch has spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import vprop
from tests.harness import LOOPS, make_batch, make_model, split
from vprop.parallel.sharding import full_tensor

BATCH = 24


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    """A group for the first layer and one, the root's, for the rest."""
    fully_shard(model[0])
    return fully_shard(model)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """The first layer by rows of its weight, the second by columns; its bias is on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp_and_tensor_parallel(model: nn.Module) -> nn.Module:
    """Both, on a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


SPREAD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
    "fsdp and tensor parallel": fsdp_and_tensor_parallel,
}


def data_part(strategy: str | None) -> tuple[int, int]:
    """Which part of each batch, of how many, this rank sees."""
    if strategy in (None, "tensor parallel"):
        return 0, 1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return (rank // 2, ranks // 2) if strategy == "fsdp and tensor parallel" else (rank, ranks)


def start(
    strategy: str | None, optimizer: str, arguments: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, vprop.VariationalOptimizer]:
    """A model, spread over the ranks, and its optimizer."""
    model = make_model(dtype)
    if strategy is not None:
        model = SPREAD[strategy](model)
    return model, getattr(vprop, optimizer)(model.parameters(), **{"lr": 0.1, "num_data": 100} | arguments)


def go_on(
    model: nn.Module,
    optimizer: vprop.VariationalOptimizer,
    strategy: str | None,
    loop: str,
    *,
    steps: int = 4,
    first_step: int = 0,
    micro_batches: int = 1,
) -> None:
    """Train on this rank's part of each batch."""
    part, parts = data_part(strategy)
    handle = optimizer.attach(model) if loop == "attached" else None
    dtype = next(model.parameters()).dtype
    for step in range(first_step, first_step + steps):
        batch = split(make_batch(BATCH, dtype=dtype, seed=step), parts)[part]
        LOOPS[loop](optimizer, model, split(batch, micro_batches))
    if handle is not None:
        handle.remove()


def run(
    strategy: str | None,
    optimizer: str,
    arguments: dict[str, Any],
    loop: str = "closure",
    dtype: torch.dtype = torch.float64,
    micro_batches: int = 1,
) -> dict[str, Tensor]:
    """Weights and state after some steps, brought together from all ranks."""
    model, optim = start(strategy, optimizer, arguments, dtype)
    go_on(model, optim, strategy, loop, micro_batches=micro_batches)
    return gathered(model, optim)


def gathered(model: nn.Module, optimizer: vprop.VariationalOptimizer) -> dict[str, Tensor]:
    """All weights and all state as whole tensors, by names without wrappers."""
    tensors = {}
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        tensors[name] = full_tensor(p.detach()).clone()
        tensors |= {f"{name}.{key}": full_tensor(value).clone() for key, value in optimizer.state[p].items()}
    return tensors


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 0, atol: float = 0) -> None:
    """The same tensors, bit for bit unless a tolerance is given."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Not the same run: what a test changes must have an effect."""
    assert any(not torch.allclose(one[name], other[name], rtol=1e-6) for name in one)

"""One harness, many equalities: train a small model in one of the three loops, and compare two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vprop import Objective, VariationalOptimizer

Batch = tuple[Tensor, Tensor]


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def make_batch(size: int = 12, dtype: torch.dtype = torch.float32, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator).to(dtype)
    return x, torch.randint(0, 3, (size,), generator=generator)


def split(batch: Batch, parts: int) -> list[Batch]:
    return list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))


def backward(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Accumulate the gradient of the mean loss over micro-batches of equal size."""
    total = torch.zeros((), device=batches[0][0].device)
    for x, y in batches:
        loss = F.cross_entropy(model(x).float(), y) / len(batches)
        loss.backward()
        total += loss.detach()
    return total


def closure_step(optimizer: VariationalOptimizer, model: nn.Module, batches: list[Batch]) -> None:
    if optimizer.needs_objective:  # an objective is one batch: it takes the micro-batches together
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.step(Objective(model, F.cross_entropy, x, y))
        return

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, batches)

    optimizer.step(closure)


def context_step(optimizer: VariationalOptimizer, model: nn.Module, batches: list[Batch]) -> None:
    optimizer.zero_grad()
    for sample in range(max(1, optimizer.mc_samples)):
        for batch in batches:  # a block per micro-batch: the draw must be the same in each
            with optimizer.sampled_params(sample):
                (F.cross_entropy(model(batch[0]).float(), batch[1]) / len(batches)).backward()
    optimizer.step()


def attached_step(optimizer: VariationalOptimizer, model: nn.Module, batches: list[Batch]) -> None:
    backward(model, batches)
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[str, Callable[[VariationalOptimizer, nn.Module, list[Batch]], None]] = {
    "closure": closure_step,
    "context": context_step,
    "attached": attached_step,
}


def train(
    make_optimizer: Callable[..., VariationalOptimizer],
    loop: str = "closure",
    *,
    steps: int = 5,
    micro_batches: int = 1,
    model: nn.Module | None = None,
    optimizer: VariationalOptimizer | None = None,
    first_step: int = 0,
    **arguments: Any,
) -> tuple[nn.Module, VariationalOptimizer]:
    """``steps`` steps on ``micro_batches`` equal parts of a batch that changes from step to step."""
    model = make_model() if model is None else model
    dtype = next(model.parameters()).dtype
    optimizer = make_optimizer(model.parameters(), **arguments) if optimizer is None else optimizer
    handle = optimizer.attach(model) if loop == "attached" else None
    for step in range(first_step, first_step + steps):
        LOOPS[loop](optimizer, model, split(make_batch(dtype=dtype, seed=step), micro_batches))
    if handle is not None:
        handle.remove()
    return model, optimizer


def everything(model: nn.Module, optimizer: VariationalOptimizer) -> dict[str, Tensor]:
    """All weights and all optimizer state, by name."""
    tensors = dict(model.state_dict())
    for name, p in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def assert_same_run(
    first: tuple[nn.Module, VariationalOptimizer],
    second: tuple[nn.Module, VariationalOptimizer],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Same weights and same state, bit for bit unless a tolerance is given."""
    expected, actual = everything(*first), everything(*second)
    assert expected.keys() == actual.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )

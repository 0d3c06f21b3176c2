"""A plain training loop as people write it, in each of the three ways to train, with the usual additions.

An addition is an argument of :func:`run`; without any, ``run`` is the plain float32 loop that the others are compared
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vprop
from tests.harness import Batch, make_batch, make_model
from vprop import Objective, VariationalOptimizer

LEARNING_RATE, NUM_DATA = 0.05, 200
OPTIMIZERS: dict[str, Callable[..., VariationalOptimizer]] = {
    "Vprop": vprop.Vprop,
    "IVON": partial(vprop.IVON, betas=(0.9, 0.99)),
    # Vadam starts at the prior: a strong one, so that its noise leaves something to learn.
    "Vadam": partial(vprop.Vadam, prior_precision=100.0),
    "VOGN": vprop.VOGN,
}
WAYS = ("closure", "context", "attach")
EVERY_WAY = [(name, way) for name in ("Vprop", "IVON", "Vadam") for way in WAYS]
"""VOGN is trained with an objective, which is a closure that cannot be changed: it is listed where it takes part."""
WITH_VOGN = [*EVERY_WAY, ("VOGN", "closure")]
OPEN_WAYS = [(name, way) for name, way in EVERY_WAY if way != "closure"]
"""Where the loop has its hands on the gradients between backward and step: a GradScaler needs that."""

Run = tuple[nn.Module, VariationalOptimizer]
Edit = Callable[[nn.Module], Any]
After = Callable[[nn.Module, VariationalOptimizer, int], Any]


def nothing(*_: Any) -> None:
    """No addition."""


def run(
    name: str,
    way: str,
    *,
    steps: int = 5,
    model: nn.Module | None = None,
    prepare: Callable[[VariationalOptimizer], Any] = nothing,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    attach_wrapper: bool = False,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    batches: Callable[[int], list[Batch]] = lambda step: [make_batch(seed=step)],
    clip: Edit = nothing,
    after_step: After = nothing,
    **arguments: Any,
) -> Run:
    """Train for some steps; returns the model, its weights at the mean, and the optimizer.

    ``batches`` are the micro-batches of a step; the loss is the mean over all their examples. ``wrap`` makes what is
    called of the model, ``clip`` edits gradients, and a step that the ``scaler`` skips is made again.
    """
    model = make_model() if model is None else model
    optimizer = OPTIMIZERS[name](model.parameters(), **({"lr": LEARNING_RATE, "num_data": NUM_DATA} | arguments))
    prepare(optimizer)
    called = wrap(model)
    handle = optimizer.attach(called if attach_wrapper else model) if way == "attach" else None
    for step in range(steps):
        loop = partial(_one_step, optimizer, called, way, batches(step), autocast=autocast, clip=clip, scaler=scaler)
        while not loop():
            pass
        after_step(model, optimizer, step)
    if handle is not None:
        handle.remove()
    return model, optimizer


def _one_step(
    optimizer: VariationalOptimizer,
    model: nn.Module,
    way: str,
    batches: list[Batch],
    *,
    autocast: torch.dtype | None,
    clip: Edit,
    scaler: torch.amp.GradScaler | None,
) -> bool:
    """One turn of the loop; returns whether there was a step."""
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    sampled = optimizer.sampled_params if way == "context" else nullcontext

    def backward(sample: Callable[[], Any]) -> Tensor:
        total = sum(len(y) for _, y in batches)
        losses = []
        for x, y in batches:  # a block for each micro-batch: the draw must be the same in each
            with sample():
                with precision(autocast):
                    loss = F.cross_entropy(model(x), y) * (len(y) / total)
                scale(loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = backward(nullcontext)
        clip(model)
        return loss

    if isinstance(optimizer, vprop.VOGN):
        with precision(autocast):
            ((x, y),) = batches
            optimizer.step(Objective(model, F.cross_entropy, x, y))
        return True
    if way == "closure":
        optimizer.step(closure)
        return True
    optimizer.zero_grad()
    backward(sampled)
    if scaler is None:
        clip(model)
        optimizer.step()
        return True
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    return scaler.get_scale() >= before


@contextmanager
def precision(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to ``dtype``, or nothing."""
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        yield


def mean_of(model: nn.Module) -> Tensor:
    """All weights as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])

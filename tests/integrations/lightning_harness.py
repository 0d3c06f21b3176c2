"""A small LightningModule, a quiet Trainer, and the plain loop that both are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import Batch, make_batch, make_model
from vprop import VariationalOptimizer, Vprop

BATCHES = [make_batch(seed=seed) for seed in range(6)]
VALIDATION = [make_batch(size=size, seed=100 + size) for size in (12, 12, 5)]


class Loader:
    """Given batches in order. (Lightning takes a list for several loaders.)"""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


Run = tuple[nn.Module, VariationalOptimizer]


def make_optimizer(parameters: Any, **arguments: Any) -> Vprop:
    return Vprop(parameters, **{"num_data": 100, "lr": 0.2, **arguments})


class Classifier(pl.LightningModule):
    """Its training does not go through ``forward``, as often in real ones."""

    def __init__(self, model: nn.Module | None = None, **arguments: Any) -> None:
        super().__init__()
        self.model = make_model() if model is None else model
        self.arguments = arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.parameters(), **self.arguments)


def make_trainer(*callbacks: pl.Callback, trainer: type = pl.Trainer, **arguments: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1}
    places = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return trainer(callbacks=list(callbacks), **{**quiet, **places, **arguments})


def fit(
    *callbacks: pl.Callback, module: Classifier | None = None, batches: list[Any] = BATCHES, **arguments: Any
) -> Run:
    """Train, and return the model with its optimizer; arguments of the optimizer go to ``Classifier``."""
    module = Classifier() if module is None else module
    trainer = make_trainer(*callbacks, **arguments)
    trainer.fit(module, Loader(batches))
    return module.model, trainer.optimizers[0]


def plain_loop(
    windows: list[list[Batch]],
    *,
    clip: Callable[[Any], Any] = lambda parameters: None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    divide_by: int | None = None,
    **arguments: Any,
) -> Run:
    """A closure per window of micro-batches, whose gradients are added up."""
    model = make_model()
    optimizer = make_optimizer(model.parameters(), **arguments)
    for window in windows:

        def closure(window: list[Batch] = window) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for x, y in window:
                with context():
                    loss = F.cross_entropy(model(x), y)
                (loss / (divide_by or len(window))).backward()
                total += loss.detach()
            clip(model.parameters())
            return total

        optimizer.step(closure)
    return model, optimizer


def logged(callback_metrics: dict[str, Any], prefix: str = "val_posterior/") -> dict[str, float]:
    """What the callback has logged, by the names without their prefix."""
    return {name.removeprefix(prefix): float(v) for name, v in callback_metrics.items() if name.startswith(prefix)}


def assert_scores(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-5), name

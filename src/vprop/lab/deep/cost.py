"""What a step and a prediction cost, measured in a run of its own with nothing beside it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vprop.lab.deep import draws, predictions
from vprop.lab.deep.contenders import BY_NAME
from vprop.lab.deep.predictions import Forward
from vprop.lab.deep.run import DeepJob, make_optimizer, make_rates, make_trainer, statistics_batches
from vprop.lab.deep.training import WARM_UP, Trainer
from vprop.lab.deep.workloads import Workload, workload
from vprop.posterior.predictive.batch_norm import batch_norm_layers

STEPS, DRAWS = 200, 8
"""Of a timing on a GPU."""
PASSES = 5
"""Of a prediction, whose median is what it takes: a single one is a few milliseconds, and may be disturbed."""


@dataclass(frozen=True)
class DeepCost(DeepJob):
    """Of one contender on one task."""

    def compute(self) -> dict[str, Any]:
        """Milliseconds of a step, and of predictions for the test set; megabytes of training beyond the data."""
        with self.how.at_speed():
            return self._compute()

    def _compute(self) -> dict[str, Any]:
        torch.manual_seed(0)
        on_gpu = self.how.device.startswith("cuda")
        work, contender = self._work(), BY_NAME[self.contender]
        steps = STEPS if on_gpu else 4
        x, y = _so_many(work, steps * work.batch)
        self._train_for_nothing(work, x, y)
        before = _allocated(reset=True) if on_gpu else 0
        model, optimizer, trainer = self._ready(work, 2 * steps)
        trainer.run_epoch(x, y)  # warms up and records
        step = _seconds(lambda: trainer.run_epoch(x, y)) / steps
        data = x.nbytes + y.nbytes  # the trainer's own copy
        memory = (_allocated() - before - data) / 2**20 if on_gpu else None
        model.eval()

        def predict(forwards: Callable[[], Any]) -> float:
            return _median(
                lambda: predictions.averaged(forwards(), {"test": work.test}, {}, work.rows, self.how.autocast)
            )

        def several() -> Iterator[Forward]:
            return (draws.posterior if contender.kind == "posterior" else draws.peer)(optimizer, model, DRAWS)

        found = {"step_ms": 1e3 * step, "gradient_ms": 1e3 * step / contender.gradients, "memory_mb": memory}
        found["forward_ms"] = 1e3 * predict(lambda: [model])
        found["draw_ms"] = 1e3 * predict(several) / DRAWS if contender.kind in ("posterior", "peer") else None
        if contender.kind in ("posterior", "peer", "swag") and batch_norm_layers(model):
            of_batch_norm = draws.Statistics(lambda: statistics_batches(x), self.how.autocast)
            found["statistics_ms"] = 1e3 * _median(lambda: of_batch_norm.write(model))
        return found | {"test_inputs": len(work.test)}

    def _ready(self, work: Workload, steps: int) -> tuple[nn.Module, Optimizer, Trainer]:
        contender, setting = BY_NAME[self.contender], dict(self.setting)
        model = work.model(setting.get("dropout", 0.0))
        optimizer = make_optimizer(contender, setting, model, work, 0, self.how)
        rates = make_rates(setting, optimizer, steps)
        return model, optimizer, make_trainer(contender, work, model, optimizer, rates, self.how)

    def _train_for_nothing(self, work: Workload, x: Tensor, y: Tensor) -> None:
        """Until a step is recorded; then all of it is let go, and what was left by those who came before.

        torch allocates some memory once, for libraries and streams. It would count for who happens to be first.
        """
        steps = WARM_UP + 1
        trainer = self._ready(work, steps)[-1]
        trainer.run_epoch(x[: steps * work.batch], y[: steps * work.batch])
        del trainer
        gc.collect()
        if self.how.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _work(self) -> Workload:
        return workload(self.task, "final", self.data_dir, self.how)


def _so_many(work: Workload, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of a chunk, over again if there are not enough."""
    x, y = next(work.chunks(torch.Generator(work.test.device).manual_seed(0)))
    which = torch.arange(rows, device=x.device) % len(x)
    return x[which], y[which]


def _allocated(reset: bool = False) -> int:
    """Bytes: of now if counting starts, else the most since then."""
    torch.cuda.synchronize()
    if not reset:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _median(work: Callable[[], Any]) -> float:
    work()  # warms up
    return statistics.median(_seconds(work) for _ in range(PASSES))


def _seconds(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

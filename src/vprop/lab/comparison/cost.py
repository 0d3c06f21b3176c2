"""What a step costs: measured apart from the training, in one process and one thread, next to a plain step."""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from vprop.lab.comparison.methods import BY_NAME
from vprop.lab.comparison.tasks import TableSpec, task
from vprop.lab.engine.job import Job
from vprop.lab.engine.method import Method
from vprop.lab.engine.problem import Problem

STEPS = 5
"""Of one timing: more than one, for the clock; few, so that both of a pair meet the same weather."""


@dataclass(frozen=True)
class Cost(Job):
    """The timings of one task."""

    spec: TableSpec
    fingerprint: str
    methods: tuple[str, ...]

    def compute(self) -> dict[str, Any]:
        """The time of a step of every method, over that of forward, backward and torch's RMSprop on that batch."""
        work, batch, rounds = task(self.spec, "final", self.data_dir), self.spec.batch, self.spec.timing_rounds
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore", RuntimeWarning)
            return {"ratios": {name: relative_cost(work, BY_NAME[name], batch, rounds) for name in self.methods}}


def relative_cost(work: Problem, method: Method, batch: int, rounds: int) -> float:
    """The median over ``rounds`` pairs of timings, one right after the other."""
    plain, measured = _Stepper(work, batch, None), _Stepper(work, batch, method)
    for stepper in (plain, measured):  # first steps create the state, and torch's caches
        stepper.seconds()
    return statistics.median(measured.seconds() / plain.seconds() for _ in range(rounds))


class _Stepper:
    """A model with an optimizer, ready to be timed; RMSprop where no method is given."""

    def __init__(self, work: Problem, batch: int, method: Method | None) -> None:
        model = work.model(0, 0.0 if method is None else method.dropout)
        self.optimizer = (
            torch.optim.RMSprop(model.parameters(), lr=1e-3)
            if method is None
            else method.build(model.parameters(), work, 0, method.grid[0])
        )
        self.objective = work.objective(model, slice(batch))

    def seconds(self) -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.step(self.objective)  # type: ignore[arg-type]
        return time.perf_counter() - started

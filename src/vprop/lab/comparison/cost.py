"""What a step costs: measured apart from the training, in one process and one thread, next to a plain step."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vprop.lab.comparison import methods, tasks
from vprop.lab.comparison.methods import BY_NAME, Method
from vprop.lab.comparison.tasks import Spec, Task, task
from vprop.lab.experiments import problem as problem_module
from vprop.lab.experiments.store import key_of

STEPS = 5
"""Of one timing: more than one, for the clock; few, so that both of a pair meet the same weather."""


@dataclass(frozen=True)
class Cost:
    """The timings of one task."""

    spec: Spec
    fingerprint: str
    methods: tuple[str, ...]
    data_dir: Path | None = None

    @property
    def key(self) -> str:
        """A name for the outcome."""
        spec = {"comparison": "cost"} | asdict(self) | {"data_dir": None}
        return key_of(spec, tasks, methods, problem_module, sys.modules[__name__])


def execute(job: Cost) -> dict[str, Any]:
    """The time of a step of every method, divided by that of forward, backward and torch's RMSprop on that batch."""
    torch.set_num_threads(1)
    work = task(job.spec, "final", job.data_dir)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", RuntimeWarning)
        return {"ratios": {name: relative_cost(work, BY_NAME[name], job.spec.timing_rounds) for name in job.methods}}


def relative_cost(work: Task, method: Method, rounds: int) -> float:
    """The median over ``rounds`` pairs of timings, one right after the other."""
    plain, measured = _Stepper(work, None), _Stepper(work, method)
    for stepper in (plain, measured):  # first steps create the state, and torch's caches
        stepper.seconds()
    return statistics.median(measured.seconds() / plain.seconds() for _ in range(rounds))


class _Stepper:
    """A model with an optimizer, ready to be timed; RMSprop where no method is given."""

    def __init__(self, work: Task, method: Method | None) -> None:
        model = work.model(0, 0.0 if method is None else method.dropout)
        self.optimizer = (
            torch.optim.RMSprop(model.parameters(), lr=1e-3)
            if method is None
            else method.build(model.parameters(), work, 0, method.grid[0])
        )
        self.objective = work.objective(model, slice(work.spec.batch))

    def seconds(self) -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.step(self.objective)  # type: ignore[arg-type]
        return time.perf_counter() - started

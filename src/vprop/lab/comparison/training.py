"""One training run: a method with one setting and one seed on one task, scored at its end."""

from __future__ import annotations

import math
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vprop import VariationalOptimizer
from vprop.lab.comparison import laplace, methods, scores, tasks
from vprop.lab.comparison.laplace import laplace_variance
from vprop.lab.comparison.methods import BY_NAME, Method
from vprop.lab.comparison.scores import flat, ratio_quantiles, score
from vprop.lab.comparison.tasks import Part, Spec, Task, task
from vprop.lab.experiments import problem as problem_module
from vprop.lab.experiments import run as run_module
from vprop.lab.experiments.run import batches
from vprop.lab.experiments.store import key_of


@dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, and where its data are."""

    spec: Spec
    fingerprint: str
    part: Part
    method: str
    setting: tuple[tuple[str, float], ...]
    seed: int
    data_dir: Path | None = None

    @property
    def key(self) -> str:
        """A name for the outcome. It does not depend on where the data lie, but on the code that computes it."""
        spec = {"comparison": "run"} | asdict(self) | {"data_dir": None}
        return key_of(spec, tasks, methods, scores, laplace, problem_module, run_module, sys.modules[__name__])

    @property
    def steps(self) -> int:
        """Optimizer steps that the budget of gradients allows."""
        return max(1, self.spec.gradients // BY_NAME[self.method].gradients)


def execute(run: Run) -> dict[str, Any]:
    """Train and score; in a final run, look at the variances too."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    method, work = BY_NAME[run.method], task(run.spec, run.part, run.data_dir)
    model = work.model(run.seed, method.dropout)
    optimizer = method.build(model.parameters(), work, run.seed, dict(run.setting))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", RuntimeWarning)  # left-out elements: a diverging run says so by its scores
        torch.manual_seed(run.seed)  # of dropout masks
        train(work, model, optimizer, run.steps, run.seed)
        result = {"scores": score(work, method, model, optimizer)}
        if run.part == "final" and method.kind == "posterior" and result["scores"]["accuracy"] is not None:
            result |= _variances(work, method, model, optimizer)
    return result | {"seconds": time.perf_counter() - started}


def train(work: Task, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """``steps`` steps on mini-batches, the step size falling to zero along a cosine."""
    first = [group["lr"] for group in optimizer.param_groups]
    for step, rows in enumerate(batches(work.num_data, work.spec.batch, steps, seed)):
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * decayed(step, steps)
        optimizer.step(work.objective(model, rows))  # type: ignore[arg-type]


def decayed(step: int, steps: int) -> float:
    """The share of the step size that step number ``step``, counted from 0, takes.

    >>> [round(decayed(step, 4), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _variances(work: Task, method: Method, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """For logistic regression the variances themselves, which several references await; else the ratio to Laplace's."""
    assert isinstance(optimizer, VariationalOptimizer)
    variance = flat(optimizer.posterior(model).variance)
    if work.spec.problem == "logreg":
        return {"variance": variance.tolist()}
    return {"ratios": {"laplace": ratio_quantiles(variance, laplace_variance(work, model))}}

"""One training run: a method with one setting and one seed on one problem, scored along the way."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vprop import VariationalOptimizer
from vprop.lab.environment import environment
from vprop.lab.experiments import methods
from vprop.lab.experiments import problem as problem_module
from vprop.lab.experiments.methods import BY_NAME, Method
from vprop.lab.experiments.problem import Problem, Score, problem
from vprop.lab.experiments.store import key_of

TUNING_POINTS = (0.9, 0.95, 1.0)
"""Where in a run the score that chooses the step size is taken; the mean of these, because runs are noisy."""


@dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, and where its data are."""

    problem: str
    data: str
    fingerprint: str
    batch: int | None
    """Rows of a mini-batch; ``None`` for all."""
    method: str
    setting: tuple[tuple[str, float], ...]
    seed: int
    gradients: int
    """Gradient evaluations that the run may spend."""
    points: int
    """How often the run is scored on its way; 0 for the score that chooses the step size only."""
    decay: bool = False
    """Whether the step size falls linearly to zero over the second half of the run."""
    data_dir: Path | None = None

    @property
    def key(self) -> str:
        """A name for the outcome; where the data lie has no part in it, the code that computes it has."""
        spec = {"experiment": "curves"} | asdict(self) | {"data_dir": None}
        return key_of(spec, methods, problem_module, sys.modules[__name__])

    @property
    def steps(self) -> int:
        """Optimizer steps that the budget allows."""
        return max(1, self.gradients // BY_NAME[self.method].gradients)


def execute(run: Run) -> dict[str, Any]:
    """Train and score. A run that diverges ends early, with ``None`` for what it did not reach."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    method, task = BY_NAME[run.method], problem(run.problem, run.data, run.data_dir)
    model = task.model(run.seed, method.dropout)
    optimizer = method.build(
        model.parameters(), task.num_data, task.prior_precision, run.seed, task.hess_init, **dict(run.setting)
    )
    marks = log_spaced(run.steps, run.points)
    tuning = sorted({max(1, round(share * run.steps)) for share in TUNING_POINTS})
    scores: dict[int, Score] = {}
    tuning_scores: list[float] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", RuntimeWarning)  # left-out elements: a diverging run says so by its scores
        torch.manual_seed(run.seed)  # of dropout masks
        for step, rows in enumerate(batches(task.num_data, run.batch, run.steps, run.seed), start=1):
            if run.decay:
                optimizer.param_groups[0]["lr"] = dict(run.setting)["lr"] * _decayed(step, run.steps)
            optimizer.step(task.objective(model, rows))  # type: ignore[arg-type]
            if step in marks and (score := _score(task, method, model, optimizer, test=True)) is not None:
                scores[step] = score
            if step in tuning and run.points == 0:
                tuning_scores.append(_tuning_score(task, method, model, optimizer))
    per_step = (task.num_data if run.batch is None else run.batch) / task.num_data
    return {
        "run": asdict(run) | {"data_dir": None, "setting": dict(run.setting)},
        "passes": [step * method.gradients * per_step for step in marks],
        "paper_passes": [step * per_step for step in marks],
        "elbo": [_or_none(scores, step, "elbo") for step in marks],
        "elbo_error": [_or_none(scores, step, "elbo_error") for step in marks],
        "log_loss": [_or_none(scores, step, "log_loss") for step in marks],
        "score": finite_or_none(sum(tuning_scores) / len(tuning_scores)) if tuning_scores else None,
        "seconds": time.perf_counter() - started,
        "environment": environment(),
    }


def _decayed(step: int, steps: int) -> float:
    """1 in the first half, then a straight line to zero.

    >>> [_decayed(step, 8) for step in (1, 4, 5, 8)]
    [1.0, 1.0, 1.0, 0.25]
    """
    return min(1.0, (steps - step + 1) / (steps - steps // 2))


def log_spaced(steps: int, points: int) -> list[int]:
    """``points`` steps from the first to the last, evenly spaced on a logarithmic axis."""
    if points <= 1:
        return [steps] * points
    return sorted({round(steps ** (i / (points - 1))) for i in range(points)})


def batches(num_data: int, size: int | None, steps: int, seed: int) -> Iterator[Tensor | None]:
    """Rows of each step: a fresh permutation for every epoch, its incomplete last batch left out."""
    if size is None:
        yield from [None] * steps
        return
    generator = torch.Generator().manual_seed(seed)
    given = 0
    while given < steps:
        for rows in torch.randperm(num_data, generator=generator).split(size):
            if len(rows) == size and given < steps:
                given += 1
                yield rows


def _score(
    task: Problem, method: Method, model: nn.Module, optimizer: torch.optim.Optimizer, *, test: bool
) -> Score | None:
    """``None`` if the run has left the finite numbers."""
    try:
        if method.kind == "posterior":
            assert isinstance(optimizer, VariationalOptimizer)
            score = task.score_posterior(optimizer.posterior(model), test=test)
        else:
            score = task.score_point(model) if method.kind == "point" else task.score_dropout(model)
    except (FloatingPointError, torch.linalg.LinAlgError):
        return None
    return score if all(value is None or math.isfinite(value) for value in asdict(score).values()) else None


def _tuning_score(task: Problem, method: Method, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    if method.kind != "posterior":
        return task.log_joint(model)
    score = _score(task, method, model, optimizer, test=False)
    return -math.inf if score is None or score.elbo is None else score.elbo


def _or_none(scores: dict[int, Score], step: int, name: str) -> float | None:
    return getattr(scores[step], name) if step in scores else None


def finite_or_none(value: float | None) -> float | None:
    """What JSON can hold: ``None`` for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None

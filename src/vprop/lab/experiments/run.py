"""A run of the paper's figures: scored along the way, or, while step sizes are chosen, near its end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vprop import VariationalOptimizer
from vprop.lab.engine.binary import BinaryProblem, Score, problem
from vprop.lab.engine.run import Run, Training
from vprop.lab.engine.store import finite_or_none

TUNING_POINTS = (0.9, 0.95, 1.0)
"""Where in a run the score that chooses the step size is taken; the mean of these, because runs are noisy."""


@dataclass(frozen=True)
class CurveRun(Run):
    """A run whose scores make a curve. One that diverges has ``None`` for what it did not reach."""

    problem: str
    data: str
    points: int
    """How often the run is scored on its way; 0 for the score that chooses the step size only."""

    def load(self) -> BinaryProblem:
        """From the cache of this process."""
        return problem(self.problem, self.data, self.data_dir)

    def measure(self, training: Training, steps: Iterator[int]) -> dict[str, Any]:
        """Scores against passes, counted fairly (every gradient) and as in the paper (every step)."""
        marks = log_spaced(self.steps, self.points)
        tuning = sorted({max(1, round(share * self.steps)) for share in TUNING_POINTS}) if self.points == 0 else []
        scores: dict[int, Score] = {}
        tuning_scores: list[float] = []
        for step in steps:
            if step in marks and (score := _score(training, test=True)) is not None:
                scores[step] = score
            if step in tuning:
                tuning_scores.append(_tuning_score(training))
        num_data = training.problem.num_data
        per_step = (self.batch or num_data) / num_data
        return {
            "passes": [step * self.method.gradients * per_step for step in marks],
            "paper_passes": [step * per_step for step in marks],
            **{name: [_or_none(scores, step, name) for step in marks] for name in ("elbo", "elbo_error", "log_loss")},
            "score": finite_or_none(sum(tuning_scores) / len(tuning_scores)) if tuning_scores else None,
        }


def log_spaced(steps: int, points: int) -> list[int]:
    """``points`` steps from the first to the last, evenly spaced on a logarithmic axis."""
    if points <= 1:
        return [steps] * points
    return sorted({round(steps ** (i / (points - 1))) for i in range(points)})


def _score(training: Training, *, test: bool) -> Score | None:
    """``None`` if the run has left the finite numbers."""
    problem, model, kind = training.problem, training.model, training.method.kind
    assert isinstance(problem, BinaryProblem)
    try:
        if kind == "posterior":
            assert isinstance(training.optimizer, VariationalOptimizer)
            score = problem.score_posterior(training.optimizer.posterior(model), test=test)
        else:
            score = problem.score_point(model) if kind == "point" else problem.score_dropout(model)
    except (FloatingPointError, torch.linalg.LinAlgError):
        return None
    return score if all(value is None or math.isfinite(value) for value in asdict(score).values()) else None


def _tuning_score(training: Training) -> float:
    """Of training data only, for every method."""
    if training.method.kind != "posterior":
        assert isinstance(training.problem, BinaryProblem)
        return training.problem.log_joint(training.model)
    score = _score(training, test=False)
    return -math.inf if score is None or score.elbo is None else score.elbo


def _or_none(scores: dict[int, Score], step: int, name: str) -> float | None:
    return getattr(scores[step], name) if step in scores else None

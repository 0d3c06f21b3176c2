"""A run of the tables: trained with a step size that falls to zero, scored at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vprop import VariationalOptimizer
from vprop.lab.comparison.laplace import laplace_variance
from vprop.lab.comparison.scores import flat, ratio_quantiles, score
from vprop.lab.comparison.tasks import Part, TableSpec, task
from vprop.lab.engine.grid import items
from vprop.lab.engine.method import Method, Setting
from vprop.lab.engine.problem import Problem
from vprop.lab.engine.run import Run, Training


@dataclass(frozen=True)
class ScoredRun(Run):
    """A run on one part of a task."""

    spec: TableSpec
    part: Part

    @classmethod
    def of(
        cls,
        spec: TableSpec,
        fingerprint: str,
        data_dir: Path | None,
        part: Part,
        method: Method,
        setting: Setting,
        seed: int,
    ) -> ScoredRun:
        """With the budget that the task has."""
        budget = (spec.gradients, spec.batch)
        return cls(fingerprint, method, items(setting), seed, *budget, spec, part, schedule="cosine", data_dir=data_dir)

    def load(self) -> Problem:
        """From the cache of this process."""
        return task(self.spec, self.part, self.data_dir)

    def measure(self, training: Training, steps: Iterator[int]) -> dict[str, Any]:
        """The scores at the end; of a final run, the variances too."""
        deque(steps, maxlen=0)
        result = {"scores": score(training, self.spec.samples)}
        posterior = training.method.kind == "posterior"
        if self.part == "final" and posterior and result["scores"]["accuracy"] is not None:
            return result | _variances(training)
        return result


def _variances(training: Training) -> dict[str, Any]:
    """For logistic regression the variances themselves, which several references await; else the ratio to Laplace's."""
    assert isinstance(training.optimizer, VariationalOptimizer)
    variance = flat(training.optimizer.posterior(training.model).variance)
    if training.problem.name == "logreg":
        return {"variance": variance.tolist()}
    return {"ratios": {"laplace": ratio_quantiles(variance, laplace_variance(training.problem, training.model))}}

"""Ground truth for logistic regression: the best Gaussian with independent weights, and the best one of all."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vprop.baselines import exact_vi_logistic
from vprop.lab.comparison import scores, tasks
from vprop.lab.comparison.scores import score_outputs
from vprop.lab.comparison.tasks import Spec, Task, task
from vprop.lab.experiments import problem as problem_module
from vprop.lab.experiments.store import key_of

LABELS = {"diagonal": "exact mean-field VI", "full": "exact full-covariance VI"}


@dataclass(frozen=True)
class Exact:
    """Both exact answers to a task."""

    spec: Spec
    fingerprint: str
    data_dir: Path | None = None

    @property
    def key(self) -> str:
        """A name for the outcome."""
        spec = {"comparison": "exact"} | asdict(self) | {"data_dir": None}
        return key_of(spec, tasks, scores, problem_module, sys.modules[__name__])


def execute(job: Exact) -> dict[str, Any]:
    """Marginal variances, ELBO and scores of the exact answers, by structure."""
    torch.set_num_threads(1)
    work = task(job.spec, "final", job.data_dir)
    answers: dict[str, Any] = {}
    for structure in ("diagonal", "full"):
        exact = exact_vi_logistic(work.train_x, work.train_y, work.prior_precision, structure)
        answers[structure] = {
            "variance": exact.variance.tolist(),
            "elbo": exact.elbo,
            "gradient_norm": exact.gradient_norm,
            "scores": _scores(work, exact.mean, exact.covariance),
        }
    return answers


def _scores(work: Task, mean: Tensor, covariance: Tensor) -> dict[str, float | None]:
    """Averaged over as many weight samples as everybody's predictions are."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(work.spec.samples, len(mean), generator=generator, dtype=mean.dtype)
    weights = mean + noise @ torch.linalg.cholesky(covariance).T
    return score_outputs(work, (weights @ work.test_x.T)[:, :, None])

"""Ground truth for logistic regression: the best Gaussian with independent weights, and the best one of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop.baselines import exact_vi_logistic
from vprop.lab.comparison.scores import score_outputs
from vprop.lab.comparison.tasks import TableSpec, task
from vprop.lab.engine.job import Job
from vprop.lab.engine.problem import Problem

LABELS = {"diagonal": "exact mean-field VI", "full": "exact full-covariance VI"}


@dataclass(frozen=True)
class Exact(Job):
    """Both exact answers to a task."""

    spec: TableSpec
    fingerprint: str

    def compute(self) -> dict[str, Any]:
        """Marginal variances, ELBO and scores of the exact answers, by structure."""
        work = task(self.spec, "final", self.data_dir)
        answers: dict[str, Any] = {}
        for structure in ("diagonal", "full"):
            exact = exact_vi_logistic(work.train_x, work.train_y, work.prior_precision, structure)
            answers[structure] = {
                "variance": exact.variance.tolist(),
                "elbo": exact.elbo,
                "gradient_norm": exact.gradient_norm,
                "scores": _scores(work, self.spec.samples, exact.mean, exact.covariance),
            }
        return {"answers": answers}


def _scores(work: Problem, samples: int, mean: Tensor, covariance: Tensor) -> dict[str, float | None]:
    """Averaged over as many weight samples as everybody's predictions are."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(samples, len(mean), generator=generator, dtype=mean.dtype)
    weights = mean + noise @ torch.linalg.cholesky(covariance).T
    return score_outputs(work, (weights @ work.test_x.T)[:, :, None])

"""One pass over the data, an example at a time: the Kalman filter, and VON and VONG used as filters.

A natural-gradient step with N = 1, lr = 1, β₂ = 0 and the last posterior as the prior is a filter's update:

    P ← P + Ĥ,   μ ← μ − P⁻¹ĝ

With the Hessian at the mean as Ĥ (VON without sampling) this is, for logistic regression, the extended Kalman filter to
rounding, because there the Hessian is the Fisher. VONG puts ĝĝᵀ in its place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vprop import VON, VONG
from vprop.baselines import ExtendedKalmanFilter
from vprop.lab.engine.binary import LogisticRegression, problem
from vprop.lab.engine.grid import repeat
from vprop.lab.engine.job import Job
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.problem import fingerprint
from vprop.lab.engine.store import finite_or_none
from vprop.lab.environment import environment
from vprop.lab.experiments.curves import exact_lines, over_seeds
from vprop.lab.experiments.run import log_spaced

PRIOR_PRECISION = 1.0
"""With the paper's λ = 1e-5 the first few examples would send every linearisation to its limits."""

_Build = Callable[..., torch.optim.Optimizer]
METHODS: dict[str, tuple[str, str, _Build | None, dict[str, Any]]] = {
    "ekf": ("Extended Kalman filter", "paper", None, {}),
    "von": ("VON as a filter, no sampling", "ours", VON, {"mc_samples": 0}),
    "vong": ("VONG as a filter, no sampling", "paper", VONG, {"mc_samples": 0}),
    "vong-1": ("VONG-1 as a filter", "paper", VONG, {"mc_samples": 1}),
    "vong-fisher": ("VONG as a filter, sampled Fisher", "paper", VONG, {"mc_samples": 0, "sampled_fisher": True}),
}


@dataclass(frozen=True)
class Pass(Job):
    """One method over the data in one order."""

    method: str
    data: str
    fingerprint: str
    seed: int
    examples: int
    points: int = 12

    def compute(self) -> dict[str, Any]:
        """Filter the examples one by one, score the Gaussian on the way."""
        task = _task(self.data, self.data_dir)
        rows = torch.randperm(task.num_data, generator=torch.Generator().manual_seed(self.seed))[: self.examples]
        marks = log_spaced(len(rows), self.points)
        states = _kalman(task, rows) if self.method == "ekf" else _chain(task, rows, self)
        scores, mean, covariance = {}, torch.zeros(0), torch.zeros(0)
        for seen, (mean, covariance) in enumerate(states, start=1):
            if seen in marks:
                scores[seen] = task.score(mean, covariance)
        return {
            "passes": [seen / task.num_data for seen in marks],
            "elbo": [finite_or_none(scores[seen].elbo) for seen in marks],
            "log_loss": [finite_or_none(scores[seen].log_loss) for seen in marks],
            "mean": mean.nan_to_num().tolist(),
            "precision": torch.linalg.inv(covariance).tolist() if bool(torch.isfinite(mean).all()) else None,
        }


def _task(data: str, data_dir: Path | None) -> LogisticRegression:
    task = problem("logreg", data, data_dir)
    assert isinstance(task, LogisticRegression)
    copy = LogisticRegression(task.data)
    copy.prior_precision = PRIOR_PRECISION
    return copy


def _kalman(task: LogisticRegression, rows: Tensor) -> Any:
    model = task.model(0)
    ekf = ExtendedKalmanFilter(model, prior_precision=PRIOR_PRECISION, likelihood="bernoulli")
    for row in rows:
        ekf.update(task.train_x[row : row + 1], task.train_y[row : row + 1])
        yield ekf.mean.clone(), ekf.covariance.clone()


def _chain(task: LogisticRegression, rows: Tensor, job: Pass) -> Any:
    """Each example's posterior is the next one's prior."""
    model = task.model(0)
    _, _, build, arguments = METHODS[job.method]
    assert build is not None
    size = sum(p.numel() for p in model.parameters())
    prior: dict[str, Any] = {
        "prior_mean": [torch.zeros_like(p) for p in model.parameters()],
        "prior_precision": PRIOR_PRECISION * torch.eye(size, dtype=torch.float64),
    }
    for number, row in enumerate(rows):
        optimizer: Any = build(
            list(model.parameters()), lr=1.0, num_data=1, betas=(0.0, 0.0), hess_init=0.0,
            seed=job.seed * 1_000_003 + number, **prior, **arguments,
        )  # fmt: skip
        optimizer.step(task.objective(model, row[None]))
        posterior = optimizer.posterior(model)
        prior = posterior.as_prior()
        yield posterior.mean["weight"].flatten(), posterior.covariance


def filters(pool: Pool, data: str, seeds: int, data_dir: Path | None, most: int = 400) -> dict[str, Any]:
    """Every method over the data in several orders, with the distance of its end from the Kalman filter's."""
    task = _task(data, data_dir)
    examples = min(most, task.num_data)
    print_of = fingerprint(task.data)
    jobs = {
        name: [Pass(name, data, print_of, seed, examples, data_dir=data_dir) for seed in range(seeds)]
        for name in METHODS
    }
    by_method = repeat(pool, "Filters", jobs)
    methods = [_figure_entry(name, by_method[name], by_method["ekf"]) for name in METHODS]
    return {
        "experiment": "filter",
        "title": "VONG and the extended Kalman filter",
        "description": (
            "Logistic regression, one pass over the data, one example at a time. VON and VONG take each example with "
            "the last posterior as their prior, which turns them into filters; nothing is tuned. Everything is scored "
            "as a posterior of the whole training data."
        ),
        "environment": environment(),
        "settings": {"prior precision": PRIOR_PRECISION, "orders of the data": seeds, "examples": examples},
        "notes": [
            "Distance of the end from the Kalman filter's, in its standard deviations (root mean square over weights): "
            + "; ".join(f"{method['label']} {mean_distance(method):.2g}" for method in methods[1:])
            + "."
        ],
        "panels": [
            {
                "id": f"filter-{data}",
                "title": f"{data}, one example at a time",
                "data": data,
                "batch": 1,
                "num_data": task.num_data,
                "num_parameters": task.train_x.shape[1],
                "prior_precision": PRIOR_PRECISION,
                "lines": exact_lines(task, ("full",)),
                "methods": methods,
            }
        ],
    }


def _figure_entry(name: str, runs: list[dict[str, Any]], ekf_runs: list[dict[str, Any]]) -> dict[str, Any]:
    label, group, _, _ = METHODS[name]
    return {
        "name": f"filter-{name}",
        "label": label,
        "group": group,
        "samples": None,
        "grid": [],
        "chosen": None,
        "score_name": "nothing to choose",
        "seeds": [run["job"]["seed"] for run in runs],
        "passes": runs[0]["passes"],
        "paper_passes": runs[0]["passes"],
        "elbo": over_seeds([run["elbo"] for run in runs]) | {"standard_error": None},
        "log_loss": over_seeds([run["log_loss"] for run in runs]),
        "seconds": None,
        "distance_to_ekf": [finite_or_none(_distance(run, ekf)) for run, ekf in zip(runs, ekf_runs, strict=True)],
    }


def mean_distance(method: dict[str, Any]) -> float:
    """Over the orders of the data; infinite if one diverged."""
    return statistics.fmean(float("inf") if value is None else value for value in method["distance_to_ekf"])


def _distance(run: dict[str, Any], ekf: dict[str, Any]) -> float:
    """√((μ−μ')ᵀP(μ−μ')/D) with P the Kalman filter's precision."""
    if run["precision"] is None or ekf["precision"] is None:
        return float("inf")  # one of them diverged
    difference = torch.tensor(run["mean"], dtype=torch.float64) - torch.tensor(ekf["mean"], dtype=torch.float64)
    precision = torch.tensor(ekf["precision"], dtype=torch.float64)
    return math.sqrt(max(0.0, float(difference @ precision @ difference)) / len(difference))

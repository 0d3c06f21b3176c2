"""The protocol: choose every method's setting on held-out training data, train anew with several seeds, measure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vprop.lab.comparison import cost, nuts, references, training
from vprop.lab.comparison.methods import BY_NAME, MOMENTUM, Method, Setting, at_edge, taking_part, tried
from vprop.lab.comparison.scores import METRICS, QUANTILES, ratio_quantiles
from vprop.lab.comparison.tasks import VALIDATION_SHARE, Spec, load_data, task
from vprop.lab.comparison.training import Run
from vprop.lab.environment import environment
from vprop.lab.experiments.pool import Pool
from vprop.lab.experiments.problem import fingerprint

TUNING_SEED = 1000
"""Settings are chosen on a seed of their own, so that no reported run was chosen for being lucky."""

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """One task with its methods and its data."""

    spec: Spec
    data_dir: Path | None
    fingerprint: str
    methods: tuple[Method, ...]

    def run(self, method: Method, setting: Setting, seed: int, final: bool) -> Run:
        """A training run of this task."""
        part = "final" if final else "tuning"
        items = tuple(sorted(setting.items()))
        return Run(self.spec, self.fingerprint, part, method.name, items, seed, self.data_dir)  # type: ignore[arg-type]


def compare(spec: Spec, pool: Pool, data_dir: Path | None, folder: Path) -> dict[str, Any]:
    """Everything of one table. ``folder`` is where results are, those of NUTS among them."""
    data = load_data(spec, data_dir)
    work = task(spec, "final", data_dir)
    comparison = Comparison(spec, data_dir, fingerprint(data), taking_part(work))
    grids = _choose(comparison, pool)
    chosen = {name: _best(grid) for name, grid in grids.items()}
    runs, exact = _train(comparison, chosen, pool)
    sampled = nuts.load(folder, spec, comparison.fingerprint)
    names = tuple(method.name for method in comparison.methods)
    timing = cost.Cost(spec, comparison.fingerprint, names, data_dir)
    costs = pool.run_all(f"{spec.name}: cost of a step", [timing], cost.execute, key=_key)[timing.key]
    return {
        "task": spec.name,
        "title": spec.title,
        "environment": environment(),
        "settings": _settings(spec) | {"prior_precision": work.prior_precision, "hess_init": work.hess_init},
        "num_data": work.num_data,
        "num_test": len(work.test_x),
        "num_parameters": work.num_parameters,
        "fingerprint": comparison.fingerprint,
        "references": _reference_rows(exact, sampled),
        "methods": [
            _row(method, grids[method.name], chosen[method.name], runs[method.name], exact, sampled)
            | {"cost": costs["ratios"][method.name]}
            for method in comparison.methods
        ],
    }


def _choose(comparison: Comparison, pool: Pool) -> dict[str, list[dict[str, Any]]]:
    """For every method the settings that were tried, each with its log-loss on the held-out training data."""
    runs = {
        method.name: [
            comparison.run(method, setting, TUNING_SEED, final=False)
            for setting in tried(method, comparison.spec.settings)
        ]
        for method in comparison.methods
    }
    jobs = [run for group in runs.values() for run in group]
    results = pool.run_all(f"{comparison.spec.name}: settings", jobs, _execute, key=_key, cost=_effort)
    return {
        name: [dict(run.setting) | {"nll": results[run.key]["scores"]["nll"]} for run in group]
        for name, group in runs.items()
    }


def _best(grid: list[dict[str, Any]]) -> Setting | None:
    """The setting with the lowest log-loss; ``None`` if every one diverged."""
    usable = [entry for entry in grid if entry["nll"] is not None]
    if not usable:
        return None
    best = min(usable, key=lambda entry: entry["nll"])
    return {name: value for name, value in best.items() if name != "nll"}


def _train(
    comparison: Comparison, chosen: dict[str, Setting | None], pool: Pool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any] | None]:
    """The runs that are reported: the chosen setting on all training data, one for each seed; and the exact answers."""
    runs = {
        method.name: [comparison.run(method, setting, seed, final=True) for seed in _reported_seeds(comparison.spec)]
        if (setting := chosen[method.name]) is not None
        else []
        for method in comparison.methods
    }
    exact = references.Exact(comparison.spec, comparison.fingerprint, comparison.data_dir)
    jobs: list[Run | references.Exact] = [run for group in runs.values() for run in group]
    if comparison.spec.problem == "logreg":
        jobs.append(exact)
    results = pool.run_all(f"{comparison.spec.name}: seeds", jobs, _execute, key=_key, cost=_effort)
    return {name: [results[run.key] for run in group] for name, group in runs.items()}, results.get(exact.key)


def _reported_seeds(spec: Spec) -> range:
    """Seed 0 is for trying things out, so that what is decided by looking is not decided by these."""
    return range(1, 1 + spec.seeds)


def _reference_rows(exact: dict[str, Any] | None, sampled: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What no method here can be expected to beat, scored alike."""
    rows = []
    for structure, answer in (exact or {}).items():
        ratios = None if sampled is None else {"nuts": _ratio(answer["variance"], sampled)}
        rows.append({"name": f"exact-{structure}", "label": references.LABELS[structure], "ratios": ratios} | answer)
    if sampled is not None:
        kept = ("scores", "r_hat_max", "ess_min", "divergences", "settings")
        rows.append({"name": "nuts", "label": "NUTS", "ratios": None} | {name: sampled[name] for name in kept})
    for row in rows:
        row.pop("variance", None)
    return rows


def _row(
    method: Method,
    grid: list[dict[str, Any]],
    chosen: Setting | None,
    runs: list[dict[str, Any]],
    exact: dict[str, Any] | None,
    sampled: dict[str, Any] | None,
) -> dict[str, Any]:
    per_run = [_ratios(method, run, exact, sampled) for run in runs]
    return {
        "name": method.name,
        "label": method.label,
        "gradients": method.gradients,
        "posterior": {"posterior": "full" if method.full_covariance else "diagonal"}.get(method.kind),
        "grid": grid,
        "chosen": chosen,
        "at_edge": at_edge(method, chosen),
        "scores": {name: over_seeds([run["scores"][name] for run in runs]) for name in METRICS},
        "ratios": {
            reference: {name: over_seeds([ratios[reference][name] for ratios in per_run]) for name in QUANTILES}
            for reference in (per_run[0] if per_run and all(per_run) else {})
        },
        "seconds": statistics.fmean(run["seconds"] for run in runs) if runs else None,
    }


def _ratios(
    method: Method, run: dict[str, Any], exact: dict[str, Any] | None, sampled: dict[str, Any] | None
) -> dict[str, dict[str, float]]:
    """Quantiles of the variance ratios of one run, by reference."""
    if "ratios" in run or "variance" not in run:
        return run.get("ratios", {})
    ratios = {}
    if exact is not None:
        ratios["exact"] = _ratio(run["variance"], exact["full" if method.full_covariance else "diagonal"])
    if sampled is not None:
        ratios["nuts"] = _ratio(run["variance"], sampled)
    return ratios


def _ratio(variance: list[float], reference: dict[str, Any]) -> dict[str, float]:
    return ratio_quantiles(torch.tensor(variance).double(), torch.tensor(reference["variance"]).double())


def over_seeds(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and its standard error; ``None`` if a run had no finite value, or for the error of a single run.

    >>> over_seeds([1.0, 3.0])
    {'mean': 2.0, 'standard_error': 1.0}
    >>> over_seeds([1.0, None])
    {'mean': None, 'standard_error': None}
    """
    usable = [value for value in values if value is not None]
    if not usable or len(usable) < len(values):
        return {"mean": None, "standard_error": None}
    error = statistics.stdev(usable) / math.sqrt(len(usable)) if len(usable) > 1 else None
    return {"mean": statistics.fmean(usable), "standard_error": error}


def _settings(spec: Spec) -> dict[str, Any]:
    return {
        "problem": spec.problem,
        "data": spec.data,
        "batch": spec.batch,
        "gradients": spec.gradients,
        "seeds": spec.seeds,
        "settings": spec.settings,
        "samples": spec.samples,
        "momentum": MOMENTUM,
        "validation_share": VALIDATION_SHARE,
        "tuning_seed": TUNING_SEED,
        "threads_per_run": 1,
    }


def _key(job: Any) -> str:
    return job.key


def _execute(job: Run | references.Exact) -> dict[str, Any]:
    return training.execute(job) if isinstance(job, Run) else references.execute(job)


def _effort(job: Run | references.Exact) -> float:
    return job.spec.gradients * (BY_NAME[job.method].effort if isinstance(job, Run) else 1.0)

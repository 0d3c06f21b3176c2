"""The protocol: choose every method's setting on held-out training data, train anew with several seeds, measure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vprop.lab.comparison import nuts, references
from vprop.lab.comparison.cost import Cost
from vprop.lab.comparison.methods import MOMENTUM, taking_part
from vprop.lab.comparison.scores import METRICS, QUANTILES, ratio_quantiles
from vprop.lab.comparison.tasks import VALIDATION_SHARE, TableSpec, load_data, task
from vprop.lab.comparison.training import ScoredRun
from vprop.lab.engine.grid import TUNING_SEED, Choice, Criterion, at_edge, choose, mean_and_std, repeat, tried
from vprop.lab.engine.job import Job
from vprop.lab.engine.method import Method
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.problem import fingerprint
from vprop.lab.environment import environment

LOSS = Criterion("nll", lambda result: result["scores"]["nll"], lowest=True)
"""Settings are chosen by the log-loss on training rows that were held out."""


def compare(spec: TableSpec, pool: Pool, data_dir: Path | None, folder: Path) -> dict[str, Any]:
    """Everything of one table. ``folder`` is where results are, those of NUTS among them."""
    work, print_of = task(spec, "final", data_dir), fingerprint(load_data(spec, data_dir))
    methods, run = taking_part(work), partial(ScoredRun.of, spec, print_of, data_dir)
    tries = {
        method.name: [run("tuning", method, setting, TUNING_SEED) for setting in tried(method, spec.settings)]
        for method in methods
    }
    choices = choose(pool, f"{spec.name}: settings", tries, LOSS)
    # Seed 0 is for trying things out, so that what is decided by looking is not decided by these.
    seeds = range(1, 1 + spec.seeds)
    jobs: dict[str, list[Job]] = {
        method.name: [run("final", method, setting, seed) for seed in seeds]
        if (setting := choices[method.name].chosen) is not None
        else []
        for method in methods
    }
    exact_job = references.Exact(spec, print_of, data_dir=data_dir)
    results = repeat(pool, f"{spec.name}: seeds", jobs | {"exact": [exact_job] if spec.problem == "logreg" else []})
    exact = results["exact"][0]["answers"] if results["exact"] else None
    sampled = nuts.load(folder, spec, print_of)
    timing = Cost(spec, print_of, tuple(choices), data_dir=data_dir)
    costs = pool.run_all(f"{spec.name}: cost of a step", [timing])[timing.key]
    return {
        "task": spec.name,
        "title": spec.title,
        "environment": environment(),
        "settings": _settings(spec) | {"prior_precision": work.prior_precision, "hess_init": work.hess_init},
        "num_data": work.num_data,
        "num_test": len(work.test_x),
        "num_parameters": work.num_parameters,
        "fingerprint": print_of,
        "references": _reference_rows(exact, sampled),
        "methods": [
            _row(method, choices[method.name], results[method.name], exact, sampled)
            | {"cost": costs["ratios"][method.name]}
            for method in methods
        ],
    }


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
    choice: Choice,
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
        "grid": choice.grid,
        "chosen": choice.chosen,
        "at_edge": at_edge(method, choice.chosen),
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
    mean, std = mean_and_std(values)
    return {"mean": mean, "standard_error": None if std is None else std / math.sqrt(len(values))}


def _settings(spec: TableSpec) -> dict[str, Any]:
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

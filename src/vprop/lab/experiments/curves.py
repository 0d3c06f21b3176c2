"""The paper's figures: ELBO and test log-loss against passes over the data, for every method alike."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vprop.baselines import exact_vi_logistic
from vprop.baselines.exact import Structure
from vprop.lab.environment import environment
from vprop.lab.experiments.methods import METHODS, Method
from vprop.lab.experiments.pool import Pool
from vprop.lab.experiments.problem import PROBLEMS, LogisticRegression, Problem, fingerprint, problem
from vprop.lab.experiments.run import TUNING_POINTS, Run, execute

FULL_COVARIANCE_LIMIT = 500
"""Weights up to which full-covariance methods take part: beyond, they would take most of the time."""

TUNING_SEED = 1000
"""Step sizes are chosen on a seed of their own, so that no reported run was chosen for being lucky."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    problem: str
    data: tuple[str, ...]
    batches: tuple[int | None, ...]
    seeds: int
    gradients: int
    """Gradient evaluations per run."""
    methods: tuple[str, ...]
    data_dir: Path | None = None
    points: int = 16
    fixed: dict[str, float] | None = None
    """One setting for all methods, in place of a choice from their grids."""
    decay: bool = False
    """Whether step sizes fall to zero over the second half of a run; constant otherwise."""
    id_suffix: str = ""


@dataclass(frozen=True)
class Panel:
    """One figure: a data set and a batch size."""

    task: Problem
    data: str
    batch: int | None
    methods: tuple[Method, ...]
    suffix: str = ""

    @property
    def id(self) -> str:
        """A name for files and links."""
        return f"{self.task.name}-{self.data}-{'full' if self.batch is None else f'batch{self.batch}'}{self.suffix}"

    @property
    def title(self) -> str:
        """A name for people."""
        batch = "full batch" if self.batch is None else f"mini-batches of {self.batch}"
        return f"{'Network on ' if self.task.name == 'mlp' else ''}{self.data}, {batch}"


def compare(plan: Plan, pool: Pool) -> dict[str, Any]:
    """Choose every method's step size, run it with several seeds, and gather the figures."""
    panels = [_panel(plan, data, batch) for data in plan.data for batch in plan.batches]
    base = {panel.id: _base_run(plan, panel) for panel in panels}
    grid = [
        replace(base[panel.id], method=method.name, setting=_items(setting))
        for panel in panels
        for method in panel.methods
        for setting in method.grid
        if plan.fixed is None
    ]
    title = {"logreg": "Logistic regression", "mlp": "Network"}[plan.problem]
    tuned = pool.run_all(f"{title}: step sizes", grid, execute, key=_key, cost=_cost)
    chosen: dict[tuple[str, str], dict[str, float] | None] = {}
    for panel in panels:
        for method in panel.methods:
            chosen[panel.id, method.name] = plan.fixed or _best(base[panel.id], method, tuned)
    final = {
        (panel.id, method.name, seed): replace(
            base[panel.id], method=method.name, setting=_items(setting), seed=seed, points=plan.points
        )
        for panel in panels
        for method in panel.methods
        for seed in range(plan.seeds)
        if (setting := chosen[panel.id, method.name]) is not None
    }
    results = pool.run_all(f"{title}: seeds", list(final.values()), execute, key=_key, cost=_cost)
    lines = {panel.data: exact_lines(panel.task) for panel in panels if panel.batch == plan.batches[0]}
    return {
        "experiment": plan.problem,
        "environment": environment(),
        "settings": _settings(plan),
        "panels": [
            _figure(
                panel,
                {
                    method.name: [results[_key(final[panel.id, method.name, seed])] for seed in range(plan.seeds)]
                    for method in panel.methods
                    if chosen[panel.id, method.name] is not None
                },
                chosen,
                {
                    method.name: [] if plan.fixed else _grid_scores(base[panel.id], method, tuned)
                    for method in panel.methods
                },
                lines[panel.data],
            )
            for panel in panels
        ],
    }


def _panel(plan: Plan, data: str, batch: int | None) -> Panel:
    task = problem(plan.problem, data, plan.data_dir)
    methods = tuple(m for m in METHODS if m.name in plan.methods and _takes_part(m, plan, task, batch))
    return Panel(task, data, batch, methods, plan.id_suffix)


def _takes_part(method: Method, plan: Plan, task: Problem, batch: int | None) -> bool:
    """Extras are left out of mini-batch figures, and matrices over more than a few hundred weights everywhere."""
    if (method.networks_only and plan.problem != "mlp") or (method.group == "extra" and batch is not None):
        return False
    return not method.full_covariance or sum(p.numel() for p in task.model(0).parameters()) <= FULL_COVARIANCE_LIMIT


def _base_run(plan: Plan, panel: Panel) -> Run:
    return Run(
        problem=plan.problem,
        data=panel.data,
        fingerprint=fingerprint(panel.task.data),
        batch=panel.batch,
        method="",
        setting=(),
        seed=TUNING_SEED,
        gradients=plan.gradients,
        points=0,
        decay=plan.decay,
        data_dir=plan.data_dir,
    )


def _items(setting: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(setting.items()))


def _key(run: Run) -> str:
    return run.key


def _cost(run: Run) -> float:
    """A guess in arbitrary units: overhead per gradient, more for full batches and for matrices."""
    per_gradient = 1.0 if run.batch is not None else 1.5
    if run.method.startswith(("von", "vong")):
        per_gradient *= 2 if run.problem == "logreg" else 8
    if run.method in ("cvi-10", "vogn-10"):
        per_gradient *= 2 if run.problem == "logreg" else 4
    if run.method.startswith(("rmsprop", "mc-")):
        per_gradient *= 0.5
    return run.gradients * per_gradient


def _grid_scores(base: Run, method: Method, tuned: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        setting | {"score": tuned[replace(base, method=method.name, setting=_items(setting)).key]["score"]}
        for setting in method.grid
    ]


def _best(base: Run, method: Method, tuned: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """The setting with the highest score; ``None`` if every one diverged."""
    usable = [entry for entry in _grid_scores(base, method, tuned) if entry["score"] is not None]
    if not usable:
        return None
    best = max(usable, key=lambda entry: entry["score"])
    return {name: value for name, value in best.items() if name != "score"}


def _figure(
    panel: Panel,
    runs: dict[str, list[dict[str, Any]]],
    chosen: dict[tuple[str, str], dict[str, float] | None],
    grids: dict[str, list[dict[str, Any]]],
    lines: list[dict[str, Any]],
) -> dict[str, Any]:
    methods = []
    for method in panel.methods:
        finished = runs.get(method.name, [])
        entry: dict[str, Any] = {
            "name": method.name,
            "label": method.label,
            "group": method.group,
            "samples": method.gradients,
            "grid": grids[method.name],
            "chosen": chosen[panel.id, method.name],
            "at_edge": _at_edge(method, chosen[panel.id, method.name]),
            "score_name": method.score_name,
            "seeds": [result["run"]["seed"] for result in finished],
            "passes": finished[0]["passes"] if finished else [],
            "paper_passes": finished[0]["paper_passes"] if finished else [],
            "elbo": None,
            "log_loss": over_seeds([result["log_loss"] for result in finished]),
            "seconds": statistics.fmean(result["seconds"] for result in finished) if finished else None,
        }
        if method.kind == "posterior" and finished:
            errors = over_seeds([result["elbo_error"] for result in finished])["mean"]
            entry["elbo"] = over_seeds([result["elbo"] for result in finished]) | {"standard_error": errors}
        methods.append(entry)
    return {
        "id": panel.id,
        "title": panel.title,
        "data": panel.data,
        "batch": "full" if panel.batch is None else panel.batch,
        "num_data": panel.task.num_data,
        "num_parameters": sum(p.numel() for p in panel.task.model(0).parameters()),
        "prior_precision": panel.task.prior_precision,
        "lines": lines,
        "methods": methods,
    }


def _at_edge(method: Method, chosen: dict[str, float] | None) -> bool:
    """Whether the step size is the smallest or largest that was tried, so that a wider grid might do better."""
    lrs = [setting["lr"] for setting in method.grid]
    return chosen is not None and chosen["lr"] in (min(lrs), max(lrs))


def over_seeds(curves: list[list[float | None]]) -> dict[str, list[float | None]]:
    """Mean and standard deviation over seeds, point by point; ``None`` where a run diverged."""
    mean: list[float | None] = []
    std: list[float | None] = []
    for values in zip(*curves, strict=True):
        usable = [value for value in values if value is not None]
        whole = len(usable) == len(values)
        mean.append(statistics.fmean(usable) if whole else None)
        std.append(statistics.stdev(usable) if whole and len(usable) > 1 else None)  # one seed has no spread
    return {"mean": mean, "std": std}


def exact_lines(task: Problem, structures: tuple[Structure, ...] = ("diagonal", "full")) -> list[dict[str, Any]]:
    """What the best Gaussian of each structure reaches, where that can be computed."""
    if not isinstance(task, LogisticRegression):
        return []
    lines = []
    for structure in structures:
        exact = exact_vi_logistic(task.train_x, task.data.train_y, task.prior_precision, structure)
        score = task.score(exact.mean, exact.variance if structure == "diagonal" else exact.covariance)
        label = f"exact VI, {structure}"
        lines.append(
            {
                "label": label,
                "metric": "elbo",
                "value": exact.elbo,
                "gradient_norm": exact.gradient_norm,
                "structure": structure,
            }
        )
        lines.append({"label": label, "metric": "log_loss", "value": score.log_loss, "structure": structure})
    return lines


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "seeds": plan.seeds,
        "gradient evaluations per run": plan.gradients,
        "settings tried per method": 1 if plan.fixed else len(METHODS[0].grid),
        "step sizes": f"{plan.fixed} for every method"
        if plan.fixed
        else "chosen by the mean training score at "
        + ", ".join(f"{share:.0%}" for share in TUNING_POINTS)
        + " of a run with a seed of its own",
        "threads per run": 1,
        "initial curvature per example": PROBLEMS[plan.problem].hess_init,
    }


assert len({len(method.grid) for method in METHODS}) == 1, "no method gets more tuning than another"

"""The paper's figures: ELBO and test log-loss against passes over the data, for every method alike."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vprop.baselines import exact_vi_logistic
from vprop.baselines.exact import Structure
from vprop.lab.engine.binary import PROBLEMS, BinaryProblem, LogisticRegression, problem
from vprop.lab.engine.grid import TUNING_SEED, Choice, Criterion, at_edge, choose, items, mean_and_std, repeat
from vprop.lab.engine.method import Method, Setting
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.problem import fingerprint
from vprop.lab.environment import environment
from vprop.lab.experiments.methods import METHODS
from vprop.lab.experiments.run import TUNING_POINTS, CurveRun

FULL_COVARIANCE_LIMIT = 500
"""Weights up to which full-covariance methods take part: beyond, they would take most of the time."""

SCORE = Criterion("score", lambda result: result["score"], lowest=False)


@dataclass(frozen=True)
class Figures:
    """Which figures, and how much is run for them."""

    problem: str
    data: tuple[str, ...]
    batches: tuple[int | None, ...]
    seeds: int
    gradients: int
    """Gradient evaluations per run."""
    methods: tuple[str, ...]
    data_dir: Path | None = None
    points: int = 16
    fixed: Setting | None = None
    """One setting for all methods, in place of a choice from their grids."""
    decay: bool = False
    """Whether step sizes fall to zero over the second half of a run; constant otherwise."""
    id_suffix: str = ""


@dataclass(frozen=True)
class Panel:
    """One figure: a data set and a batch size."""

    figures: Figures
    task: BinaryProblem
    data: str
    batch: int | None
    methods: tuple[Method, ...]
    fingerprint: str

    @property
    def id(self) -> str:
        """A name for files and links."""
        batch = "full" if self.batch is None else f"batch{self.batch}"
        return f"{self.task.name}-{self.data}-{batch}{self.figures.id_suffix}"

    @property
    def title(self) -> str:
        """A name for people."""
        batch = "full batch" if self.batch is None else f"mini-batches of {self.batch}"
        return f"{'Network on ' if self.task.name == 'mlp' else ''}{self.data}, {batch}"

    def run(self, method: Method, setting: Setting, seed: int, points: int) -> CurveRun:
        """A run of this figure."""
        return CurveRun(
            fingerprint=self.fingerprint,
            method=method,
            setting=items(setting),
            seed=seed,
            gradients=self.figures.gradients,
            batch=self.batch,
            schedule="second half" if self.figures.decay else "constant",
            problem=self.task.name,
            data=self.data,
            points=points,
            data_dir=self.figures.data_dir,
        )


def draw_figures(figures: Figures, pool: Pool) -> dict[str, Any]:
    """Choose every method's step size, run it with several seeds, and gather the figures."""
    panels = [_panel(figures, data, batch) for data in figures.data for batch in figures.batches]
    shown = [(panel, method) for panel in panels for method in panel.methods]
    title = {"logreg": "Logistic regression", "mlp": "Network"}[figures.problem]
    if figures.fixed is None:
        tries = {_name(*one): [one[0].run(one[1], setting, TUNING_SEED, 0) for setting in one[1].grid] for one in shown}
        choices = choose(pool, f"{title}: step sizes", tries, SCORE)
    else:
        choices = {_name(*one): Choice([], figures.fixed) for one in shown}
    final = {
        _name(panel, method): [panel.run(method, setting, seed, figures.points) for seed in range(figures.seeds)]
        if (setting := choices[_name(panel, method)].chosen) is not None
        else []
        for panel, method in shown
    }
    results = repeat(pool, f"{title}: seeds", final)
    lines = {panel.data: exact_lines(panel.task) for panel in panels if panel.batch == figures.batches[0]}
    return {
        "experiment": figures.problem,
        "environment": environment(),
        "settings": _settings(figures),
        "panels": [_figure(panel, choices, results, lines[panel.data]) for panel in panels],
    }


def _name(panel: Panel, method: Method) -> tuple[str, str]:
    return panel.id, method.name


def _panel(figures: Figures, data: str, batch: int | None) -> Panel:
    task = problem(figures.problem, data, figures.data_dir)
    methods = tuple(m for m in METHODS if m.name in figures.methods and _takes_part(m, task, batch))
    return Panel(figures, task, data, batch, methods, fingerprint(task.data))


def _takes_part(method: Method, task: BinaryProblem, batch: int | None) -> bool:
    """Extras are left out of mini-batch figures, and matrices over more than a few hundred weights everywhere."""
    if task.name not in method.problems or (method.group == "extra" and batch is not None):
        return False
    return not method.full_covariance or task.num_parameters <= FULL_COVARIANCE_LIMIT


def _figure(
    panel: Panel,
    choices: dict[tuple[str, str], Choice],
    results: dict[tuple[str, str], list[dict[str, Any]]],
    lines: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "id": panel.id,
        "title": panel.title,
        "data": panel.data,
        "batch": "full" if panel.batch is None else panel.batch,
        "num_data": panel.task.num_data,
        "num_parameters": panel.task.num_parameters,
        "prior_precision": panel.task.prior_precision,
        "lines": lines,
        "methods": [
            _curve(method, choices[_name(panel, method)], results[_name(panel, method)]) for method in panel.methods
        ],
    }


def _curve(method: Method, choice: Choice, runs: list[dict[str, Any]]) -> dict[str, Any]:
    elbo = None
    if method.kind == "posterior" and runs:
        errors = over_seeds([run["elbo_error"] for run in runs])["mean"]
        elbo = over_seeds([run["elbo"] for run in runs]) | {"standard_error": errors}
    return {
        "name": method.name,
        "label": method.label,
        "group": method.group,
        "samples": method.gradients,
        "grid": choice.grid,
        "chosen": choice.chosen,
        "at_edge": at_edge(method, choice.chosen),
        "score_name": "training ELBO" if method.kind == "posterior" else "training log joint",
        "seeds": [run["job"]["seed"] for run in runs],
        "passes": runs[0]["passes"] if runs else [],
        "paper_passes": runs[0]["paper_passes"] if runs else [],
        "elbo": elbo,
        "log_loss": over_seeds([run["log_loss"] for run in runs]),
        "seconds": statistics.fmean(run["seconds"] for run in runs) if runs else None,
    }


def over_seeds(curves: list[list[float | None]]) -> dict[str, list[float | None]]:
    """Mean and standard deviation over seeds, point by point; ``None`` where a run diverged."""
    points = [mean_and_std(values) for values in zip(*curves, strict=True)]
    return {"mean": [mean for mean, _ in points], "std": [std for _, std in points]}


def exact_lines(task: BinaryProblem, structures: tuple[Structure, ...] = ("diagonal", "full")) -> list[dict[str, Any]]:
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


def _settings(figures: Figures) -> dict[str, Any]:
    return {
        "seeds": figures.seeds,
        "gradient evaluations per run": figures.gradients,
        "settings tried per method": 1 if figures.fixed else len(METHODS[0].grid),
        "step sizes": f"{figures.fixed} for every method"
        if figures.fixed
        else "chosen by the mean training score at "
        + ", ".join(f"{share:.0%}" for share in TUNING_POINTS)
        + " of a run with a seed of its own",
        "threads per run": 1,
        "initial curvature per example": PROBLEMS[figures.problem].hess_init,
    }

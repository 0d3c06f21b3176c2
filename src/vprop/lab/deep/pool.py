"""The engine's pool for runs that are paid for by the minute: it stops in time, and one that fails stops no other."""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import torch

from vprop.lab.deep.run import OutOfTime
from vprop.lab.engine.job import Job
from vprop.lab.engine.pool import Pool, depend_on_the_parent, stop, submit
from vprop.lab.errors import Interrupted

Results = dict[str, dict[str, Any]]
MOST_TRIES = 4
"""Of a run that a GPU refuses with nothing beside it, with pauses; beside others it comes again when one is over."""
_OF_THE_MACHINE = (
    BrokenProcessPool,
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
PAUSE = 30.0
"""Seconds."""


@dataclass
class TimedPool(Pool):
    """Runs jobs in the order in which they come.

    No job is begun when the time is over, and those that are not finished then stop by themselves and keep what they
    have done. The same command goes on from there another time.

    Side by side, a job that its GPU refused comes again later, in another process; one by one it does not.
    """

    stop_at: float | None = None
    unfinished: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Tracebacks by key."""
    _processes: list[ProcessPoolExecutor] = field(default_factory=list)
    """Each of one worker, so that one that dies takes no other with it."""

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
            self._print(f"  {key}: {_summary(outcome)}")
            return {key: outcome}
        if outcome is None or isinstance(outcome, OutOfTime):
            self.unfinished.append(key)
            return {}
        self.failures[key] = "".join(traceback.format_exception(outcome))
        self._print(f"  {key} failed: {_said(outcome)}", "red")
        return {}

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def _in_turn(self, waiting: dict[str, Job]) -> Iterator[tuple[str, Any]]:
        for key, job in waiting.items():
            try:
                yield key, job.execute() if self._has_time else None
            except Exception as error:
                yield key, error

    def _side_by_side(self, waiting: dict[str, Job]) -> Iterator[tuple[str, Any]]:
        queue, refused, tries = list(waiting), list[str](), Counter[str]()
        while len(self._processes) < min(self.workers, len(queue)):  # kept for the next jobs: a start takes seconds
            self._processes.append(_process())
        free, running = list(self._processes), dict[Future[dict[str, Any]], tuple[str, ProcessPoolExecutor]]()
        try:
            while queue or running or refused:
                if not queue and not running:
                    if self._has_time:
                        sleep(max(0.0, min(PAUSE, self._time_left)))
                    queue, refused = refused, []
                while queue and free:
                    key = queue.pop(0)
                    if self._has_time:
                        future, process = self._begun(free.pop(0), waiting[key])
                        running[future] = key, process
                    else:
                        yield key, None
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key, process = running.pop(future)
                    error = future.exception()
                    if is_of_the_machine(error):
                        free.append(self._replaced(process))
                        tries[key] += not running  # beside others it is they who take the room
                        if tries[key] < MOST_TRIES:
                            refused.append(key)
                            self._print(f"  {key} comes again: {_said(error)}", "yellow")
                            continue
                    else:  # there is room for one again, or for more
                        free.append(process)
                        queue, refused = queue + refused[:2], refused[2:]
                    yield key, future.result() if error is None else error
        except BaseException:
            for process in self._processes:
                stop(process)
            self._processes.clear()
            raise

    def _begun(self, process: ProcessPoolExecutor, job: Job) -> tuple[Future[dict[str, Any]], ProcessPoolExecutor]:
        """In this process, or in a new one if it has died while it had nothing to do."""
        try:
            return submit(process, job), process
        except BrokenProcessPool:
            process = self._replaced(process)
            return submit(process, job), process

    def _replaced(self, process: ProcessPoolExecutor) -> ProcessPoolExecutor:
        """A new one: after an error of a GPU a process has no other answer, and would fail all jobs that are left."""
        stop(process)  # at once, for it still has its memory on the GPU
        self._processes.remove(process)
        self._processes.append(_process())
        return self._processes[-1]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.shutdown()
        self._processes.clear()

    @property
    def _time_left(self) -> float:
        return math.inf if self.stop_at is None else self.stop_at - time.time()

    @property
    def _has_time(self) -> bool:
        return self._time_left > 0


def _process() -> ProcessPoolExecutor:
    """A worker, which is started with its first job."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=depend_on_the_parent)


def is_of_the_machine(error: BaseException | None) -> bool:
    """Whether a job that failed may do better another time: a GPU was full or not to be had, or its process was ended.

    >>> is_of_the_machine(torch.OutOfMemoryError("CUDA out of memory")), is_of_the_machine(RuntimeError("no"))
    (True, False)
    """
    if isinstance(error, _OF_THE_MACHINE):
        return True
    return isinstance(error, RuntimeError) and ("CUBLAS_STATUS" in str(error) or "CUDNN_STATUS" in str(error))


def _said(error: BaseException | None) -> str:
    """Its name and its first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


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

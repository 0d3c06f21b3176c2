"""Many jobs on all cores: what is in the store is not run again, what finishes is stored at once.

An interrupt keeps what is finished; the same command goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vprop.lab.engine.job import Job
from vprop.lab.engine.store import Store
from vprop.lab.errors import Interrupted, LabError


@dataclass
class Pool:
    """Runs jobs, shows how far it is, and knows what was run before."""

    store: Store
    console: Console
    workers: int = 0
    """Processes; 0 for one per core."""

    def run_all(self, title: str, jobs: Sequence[Job], anew: bool = False) -> dict[str, dict[str, Any]]:
        """The results of all jobs by key; ``anew`` also of those that were done before, whose results are replaced."""
        done: dict[str, dict[str, Any]] = {}
        waiting: dict[str, Job] = {}
        for job in jobs:
            stored = None if anew else self.store.load(job.key)
            if stored is None:
                waiting[job.key] = job
            else:
                done[job.key] = stored
        if done:
            self.console.print(f"{title}: {len(done)} of {len(done) + len(waiting)} runs were done before.")
        if waiting:
            done.update(self._run_waiting(title, waiting))
        return done

    def _run_waiting(self, title: str, waiting: dict[str, Job]) -> dict[str, dict[str, Any]]:
        done: dict[str, dict[str, Any]] = {}
        # Long ones first, so that no core waits for a straggler at the end.
        order = sorted(waiting, key=lambda name: -waiting[name].effort)
        executor = ProcessPoolExecutor(
            max_workers=min(self.workers or os.cpu_count() or 1, len(waiting)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=depend_on_the_parent,
        )
        with _progress(self.console) as progress:
            total = sum(job.effort for job in waiting.values())
            bar = progress.add_task(title, total=total, finished=0, all=len(waiting))
            try:
                futures = {submit(executor, waiting[name]): name for name in order}
                for future in as_completed(futures):
                    name = futures[future]
                    done[name] = future.result()
                    self.store.save(name, done[name])
                    progress.update(bar, advance=waiting[name].effort, finished=len(done))
            except (KeyboardInterrupt, BrokenProcessPool) as error:
                stop(executor)
                kept = (
                    f"{len(done)} of {len(waiting)} runs of «{title}» were finished and are kept; the same command "
                    "goes on from there."
                )
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted(f"Interrupted. {kept}") from None
                raise LabError(
                    f"A worker process was ended from outside, for lack of memory perhaps. {kept} Fewer --workers need "
                    "less memory."
                ) from None
            except BaseException:
                stop(executor)
                raise
        executor.shutdown()
        return done


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.fields[finished]}/{task.fields[all]} runs"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, speed_estimate_period=600)


def submit(executor: ProcessPoolExecutor, job: Job) -> Future[dict[str, Any]]:
    """Hand a job to the workers, one of which may be started for it.

    A process has the blocked signals of the one that starts it. So an interrupt does not reach a worker that is still
    importing, which would show a traceback, and the parent gets it right after.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return executor.submit(job.execute)
    resource_tracker.ensure_running()  # a process beside the workers; its start would let interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(job.execute)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(executor: ProcessPoolExecutor) -> None:
    """End the workers now; what they were at is lost."""
    processes = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def depend_on_the_parent() -> None:
    """In a worker: interrupts are left to the parent; and when that is gone, however it died, the worker ends.

    A run takes an hour, and nobody would be there to take its result.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

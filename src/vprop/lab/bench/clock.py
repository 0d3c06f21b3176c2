"""How time is taken.

On a CPU: a clock before and after each call. On a GPU there are two times. *device* is what the GPU is busy for: a
pause is queued first, so that Python runs ahead and the calls lie back to back in the queue, with events between
them. *wall* is what a loop of calls takes until all is done, Python included. Where a call is longer than Python
needs to queue it, the two agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

Call = Callable[[], object]

BLOCK_SECONDS = 0.02
"""What calls of one contender in a row should take, before it is another one's turn."""
MOST_CALLS = 200
LONGEST_PAUSE = 0.05
CYCLES_PER_SECOND = 2e9
"""About what a GPU does; a pause that is a little too long does no harm."""


@dataclass(frozen=True)
class Spread:
    """Seconds per call: median, quartiles, and the least, which on a busy machine says more."""

    median: float
    low: float
    high: float
    least: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of repeated measurements.

        >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0, least=1.0, count=5)
        """
        several = values if len(values) > 1 else [*values, *values]
        low, median, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, low, high, min(values), len(values))

    def minus(self, seconds: float) -> Spread:
        """What is left when something is not counted; not below zero."""
        left = (max(0.0, value - seconds) for value in (self.median, self.low, self.high, self.least))
        median, low, high, least = left
        return Spread(median, low, high, least, self.count)

    def as_json(self) -> dict[str, float]:
        """For the result file."""
        return asdict(self)


class Clock:
    """A stopwatch for one device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def once(self, call: Call) -> float:
        """Seconds of one call, until all is done."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def wall(self, call: Call, repeats: int) -> float:
        """Seconds per call of a loop, until all is done."""
        self.wait()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return (time.perf_counter() - started) / repeats

    def stages(self, calls: Sequence[Call], repeats: int, pause: float = 0.0) -> list[list[float]]:
        """Seconds of each call, a row per repeat; the calls of a row run one after the other."""
        return self._gpu_stages(calls, repeats, pause) if self.on_gpu else self._cpu_stages(calls, repeats)

    def _cpu_stages(self, calls: Sequence[Call], repeats: int) -> list[list[float]]:
        rows = []
        for _ in range(repeats):
            stamps = [time.perf_counter()]
            for call in calls:
                call()
                stamps.append(time.perf_counter())
            rows.append([end - start for start, end in pairwise(stamps)])
        return rows

    def _gpu_stages(self, calls: Sequence[Call], repeats: int, pause: float) -> list[list[float]]:
        self.wait()
        rows = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(repeats)]
        sleep = getattr(torch.cuda, "_sleep", None)
        if sleep is not None and pause > 0:
            sleep(int(min(pause, LONGEST_PAUSE) * CYCLES_PER_SECOND))
        for row in rows:
            row[0].record()
            for call, event in zip(calls, row[1:], strict=True):
                call()
                event.record()
        self.wait()
        return [[a.elapsed_time(b) / 1000 for a, b in pairwise(row)] for row in rows]


@dataclass
class Runner:
    """Something to be timed, with what was measured so far."""

    stages: dict[str, Call]
    seconds: float
    """Roughly what a call takes."""
    times: dict[str, list[float]]
    walls: list[float]

    @classmethod
    def warmed_up(cls, stages: dict[str, Call], clock: Clock, slow: float) -> Runner:
        """After a few calls: the first ones make state, caches and compiled code. Fewer if it is slow even then."""
        runner = cls(stages, 0.0, {name: [] for name in stages}, [])
        for attempt in range(3):
            runner.seconds = clock.once(runner.call)
            if attempt > 0 and runner.seconds > slow:
                break
        return runner

    def call(self) -> None:
        """All stages once."""
        for stage in self.stages.values():
            stage()

    def measure(self, clock: Clock, block: float = BLOCK_SECONDS) -> None:
        """One more block of calls, of about ``block`` seconds."""
        repeats = max(1, min(MOST_CALLS, int(block / max(self.seconds, 1e-9))))
        for row in clock.stages(list(self.stages.values()), repeats, pause=self.seconds * repeats):
            for name, seconds in zip(self.stages, row, strict=True):
                self.times[name].append(seconds)
        if clock.on_gpu:
            self.walls.append(clock.wall(self.call, repeats))

    def spread(self, name: str) -> Spread:
        """Of one stage."""
        return Spread.of(self.times[name])

    @property
    def wall(self) -> Spread | None:
        """Of all stages together, until the device is done; only where that is another time."""
        return Spread.of(self.walls) if self.walls else None


def in_turns(runners: Sequence[Runner], clock: Clock, budget: float, least: int = 3, most: int = 50) -> None:
    """Measure in rounds, so that all meet the same weather; until ``budget`` seconds are over."""
    block = min(BLOCK_SECONDS, budget / least / len(runners))
    started = time.perf_counter()
    for round_number in range(most):
        for runner in runners:
            runner.measure(clock, block)
        if round_number + 1 >= least and time.perf_counter() - started > budget:
            break

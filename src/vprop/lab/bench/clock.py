"""How time is taken: by a clock on a CPU, by events between the calls on a GPU.

On a GPU that is the time of the device where a call is longer than Python needs to queue it, and the time of Python
where it is shorter: what a loop of such calls takes. The first call of a block, which the device waits for, does not
count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], object]
Report = Callable[[str], None]
"""Is told what is being measured."""

BLOCK_SECONDS = 0.02
"""What calls of one contender in a row should take, before it is another one's turn."""
MOST_CALLS, LEAST_ROUNDS, MOST_ROUNDS = 200, 3, 50


def spread(values: Sequence[float]) -> dict[str, float]:
    """Seconds per call: median, quartiles, and the least, which on a busy machine says more.

    >>> spread([4.0, 1.0, 2.0, 3.0, 5.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0, 'least': 1.0, 'count': 5}
    """
    several = values if len(values) > 1 else [*values, *values]
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "least": min(values), "count": len(values)}


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(call: Call, repeats: int, device: torch.device) -> float:
    """Of a loop, until all is done."""
    wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - started) / repeats


def stage_seconds(calls: Sequence[Call], repeats: int, device: torch.device) -> list[list[float]]:
    """Seconds of each call, a row per repeat; the calls of a row run one after the other."""
    on_gpu = device.type == "cuda"
    wait(device)
    rows = []
    for _ in range(repeats + on_gpu):
        row = [_stamp(on_gpu)]
        for call in calls:
            call()
            row.append(_stamp(on_gpu))
        rows.append(row)
    wait(device)
    if on_gpu:
        return [[a.elapsed_time(b) / 1000 for a, b in pairwise(row)] for row in rows[1:]]
    return [[b - a for a, b in pairwise(row)] for row in rows]


def _stamp(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Runner:
    """Something to be timed, with what was measured so far."""

    def __init__(self, stages: dict[str, Call], device: torch.device) -> None:
        self.stages, self.device = stages, device
        self.times: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(3):  # the first calls make state, caches and compiled code
            self.seconds = seconds_per_call(self._call, 1, device)

    def _call(self) -> None:
        for stage in self.stages.values():
            stage()

    def measure(self, block: float) -> None:
        """One more block of calls, of about ``block`` seconds."""
        repeats = max(1, min(MOST_CALLS, int(block / max(self.seconds, 1e-9))))
        for row in stage_seconds(list(self.stages.values()), repeats, self.device):
            for name, seconds in zip(self.stages, row, strict=True):
                self.times[name].append(seconds)


def in_turns(runners: Sequence[Runner], budget: float) -> None:
    """Measure in rounds, so that all meet the same weather; until ``budget`` seconds are over."""
    block = min(BLOCK_SECONDS, budget / LEAST_ROUNDS / len(runners))
    started = time.perf_counter()
    for number in range(1, MOST_ROUNDS + 1):
        for runner in runners:
            runner.measure(block)
        if number >= LEAST_ROUNDS and time.perf_counter() - started > budget:
            break

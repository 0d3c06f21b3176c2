"""Long runs: neither memory nor the time of a step grows with the number of steps."""

from __future__ import annotations

import gc
import os
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vprop import Vprop
from vprop.lab.environment import one_thread

STEPS = 20_000
WARM_UP = 2_000
"""After these everything that is made once is there: the state, compiled code, caches."""
PORTABLE, FUSED = {"fused": False, "foreach": False}, {"fused": True}


def closure_loop(optimizer: Vprop, model: nn.Module, loss: Callable) -> Callable[[], None]:
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return lambda: optimizer.step(closure)


def context_loop(optimizer: Vprop, model: nn.Module, loss: Callable) -> Callable[[], None]:
    def step():
        optimizer.zero_grad()
        with optimizer.sampled_params():
            loss().backward()
        optimizer.step()

    return step


def attached_loop(optimizer: Vprop, model: nn.Module, loss: Callable) -> Callable[[], None]:
    optimizer.attach(model)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS = {"closure": closure_loop, "context": context_loop, "attach": attached_loop}


def make_step(loop: str, implementation: dict[str, bool]) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.arange(8) % 3
    model = nn.Linear(4, 3, bias=False)
    optimizer = Vprop(model.parameters(), lr=0.01, num_data=8, **implementation)
    return LOOPS[loop](optimizer, model, lambda: F.cross_entropy(model(x), y))


def resident_bytes() -> int:
    """The memory that the process has now, of whatever kind; 0 on systems that do not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def python_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [PORTABLE, FUSED], ids=["portable", "fused"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_long_run_is_flat(loop, implementation):
    """Objects, resident memory and the time of a step, at the end against the time after the warm-up.

    The bounds are what a leak of the smallest kind would make of the 16,000 steps between: a hundredth of one object a
    step; 64 bytes a step, in both halves (a leak is in each, while the allocator takes two megabytes more once, at some
    time, also for code that keeps nothing); and a step that is 15 % longer, where a list of all steps that each of them
    walks through (10 ns an entry) costs 20 to 40 %. Of the times the fastest tenth counts: what else the machine does
    makes steps slower, and not always equally.
    """
    step = make_step(loop, implementation)
    times = array("d", bytes(8 * STEPS))  # takes its memory at once, and no object for each number
    objects, resident = 0, []
    steps_between = STEPS - 2 * WARM_UP
    with one_thread():  # more of them make the times of small operations noisy
        for i in range(STEPS):
            if i == 2 * WARM_UP:
                objects = python_objects()
            if i in (2 * WARM_UP, 2 * WARM_UP + steps_between // 2):
                resident.append(resident_bytes())
            start = time.perf_counter()
            step()
            times[i] = time.perf_counter() - start
    resident.append(resident_bytes())
    assert python_objects() - objects < steps_between / 100
    assert min(resident[1] - resident[0], resident[2] - resident[1]) < 64 * steps_between // 2
    early, late = (statistics.quantiles(part, n=10)[0] for part in (times[WARM_UP : 2 * WARM_UP], times[-WARM_UP:]))
    assert late < 1.15 * early, f"a step took {early * 1e6:.0f} µs at first and {late * 1e6:.0f} µs in the end"


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [PORTABLE, FUSED], ids=["portable", "fused"])
@pytest.mark.parametrize("loop", LOOPS)
def test_python_allocates_nothing_for_good(loop, implementation):
    """What tracemalloc counts, which is exact but slow, so over fewer steps.

    The smallest object has 16 bytes: half of that for each step is the bound. Torch keeps some objects for reuse, and
    those from before the count began are replaced by counted ones: some kilobytes in the first thousand steps.
    """
    step, steps = make_step(loop, implementation), 1_500
    tracemalloc.start()
    try:
        for _ in range(steps):
            step()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(steps):
            step()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 8 * steps
    finally:
        tracemalloc.stop()

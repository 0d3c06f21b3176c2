"""`vprop bench memory`: what a contender needs beyond weights and gradients, in units of the parameters' size.

On a GPU the allocator tells. On a CPU every contender gets a process of its own, which first makes a few steps on small
tensors, so that the code that is loaded then does not count, and then reads its resident memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from vprop.lab.bench.clock import Report
from vprop.lab.bench.contenders import Contender, by_name
from vprop.lab.bench.errors import BenchError, Unavailable
from vprop.lab.bench.step import clean_up
from vprop.lab.bench.tensors import Tensors

WARM_UP = 200_000
"""Parameters of the first steps in a process: enough for torch to start its threads."""
SMALL = 2e6
"""Parameters up to which processes of several contenders fit into the memory side by side."""
CALLS = 3
GIVE_BACK_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""For the C library: freed memory goes back to the system, so that what is resident is what is used."""


class GpuMeter:
    """What torch's allocator handed out."""

    def now(self) -> int:
        """Bytes in use."""
        gc.collect()
        return torch.cuda.memory_allocated()

    def reset(self) -> None:
        """Forget the peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes in use since then."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class ResidentMeter:
    """Resident memory of this process, as Linux tells."""

    def now(self) -> int:
        """Bytes in use."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return self._status("VmRSS")

    def reset(self) -> None:
        """Forget the peak."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Most bytes in use since then."""
        return self._status("VmHWM")

    def _status(self, key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def extra(contender: Contender, tensors: Tensors, meter: GpuMeter | ResidentMeter) -> dict[str, float]:
    """Parameter-sizes beyond weights and gradients: between two steps, and at most in a step."""
    base = meter.now()
    stages = contender.ready(tensors)
    meter.reset()
    for _ in range(CALLS):
        for stage in stages.values():
            stage()
    peak = meter.peak() - base
    steady = meter.now() - base
    return {
        name: size / (4 * tensors.numel) - contender.own_copies for name, size in (("steady", steady), ("peak", peak))
    }


def measure(
    chosen: Sequence[Contender], params: float, tensors: int, device: torch.device, report: Report
) -> list[dict[str, Any]]:
    """A row for each contender."""
    if device.type == "cpu" and sys.platform != "linux":
        raise BenchError("--device cpu: how much memory a process needs is read from /proc, which only Linux has.")

    def row(contender: Contender) -> dict[str, Any]:
        report(contender.name)
        try:
            if device.type == "cuda":
                found = extra(contender, Tensors(params, tensors, device), GpuMeter())
            else:
                found = in_a_process(contender.name, params, tensors)
            return {"name": contender.name, "available": True} | found
        except Unavailable as reason:
            return {"name": contender.name, "available": False, "reason": str(reason)}
        finally:
            clean_up()

    if device.type == "cuda" or params > SMALL:
        return [row(contender) for contender in chosen]
    # Starting a process takes seconds, and what is resident in one says nothing of the others.
    with ThreadPoolExecutor(os.cpu_count() or 1) as side_by_side:
        return list(side_by_side.map(row, chosen))


def in_a_process(name: str, params: float, tensors: int) -> dict[str, float]:
    """What a contender needs, measured where nothing else was done before."""
    os.environ.update(GIVE_BACK_AT_ONCE)  # read when a process starts, so this one does not change
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(_resident, name, params, tensors, torch.get_num_threads()).result()
        except BrokenProcessPool as error:
            raise Unavailable("its process was ended: too little memory?") from error


def _resident(name: str, params: float, tensors: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    return measure_resident(by_name(name), params, tensors)


def measure_resident(contender: Contender, params: float, tensors: int) -> dict[str, float]:
    """What the process of one contender does; it must have done nothing else before."""
    device = torch.device("cpu")
    small = Tensors(WARM_UP, 2, device)
    stages = contender.ready(small)
    for _ in range(2):
        for stage in stages.values():
            stage()
    del stages, small
    return extra(contender, Tensors(params, tensors, device), ResidentMeter())

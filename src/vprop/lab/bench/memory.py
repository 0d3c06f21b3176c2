"""`vprop bench memory`: what a contender needs beyond weights and gradients, in units of the parameters' size.

On a GPU the allocator tells. On a CPU every contender gets a process of its own, which first makes a few steps on small
tensors, so that the code that is loaded then does not count, and then reads its resident memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from vprop.lab.bench.contenders import Contender, by_name
from vprop.lab.bench.errors import Unavailable
from vprop.lab.bench.step import Plan, clean_up, describe
from vprop.lab.bench.tensors import Tensors

WARM_UP = 200_000
"""Parameters of the first steps in a process: enough for torch to start its threads."""
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
    """Resident memory of this process, as Linux tells; elsewhere its peak since the start is all there is."""

    def now(self) -> int:
        """Bytes in use."""
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        return self._status("VmRSS")

    def reset(self) -> None:
        """Forget the peak, where that can be done."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def peak(self) -> int:
        """Most bytes in use since then."""
        return self._status("VmHWM")

    def _status(self, key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def extra(contender: Contender, tensors: Tensors, meter: GpuMeter | ResidentMeter) -> dict[str, Any]:
    """Parameter-sizes beyond weights and gradients: between two steps, and at most in each stage of a step."""
    base = meter.now()
    unit = 4 * tensors.numel
    own = contender.own_copies
    meter.reset()
    ready = contender.ready(tensors)
    first = meter.peak() - base
    peaks = dict.fromkeys(ready.stages, 0)
    for _ in range(CALLS):
        for name, stage in ready.stages.items():
            meter.reset()
            stage()
            peaks[name] = max(peaks[name], meter.peak() - base)
    steady = meter.now() - base
    return {
        "steady": steady / unit - own,
        "peak": max(peaks.values()) / unit - own,
        "peaks": {name: peak / unit - own for name, peak in peaks.items()},
        "first_step_peak": first / unit - own,
    }


def measure(chosen: list[Contender], params: float, tensors: int, plan: Plan, rows: list[dict[str, Any]]) -> None:
    """Add a row for each contender to ``rows``."""
    for contender in chosen:
        plan.report(contender.name)
        row = describe(contender)
        if contender.note:
            row["note"] = contender.note
        try:
            if plan.device.type == "cuda":
                found = extra(contender, Tensors(params, tensors, plan.device), GpuMeter())
            else:
                found = _in_a_process(contender, params, tensors)
            rows.append(row | {"available": True} | found)
        except Unavailable as reason:
            rows.append(row | {"available": False, "reason": str(reason)})
        clean_up()


def _in_a_process(contender: Contender, params: float, tensors: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "vprop.lab.bench.memory"]
    arguments = [contender.name, str(params), str(tensors), str(torch.get_num_threads())]
    done = subprocess.run([*command, *arguments], env=child_environment(), capture_output=True, text=True)
    if done.returncode < 0:
        raise Unavailable(f"its process was ended by signal {-done.returncode}: too little memory?")
    if done.returncode > 0:
        raise Unavailable(f"its process failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "reason" in found:
        raise Unavailable(found["reason"])
    return found


def child_environment() -> dict[str, str]:
    """Of a process that measures: it finds what this one finds, and gives memory back at once."""
    return os.environ | GIVE_BACK_AT_ONCE | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def measure_resident(contender: Contender, params: float, tensors: int) -> dict[str, Any]:
    """What the process of one contender does; it must have done nothing else before."""
    device = torch.device("cpu")
    small = Tensors(WARM_UP, 2, device)
    ready = contender.ready(small)
    for _ in range(2):
        for stage in ready.stages.values():
            stage()
    del ready, small
    return extra(contender, Tensors(params, tensors, device), ResidentMeter())


def main(name: str, params: str, tensors: str, threads: str) -> None:
    """The process of one contender: prints one line of JSON."""
    torch.set_num_threads(int(threads))
    try:
        found = measure_resident(by_name(name), float(params), int(tensors))
    except Unavailable as reason:
        found = {"reason": str(reason)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

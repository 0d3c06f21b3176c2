"""Samples and steps on the CPU: ``cpu.c``, compiled when the package is built, called through ctypes.

There is one library for each instruction set, and the one that torch itself would choose is loaded. Without any, or
with the environment variable ``VPROP_NO_KERNELS=1``, :func:`available` says no, and the portable code does the work.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vprop.kernels.call import Noise, Step
from vprop.kernels.table import TILE, Column, Role, Table, tiles_of

INSTRUCTION_SETS = ("avx512", "avx2", "default")
"""Best first."""

FEWEST_ELEMENTS = 2**18
"""Below this other threads are not worth waking."""

_SHARES = 8
"""Of each thread, so that a fast one can take more."""

_TILE_COST = 256
"""What the start of a tile costs, in elements: rows can be tiny."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> bool:
    """Whether there is a compiled library, and the environment does not forbid it (``VPROP_NO_KERNELS=1``)."""
    return os.environ.get("VPROP_NO_KERNELS", "0") in ("", "0") and _library() is not None


def perturb(table: Table, noise: Noise, direction: int) -> None:
    """Write a sample into the weights (``direction`` 1), or take it out again (−1)."""
    _chosen().perturb(table, noise, direction)


def step(table: Table, step: Step) -> None:
    """One update of mean and curvature; ``table.unusable`` and ``table.clipped`` are added to."""
    _chosen().step(table, step)


def normal(out: Tensor, start: int, *, seed: int, parameter: int, step: int | Tensor, source: int) -> None:
    """Fill ``out`` (1-d, contiguous, float32) with the normals of a parameter's elements from ``start`` on."""
    _chosen().normal(out, start, seed=seed, parameter=parameter, step=step, source=source)


class _Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_void_p),
        ("geometry", ctypes.c_void_p),
        ("dims", ctypes.c_int64),
        ("steps", ctypes.c_void_p),
        ("floors", ctypes.c_void_p),
        ("first_step", ctypes.c_int64),
        ("types", ctypes.c_int32 * len(Role)),
    )


class _Noise(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("source", ctypes.c_uint32),
        ("sign", ctypes.c_int32),
        ("ess", ctypes.c_double),
        ("damping", ctypes.c_double),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("noise", _Noise),
        ("sampled", ctypes.c_int32),
        ("curvature", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("grad_sign", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("clip_radius", ctypes.c_double),
        ("start_weight", ctypes.c_double),
        ("gradient_scale", ctypes.c_double),
    )


_Counts = ctypes.c_int64 * 2

LAYOUT = 5 + (ctypes.sizeof(_Step) << 16) + (ctypes.sizeof(_Table) << 32)
"""As ``layout()`` in ``cpu.c``: a library of other sources would read these structures wrongly."""


class Library:
    """The functions of one compiled file."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        _check_layout(library, path)
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._perturb = library.perturb
        self._perturb.argtypes, self._perturb.restype = [pointer, pointer, int32, int64, int64], None
        self._step = library.step
        self._step.argtypes, self._step.restype = [pointer, pointer, int64, int64, pointer], None
        self._normal = library.normal
        self._normal.argtypes = [pointer, int64, int64, int64, int64, ctypes.c_uint32, ctypes.c_uint64]
        self._normal.restype = None

    def perturb(self, table: Table, noise: Noise, direction: int) -> None:
        """See :func:`perturb`."""
        addresses, how = ctypes.byref(_table(table)), ctypes.byref(_noise(noise))
        if _is_small(table):
            self._perturb(addresses, how, direction, 0, table.tiles)
            return
        shares = _shares(table, torch.get_num_threads())
        _in_parallel([functools.partial(self._perturb, addresses, how, direction, low, high) for low, high in shares])

    def step(self, table: Table, step: Step) -> None:
        """See :func:`step`."""
        addresses, how = ctypes.byref(_table(table)), ctypes.byref(_step(step))
        if _is_small(table):
            counts = [_Counts()]
            self._step(addresses, how, 0, table.tiles, ctypes.byref(counts[0]))
        else:
            shares = _shares(table, torch.get_num_threads())
            counts = [_Counts() for _ in shares]
            _in_parallel(
                [
                    functools.partial(self._step, addresses, how, low, high, ctypes.byref(own))
                    for (low, high), own in zip(shares, counts, strict=True)
                ]
            )
        for unusable, clipped in counts:
            if unusable:
                table.unusable += unusable
            if clipped:
                table.clipped += clipped

    def normal(self, out: Tensor, start: int, *, seed: int, parameter: int, step: int | Tensor, source: int) -> None:
        """See :func:`normal`."""
        count, threads, word = out.numel(), torch.get_num_threads(), int(step)
        if threads == 1 or count < FEWEST_ELEMENTS:
            self._normal(out.data_ptr(), start, count, parameter, word, source, seed)
            return
        parts = _SHARES * threads
        bounds = [count * part // parts for part in range(parts + 1)]
        _in_parallel(
            [
                functools.partial(
                    self._normal, out.data_ptr() + 4 * low, start + low, high - low, parameter, word, source, seed
                )
                for low, high in itertools.pairwise(bounds)
            ]
        )


def _check_layout(library: ctypes.CDLL, path: Path) -> None:
    """Refuse a library that was compiled from other sources than this file goes with."""
    layout = getattr(library, "layout", None)
    if layout is not None:
        layout.restype = ctypes.c_int64
    if layout is None or layout() != LAYOUT:
        raise RuntimeError(
            f"{path} was compiled from another version of vprop's sources. Compile it again, with the command that "
            "installed vprop (pip install -e .), or set VPROP_NO_KERNELS=1 to do without."
        )


def _chosen() -> Library:
    library = _library()
    if library is None:
        raise RuntimeError("vprop was built without its compiled CPU kernels.")
    return library


@functools.cache
def _library() -> Library | None:
    """The best library that is here and that the processor can run; torch's own choice can be lowered, too."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    first = INSTRUCTION_SETS.index(capability) if capability in INSTRUCTION_SETS else len(INSTRUCTION_SETS) - 1
    for name in INSTRUCTION_SETS[first:]:
        try:
            return Library(path_of(name))
        except OSError:
            continue
    return None


def path_of(instruction_set: str) -> Path:
    """Where the library for an instruction set is, if there is one."""
    return Path(__file__).with_name(f"_cpu_{instruction_set}.so")


def _table(table: Table) -> _Table:
    """The table as the library reads it, kept with it: only what differs from step to step is written anew."""
    kept = table.for_backend
    if kept is None:
        geometry = table.geometry
        kept = table.for_backend = _Table(
            table.rows,
            table.columns.data_ptr(),
            None if geometry is None else geometry.data_ptr(),
            table.dims,
            table.steps.data_ptr(),
            table.floors.data_ptr(),
            0,
            tuple(_TYPES[table.dtypes[role]] for role in Role),
        )
    kept.first_step = table.first_step
    return kept


def _noise(noise: Noise) -> _Noise:
    return _Noise(noise.seed, noise.source, noise.sign, noise.ess, noise.damping)


def _step(step: Step) -> _Step:
    return _Step(
        _noise(step.noise),
        step.sampled,
        step.curvature,
        step.rule,
        step.grad_sign,
        step.scale,
        float(step.lr),
        *step.betas,
        step.clip_radius,
        step.start_weight,
        step.gradient_scale,
    )


# -- threads -------------------------------------------------------------------------------------------------------

Share = tuple[int, int]
"""Tiles from the first number up to the second."""

_shares_of: WeakKeyDictionary[Table, tuple[int, list[Share]]] = WeakKeyDictionary()


def _is_small(table: Table) -> bool:
    """Whether one thread does all the work."""
    return table.tiles * (TILE + _TILE_COST) < FEWEST_ELEMENTS or torch.get_num_threads() == 1


def _shares(table: Table, threads: int) -> list[Share]:
    """The tiles in shares; kept with the table, because its sizes do not change."""
    known = _shares_of.get(table)
    if known is None or known[0] != threads:
        known = _shares_of[table] = threads, _divided(table.columns[Column.SIZE].tolist(), threads)
    return known[1]


def _divided(sizes: Sequence[int], threads: int) -> list[Share]:
    """Runs of tiles that cost about the same."""
    costs = [size + _TILE_COST * tiles_of(size) for size in sizes]
    total = sum(costs)
    parts = _SHARES * threads if total >= FEWEST_ELEMENTS else 1
    bounds, tile, cost_so_far = [0], 0, 0
    for size, cost in zip(sizes, costs, strict=True):
        tiles = tiles_of(size)
        while len(bounds) < parts and cost_so_far + cost > total * len(bounds) / parts:
            bounds.append(tile + round(tiles * (total * len(bounds) / parts - cost_so_far) / cost))
        tile, cost_so_far = tile + tiles, cost_so_far + cost
    bounds.append(tile)
    return list(itertools.pairwise(bounds))


def _in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """All calls, by as many threads as torch may use, each taking the next one when it is free.

    Fixed shares would wait for the slowest core. ctypes lets go of the interpreter while a call runs.
    """
    waiting = deque(calls)

    def work() -> None:
        while waiting:
            try:
                call = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            call()

    pending: list[Future[None]] = []
    try:
        if len(calls) > 1:
            workers = torch.get_num_threads() - 1
            pool = _pool(os.getpid(), workers)
            pending = [pool.submit(work) for _ in range(min(workers, len(calls) - 1))]
        work()
    except BaseException:
        work()  # half of a sample in the weights would be worse than waiting a little for an interrupt
        raise
    finally:
        waiting.clear()
        pending = [future for future in pending if not future.cancel()]
        # Tensors may go as soon as this returns, so an interrupt waits, too.
        try:
            wait(pending)
        except BaseException:
            wait(pending)
            raise
    for future in pending:
        future.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process: those of the process that it was forked from are not in it."""
    return ThreadPoolExecutor(workers, thread_name_prefix="vprop")

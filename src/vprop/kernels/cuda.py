"""Launches the Triton kernels."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from vprop.kernels.call import Noise, Step
from vprop.kernels.table import COMPUTE, COUNTERS, TILE, Role, Table
from vprop.kernels.triton_diagonal import perturb_kernel, step_kernel
from vprop.kernels.triton_noise import fill_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on tensors of the CPU: for tests without a GPU."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BLOCK, _SMALL_BLOCK = 1024, 512
"""Elements of a program; fewer where each has more numbers to hold."""
_OPTIONS = {"num_warps": 4, "maxnreg": 64, "enable_fp_fusion": False}
"""``maxnreg`` leaves room for enough programs to hide the latency of memory."""
_SMALL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def perturb(table: Table, noise: Noise, direction: int) -> None:
    """Write a sample into the weights (``direction`` 1), or take it out again (−1)."""
    if table.tiles == 0:
        return
    with _on(table.device):
        perturb_kernel[(table.tiles * (TILE // _BLOCK),)](
            *_tensors(table),
            *_numbers(table, noise),
            RESTORE=direction < 0,
            **_flags(table, _BLOCK),
            **_OPTIONS,
        )


def step(table: Table, step: Step) -> None:
    """One update of all rows of the table; elements left out and clipped are counted there."""
    if table.tiles == 0:
        return
    noise, (beta1, beta2) = step.noise, step.betas
    unusable = table.unusable.new_zeros(COUNTERS, dtype=torch.int32) if INTERPRETED else table.unusable
    lr_on_device = isinstance(step.lr, Tensor) and step.lr.device == table.device
    block, options = (_SMALL_BLOCK, _SMALL_OPTIONS) if Role.MOMENTUM in table.roles else (_BLOCK, _OPTIONS)
    with _on(table.device):
        step_kernel[(table.tiles * (TILE // block),)](
            *_tensors(table),
            unusable,
            table.clipped,
            *_numbers(table, noise),
            step.scale,
            step.lr if lr_on_device else float(step.lr),
            1 - beta1,
            1 - beta2,
            _log(beta1),
            _log(beta2),
            step.clip_radius,
            float(step.grad_sign),
            float(step.start_weight),
            1 / step.gradient_scale,
            SAMPLED=step.sampled,
            CURVATURE=int(step.curvature),
            RULE=int(step.rule),
            CLIPS=step.clips,
            FORGETS=step.start_weight != 1,
            LR_ON_DEVICE=lr_on_device,
            GRAD_DTYPE=_TYPES[table.dtypes[Role.GRAD]],
            MOMENTUM_DTYPE=_TYPES[table.dtypes[Role.MOMENTUM]],
            STAND_IN=_stand_in(table),
            HAS_MOMENTUM=Role.MOMENTUM in table.roles,
            HAS_PRIOR_MEAN=Role.PRIOR_MEAN in table.roles,
            **_flags(table, block),
            **options,
        )
    if INTERPRETED:
        table.unusable += unusable.sum()


def normal(out: Tensor, start: int, *, seed: int, parameter: int, step: int | Tensor, source: int) -> None:
    """Fill ``out``, contiguous float32, with the normals of elements ``start``, ``start + 1``, …"""
    if out.numel() == 0:
        return
    blocks = 256
    on_device = isinstance(step, Tensor)
    with _on(out.device):
        fill_kernel[(-(-(start % 4 + out.numel()) // (4 * blocks)),)](
            out,
            start,
            out.numel(),
            _signed(parameter),
            step if isinstance(step, Tensor) else _signed(step & 0xFFFFFFFF),
            _signed(source),
            *_words(seed),
            STEP_ON_DEVICE=on_device,
            BLOCKS=blocks,
            **_OPTIONS,
        )


def _tensors(table: Table) -> tuple[Tensor | None, ...]:
    """What both kernels read of a table."""
    return table.columns, table.tile_rows, table.geometry, table.steps, table.floors


def _numbers(table: Table, noise: Noise) -> tuple[float, ...]:
    """Where both kernels find the noise of a sample, and how wide it is."""
    where = (table.rows, table.first_step, *_words(noise.seed), _signed(noise.source))
    return *where, float(noise.sign), noise.ess, noise.damping


def _flags(table: Table, block: int) -> dict[str, Any]:
    """What both kernels are told about a table when they are compiled."""
    return {
        "DTYPE": _TYPES[table.dtypes[Role.WEIGHT]],
        "HESS_DTYPE": _TYPES[table.dtypes[Role.HESS]],
        "MEAN_DTYPE": _TYPES[table.dtypes[Role.MEAN]],
        "HAS_MEAN": Role.MEAN in table.roles,
        "HAS_PRIOR_PRECISION": Role.PRIOR_PRECISION in table.roles,
        "ALIGNED": table.aligned,
        "DIMS": table.dims,
        "ALIKE": table.alike,
        "INDEX": tl.int32 if table.longest < 2**31 else tl.int64,
        "BLOCK": block,
    }


def _stand_in(table: Table) -> int:
    """What is read in place of a gradient that is not there: a tensor whose elements are no narrower than any."""
    candidates = (Role.HESS, Role.MEAN, Role.WEIGHT)
    return int(next(role for role in candidates if role in table.roles and table.dtypes[role] == COMPUTE))


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.cuda.device(-1)


def _words(seed: int) -> tuple[int, int]:
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def _signed(word: int) -> int:
    """The same 32 bits as a signed number, so that the kernel's argument has one type whatever its value."""
    return word - (1 << 32) if word >= 1 << 31 else word


@functools.cache
def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf

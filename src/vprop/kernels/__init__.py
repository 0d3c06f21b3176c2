"""Speed only: ``functional/diagonal.py`` and ``noise.py`` in one pass over memory, and which version runs when.

A backend is a module with ``perturb``, ``step`` and ``normal``. There is one for CUDA (Triton) and one for CPUs (C);
tensors that no backend takes are left to the portable path, which gives the same result.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch
from torch import Tensor, nn

from vprop.kernels import cpu
from vprop.kernels.call import Noise, Step
from vprop.kernels.table import COMPUTE, Role, Table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels read and write. float64 is for checking mathematics, not for speed."""

STATE_DTYPES = {Role.HESS: DTYPES, Role.MOMENTUM: DTYPES, Role.MEAN: (COMPUTE,)}
"""What the state of a parameter may be kept in. With any other dtype the portable path does the work."""


class Backend(Protocol):
    """What the modules ``cpu`` and ``cuda`` offer."""

    def perturb(self, table: Table, noise: Noise, direction: int) -> None:
        """Write a sample into the weights (``direction`` 1), or take it out again (−1)."""

    def step(self, table: Table, step: Step) -> None:
        """One update of all rows of the table."""

    def normal(self, out: Tensor, start: int, *, seed: int, parameter: int, step: int | Tensor, source: int) -> None:
        """Fill ``out`` with the normals of the elements from ``start`` on."""


def backend_for(device: torch.device) -> Backend | None:
    """The kernels for a device, if there are any."""
    if device.type == "cpu":
        return cpu if cpu.available() else None
    return _cuda(device.index) if device.type == "cuda" else None


@functools.cache
def _cuda(index: int | None) -> Backend | None:
    # Triton compiles for GPUs from Volta on; AMD's would need tests of their own.
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(index) < (7, 0):
        return None
    from vprop.kernels import cuda

    return cuda


def takes(p: Tensor) -> bool:
    """Whether kernels can handle a parameter: a plain tensor whose elements lie at different addresses."""
    if type(p) not in (Tensor, nn.Parameter) or p.layout != torch.strided or p.dtype not in DTYPES:
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        return False
    return backend_for(p.device) is not None

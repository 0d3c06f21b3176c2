"""Many tensors as one table of addresses, so that one launch handles all of them.

A row is a parameter, a column is a *role*: what a tensor is to the update. Elements are numbered in row-major order
whatever the strides, because that number addresses the noise. A table whose tensors are all contiguous has no
geometry; in any other, an element's place in each tensor is found from its number by sizes and strides.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

COMPUTE = torch.float32
"""What kernels compute in. What tensors are kept in is another matter: a table says it for each role."""

TILE = 4096
"""Elements that are handled together; a multiple of four, because four share a call of the generator."""


class Role(enum.IntEnum):
    """What a tensor is to the update; also its column."""

    WEIGHT = 0
    HESS = 1
    MOMENTUM = 2
    MEAN = 3
    """Of bfloat16 and float16 weights, which are too coarse to hold it."""
    PRIOR_MEAN = 4
    PRIOR_PRECISION = 5
    GRAD = 6
    """A null pointer says that the parameter takes no part in this step."""
    OTHER = 7
    """ĥ, or the gradient of the first sample of a pair"""


class Column(enum.IntEnum):
    """What a row says beside its addresses."""

    SIZE = len(Role)
    PARAMETER = len(Role) + 1
    """The parameter's number, which addresses its noise."""
    FIRST_TILE = len(Role) + 2
    """How many tiles the rows before it have."""
    FIRST_BLOCK = len(Role) + 3
    """A quarter of the number of its first element, which is not 0 for a part of a parameter that lies elsewhere."""


COUNTERS = 1024
"""Of elements that are left out, on a GPU: one for each lane of a program, because bringing them together costs."""


def new_counter(device: torch.device) -> Tensor:
    """Where kernels count the elements that they left out: the sum counts."""
    if device.type == "cpu":
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def tiles_of(size: int) -> int:
    """How many tiles a tensor has."""
    return -(-size // TILE)


def int64(values: Iterable[int]) -> Tensor:
    """A CPU tensor of Python ints; much faster than ``torch.tensor`` for thousands of them."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def geometry_of(rows: Sequence[Sequence[Tensor | None]]) -> list[list[list[int]]] | None:
    """Sizes and strides of tables of tensors, or ``None`` if all tensors are contiguous.

    ``rows[i]`` holds the tensors of row i, by role. For each row the result is one list of sizes and one of strides
    for each role, with neighbouring dimensions joined where all tensors allow it, and all rows padded to the same
    number of dimensions.
    """
    present = [[tensor for tensor in row if tensor is not None] for row in rows]
    if all(tensor.is_contiguous() for row in present for tensor in row):
        return None
    joined = [_joined(row) for row in present]
    dims = max(len(sizes) for sizes, _ in joined)
    geometry = []
    for row, (sizes, strides) in zip(rows, joined, strict=True):
        missing = dims - len(sizes)
        waiting = iter(strides)
        by_role = [[0] * dims if tensor is None else [0] * missing + next(waiting) for tensor in row]
        geometry.append([[1] * missing + sizes, *by_role])
    return geometry


def _joined(tensors: Sequence[Tensor]) -> tuple[list[int], list[list[int]]]:
    """Common sizes, and each tensor's strides, after joining dimensions that are one run in all tensors."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for dim, size in enumerate(tensors[0].shape):
        here = [tensor.stride(dim) for tensor in tensors]
        if size == 1:
            continue
        if sizes and all(own[-1] == size * stride for own, stride in zip(strides, here, strict=True)):
            sizes[-1] *= size
            for own, stride in zip(strides, here, strict=True):
                own[-1] = stride
        else:
            sizes.append(size)
            for own, stride in zip(strides, here, strict=True):
                own.append(stride)
    if not sizes:
        return [1], [[1] for _ in tensors]
    return sizes, strides


def _alike(tensors: Sequence[Tensor | None]) -> bool:
    """Whether an element has the same place in all of them, as with all in one memory format."""
    return len({tensor.stride() for tensor in tensors if tensor is not None}) == 1


def _aligned(pointers: Sequence[int]) -> bool:
    """Whether all addresses allow loads of 16 bytes."""
    return not any(map((15).__and__, pointers))


def _tile_rows(sizes: Sequence[int], device: torch.device) -> Tensor:
    """The row of each tile: on a GPU, looking up is faster than searching."""
    counts = int64(map(tiles_of, sizes)).to(device)
    return torch.arange(len(sizes), dtype=torch.int32, device=device).repeat_interleave(counts)


class Table:
    """The addresses of many tensors of one kind, on their device.

    ``dtypes`` says what the tensors of each role are kept in, the same in all rows, whatever is computed in.
    ``steps`` counts the steps of each row, on the device, plus ``first_step`` for all of them. ``unusable`` and
    ``clipped`` are where kernels count elements. ``floors`` holds, for each row, what h+δ is not below.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        fixed: Mapping[Role, Sequence[Tensor]],
        steps: Tensor,
        first_blocks: Sequence[int] | None = None,
    ) -> None:
        weights, hess = fixed[Role.WEIGHT], fixed[Role.HESS]
        self.device = weights[0].device
        self.dtypes = dict.fromkeys(Role, COMPUTE) | {role: tensors[0].dtype for role, tensors in fixed.items()}
        self.rows, self.tiles = len(weights), 0
        self.roles = frozenset(fixed)
        self.steps, self.first_step = steps, 0
        self.floors = torch.zeros(self.rows, dtype=torch.float32, device=self.device)
        sizes, first_tiles = [weight.numel() for weight in weights], []
        for size in sizes:
            first_tiles.append(self.tiles)
            self.tiles += tiles_of(size)
        pointers = {role: list(map(Tensor.data_ptr, tensors)) for role, tensors in fixed.items()}
        nothing = [0] * self.rows
        self._loose: dict[Role, list[int]] = {Role.GRAD: nothing, Role.OTHER: nothing}
        numbers_of_rows = [sizes, list(numbers), first_tiles, list(first_blocks or nothing)]
        columns = [pointers.get(role, nothing) for role in Role] + numbers_of_rows
        self.columns = int64(value for column in columns for value in column).view(-1, self.rows).to(self.device)
        # Gradients, and what is made of them, are laid out like the state.
        by_role = [fixed.get(role, hess if role >= Role.GRAD else None) for role in Role]
        rows = [[None if tensors is None else tensors[i] for tensors in by_role] for i in range(self.rows)]
        geometry = geometry_of(rows)
        self.geometry: Tensor | None = None
        if geometry is not None:
            self.geometry = torch.tensor(geometry, dtype=torch.int64, device=self.device)
        self.longest = max(sizes, default=0)
        self.alike = geometry is None or all(_alike(row) for row in rows)
        self.tile_rows = _tile_rows(sizes, self.device)
        self._fixed_aligned = self.aligned = all(map(_aligned, pointers.values()))
        self.unusable = new_counter(self.device)
        self.for_backend: Any = None
        """The same as a backend reads it, kept by the backend."""
        self.clipped = torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def dims(self) -> int:
        """Dimensions of the geometry; 0 if all tensors are contiguous."""
        return 0 if self.geometry is None else self.geometry.shape[-1]

    def at_step(self, step: int) -> Table:
        """The same table with one step count for all rows."""
        twin = copy(self)
        twin.for_backend = None
        twin.steps, twin.first_step = torch.zeros_like(self.steps), step
        return twin

    def for_capture(self) -> Table:
        """A table for a CUDA graph that is being captured.

        What is written into it is written when the graph runs, so that no other step may rely on it.
        """
        twin = copy(self)
        twin.for_backend = None
        twin.columns, twin.dtypes = self.columns.clone(), dict(self.dtypes)
        twin._loose = {}
        return twin

    def point(self, role: Role, pointers: list[int], dtype: torch.dtype = COMPUTE) -> Tensor | None:
        """Let a column of this step's tensors, ``GRAD`` or ``OTHER``, hold these addresses, of tensors of this dtype.

        Returns the memory that they are copied from, if they are: a graph in capture reads it whenever it runs.
        """
        if self.dtypes[role] != dtype:
            self.dtypes[role], self.for_backend = dtype, None
        if self._loose.get(role) == pointers:
            return None
        host = int64(pointers)
        if self.device.type == "cuda":
            host = host.pin_memory()  # else the copy would wait for all work before it
        self.columns[role].copy_(host, non_blocking=True)
        self._loose[role] = pointers
        self.aligned = self._fixed_aligned and all(map(_aligned, self._loose.values()))
        return host

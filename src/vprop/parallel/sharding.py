"""Sharded parameters (torch's DTensor): the local part, and which elements of the full tensor it is.

An update is a formula for each element by itself, so every rank works on its own part, with the noise of these
elements. Sums over all weights are left to DTensor, which knows how to add up over ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


def is_sharded(value: Any) -> bool:
    """Whether a tensor is spread over ranks."""
    if type(value) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and without it there are none
    return module is not None and isinstance(value, module.DTensor)


def to_local(value: Value) -> Value:
    """The part of a tensor that lies on this rank, sharing its memory; anything else as it is."""
    if not is_sharded(value):
        return value
    if not torch.is_grad_enabled():  # to_local() is no operation then, and needs no detach() before it, which is slow
        return value.to_local()  # type: ignore[attr-defined]
    with torch.no_grad():
        return value.to_local()  # type: ignore[attr-defined]


def full_tensor(value: Value) -> Value:
    """The whole of a tensor, brought together from all ranks, which must all ask for it; anything else as it is."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def sharded_like(part: Tensor, like: Any) -> Tensor:
    """A tensor whose part on this rank is ``part``, spread as ``like`` is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_of(tensor: Any, like: Any) -> Tensor:
    """``tensor``, which every rank holds as a whole or spread in its own way, spread as ``like`` is."""
    if not is_sharded(like):
        return full_tensor(tensor)
    if is_sharded(tensor):
        return tensor.redistribute(like.device_mesh, like.placements)
    block = block_of(like)
    window = tuple(slice(first, first + size) for first, size in zip(block.offset, block.size, strict=True))
    return sharded_like(tensor.detach().to(like.device)[window].contiguous(), like)


def sums(tensors: Sequence[Any]) -> list[float]:
    """The sum of each tensor, over all ranks for those that are spread, which are asked for in one go."""
    totals = [to_local(tensor).sum(dtype=torch.float64) for tensor in tensors]
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            alike.setdefault((tensor.device_mesh, tensor.placements), []).append(i)
    for (mesh, placements), members in alike.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        together = DTensor.from_local(torch.stack([totals[i] for i in members]), mesh, parts, run_check=False)
        for i, total in zip(members, together.full_tensor().unbind(), strict=True):
            totals[i] = total
    return [float(total) for total in totals]


def local_grad(p: Any) -> Tensor | None:
    """``p.grad``, or the part of it that belongs to the part of ``p`` on this rank."""
    grad = p.grad
    if grad is not None and is_sharded(grad) and grad.placements != p.placements:
        grad = grad.redistribute(p.device_mesh, p.placements)  # a sum over ranks, say, that nobody has taken yet
    return to_local(grad)


@dataclass(frozen=True)
class Block:
    """The elements of a parameter that lie on this rank: a box inside its whole shape."""

    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def start(self) -> int | None:
        """The number, in the row-major order of the whole, of the first element, if the others follow it."""
        outermost = max((d for d, n in enumerate(self.shape) if self.size[d] != n), default=0)
        if any(size != 1 for size in self.size[:outermost]):
            return None
        return sum(first * stride for first, stride in zip(self.offset, _row_major(self.shape), strict=True))

    def numbers(self, device: torch.device) -> Tensor:
        """The number of each element in the row-major order of the whole (int64, in the shape of the block)."""
        numbers = torch.zeros(self.size, dtype=torch.int64, device=device)
        for d, stride in enumerate(_row_major(self.shape)):
            along = torch.arange(self.offset[d], self.offset[d] + self.size[d], device=device) * stride
            numbers += along.view([-1 if d == other else 1 for other in range(len(self.shape))])
        return numbers


def block_of(p: Any) -> Block:
    """Which elements of a parameter lie on this rank: all of them, if it is not spread."""
    if not is_sharded(p):
        return Block(tuple(p.shape), (0,) * p.dim(), tuple(p.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    local = tuple(to_local(p).shape)
    if tuple(size) != local or len(offset) != len(p.shape):
        raise RuntimeError(
            f"A parameter of shape {tuple(p.shape)} is spread over ranks as {p.placements}, of which {local} lie here: "
            "no box inside the whole. Use Shard and Replicate placements whose parts are contiguous."
        )
    return Block(tuple(p.shape), tuple(offset), local)


def _row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides

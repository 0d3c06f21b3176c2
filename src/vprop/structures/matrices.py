"""Parameters as matrices in rotated coordinates, those of one shape together: for the eigenbasis structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vprop.functional import eigenbasis
from vprop.functional.eigenbasis import Basis
from vprop.precision import widest
from vprop.structures.members import Member, State

SIDES = ("left", "right")
SQUARES = ("basis", "average")
"""What is kept of a side."""


def sides_of(shape: torch.Size, limit: int) -> list[tuple[str, int]]:
    """The sides of a weight that have a basis, with their lengths: neither too long nor a single number."""
    lengths = zip(SIDES, eigenbasis.matrix_shape(shape), strict=True)
    return [(side, length) for side, length in lengths if 1 < length <= limit and shape.numel() > 0]


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one piece of memory, as one flat tensor; ``None`` if they do not.

    Where a step is traced (torch.compile) there are no addresses, so that none do.
    """
    if torch.compiler.is_compiling():
        return None
    first, place = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            type(tensor) is not Tensor
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.data_ptr() != place
            or tensor.untyped_storage().data_ptr() != memory
        ):
            return None
        place += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def stacked(tensors: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Tensors as one batch of matrices, in their own memory if they lie there in a row."""
    lying = in_a_row(tensors)
    if lying is not None:
        return lying.view(len(tensors), *shape)
    return torch.stack([tensor.reshape(shape) for tensor in tensors])


def basis_of(states: Sequence[State], side: str) -> Basis:
    """The bases of a side, of states that all have one or all none."""
    if f"{side}_basis" not in states[0]:
        return None
    return stacked([state[f"{side}_basis"] for state in states], _square(states[0][f"{side}_basis"]))


def _square(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


@dataclass
class Rotation:
    """The bases of several matrices of one shape."""

    shape: tuple[int, int]
    left: Basis
    right: Basis

    @staticmethod
    def of(members: Sequence[Member], states: Sequence[State]) -> Rotation:
        """That of parameters of one batch."""
        shape = eigenbasis.matrix_shape(members[0].p.shape)
        return Rotation(shape, basis_of(states, "left"), basis_of(states, "right"))

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors like the parameters as a batch of matrices."""
        return stacked(tensors, self.shape)

    def into(self, x: Tensor) -> Tensor:
        """Into the coordinates of the bases."""
        return eigenbasis.rotated(x, self.left, self.right)

    def back(self, x: Tensor) -> Tensor:
        """Back into those of the weights."""
        return eigenbasis.rotated_back(x, self.left, self.right)

    def diagonal_back(self, values: Tensor) -> Tensor:
        """The diagonal in the coordinates of the weights of what is diagonal in those of the bases."""
        return eigenbasis.diagonal_of_rotated_back(values, self.left, self.right)


def refresh(states: Sequence[State], shape: tuple[int, int], side: str, solve: bool) -> None:
    """Let the bases of one side, of matrices of one shape, follow the averages, and turn all that is kept in them."""
    basis, average = f"{side}_basis", f"{side}_average"
    square = (shape[SIDES.index(side)],) * 2
    shapes = {basis: square, average: square, "hess": shape, "momentum": shape}
    kept = {key: [state[key] for state in states] for key in shapes if key in states[0]}
    found = {key: stacked(tensors, shapes[key]) for key, tensors in kept.items()}
    old, products = widest(found[basis]), widest(found[average])
    change = eigenbasis.solved if solve else eigenbasis.turned
    new = change(old, products, rounding=torch.finfo(found[basis].dtype).eps)
    turn = eigenbasis.rotated(new, old, None)
    turns = (turn, None) if side == "left" else (None, turn)
    results = {basis: new, average: eigenbasis.rotated(products, turn, turn)}
    results["hess"] = eigenbasis.projected(widest(found["hess"]), *turns)
    if "momentum" in found:
        results["momentum"] = eigenbasis.rotated(widest(found["momentum"]), *turns)
    for key, values in results.items():
        _write(kept[key], values)


def _write(targets: Sequence[Tensor], values: Tensor) -> None:
    """A batch of matrices into tensors of as many elements."""
    lying = in_a_row(targets)
    if lying is not None:
        lying.view(values.shape).copy_(values)
    else:
        pieces = [value.reshape(target.shape) for value, target in zip(values, targets, strict=True)]
        torch._foreach_copy_(list(targets), pieces)

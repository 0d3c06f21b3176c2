"""Parameters as matrices in rotated coordinates, those of one shape together: for the eigenbasis structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vprop.bundles import bundles, limit_for
from vprop.curvature import Evidence, Folded, SampleSpread
from vprop.curvature._base import folded_before
from vprop.functional import eigenbasis
from vprop.functional.eigenbasis import Basis
from vprop.structures.members import GroupStep, Member, State, gradient_of
from vprop.structures.rotated import kernels_take, squares_in_kernel

SIDES = ("left", "right")


def sides_of(shape: torch.Size, limit: int) -> list[tuple[str, int]]:
    """The sides of a weight that have a basis, with their lengths: neither too long nor a single number."""
    lengths = zip(SIDES, eigenbasis.matrix_shape(shape), strict=True)
    return [(side, length) for side, length in lengths if 1 < length <= limit and shape.numel() > 0]


def stacked(tensors: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Tensors as one batch of matrices; a single one in its own memory, if that is in order."""
    if len(tensors) == 1:
        return tensors[0].reshape(1, *shape)
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


def batches(members: Iterable[tuple[Member, State]]) -> Iterator[list[tuple[Member, State]]]:
    """Parameters whose matrices can be handled as one batch: of one group, shape, dtype and device, and same sides."""
    return bundles(
        members,
        kind=lambda item: (
            item[0].group_number,
            item[0].p.shape,
            item[0].p.dtype,
            item[0].p.device,
            tuple(f"{side}_basis" in item[1] for side in SIDES),
        ),
        size=lambda item: item[0].p.numel(),
        limit=lambda item: limit_for(item[0].group["foreach"], item[0].p.device),
    )


class FoldedBatch:
    """What the samples of a step say of matrices of one batch, in rotated coordinates.

    Beside what the curvature's estimator folds it averages products of gradients for the bases: of what the estimator
    makes a curvature of, the gradients themselves, half the difference of a pair, or their deviations from the mean.
    """

    def __init__(self, members: list[Member], states: list[State], missed_samples: int) -> None:
        self.members, self.states = members, states
        self.by_kernels = kernels_take(members, states)
        self.squares_later = self.by_kernels and squares_in_kernel(self.step)
        self.rotation = Rotation.of(members, states)
        self.folded: Folded | None = None
        self.products: dict[str, Tensor] = {}
        """The sums of g̃g̃ᵀ (left) and g̃ᵀg̃ (right)."""
        self._partner: Tensor | None = None
        self._sample = missed_samples
        if missed_samples:  # without a gradient, which counts as zero
            nothing = torch.zeros_like(self.rotation.stack([state["hess"] for state in states]))
            self.folded = folded_before(self.step.estimator, nothing, missed_samples)
            self._partner = nothing if missed_samples % 2 else None

    @property
    def step(self) -> GroupStep:
        """The group that all are of."""
        return self.members[0].step

    def fold(self, noises: list[Tensor] | None) -> None:
        """Take in the gradients at the next sample, whose noise the estimator may ask for."""
        estimator, alone = self.step.estimator, len(self.members) == 1 and self.step.samples > 1
        grads = self.rotation.stack([gradient_of(member, copy=alone) for member in self.members])
        grad = self.rotation.into(grads)
        self._fold_products(grad)
        noise = None if noises is None else self.rotation.stack(noises)
        if self.squares_later:
            self.folded = Folded(grad, grad)  # the kernel that squares it reads the gradient alone
        else:
            self.folded = estimator.fold(self.folded, Evidence(grad, None, noise))
        self._sample += 1

    def _fold_products(self, grad: Tensor) -> None:
        shown = self._shown(grad)
        if shown is None:
            return
        for side, basis in (("left", self.rotation.left), ("right", self.rotation.right)):
            if basis is not None:
                product = eigenbasis.gram(shown.mT if side == "left" else shown)
                self.products[side] = self.products[side] + product if side in self.products else product

    def _shown(self, grad: Tensor) -> Tensor | None:
        """What the sample shows of the curvature; ``None`` if that needs another sample."""
        estimator = self.step.estimator
        if isinstance(estimator, SampleSpread):
            if self.folded is None:
                return None
            count = self.folded.count
            return (grad - self.folded.grad) * math.sqrt(count / (count + 1))
        if not (self.step.antithetic and (estimator.in_pairs or estimator.needs_noise)):
            return grad
        if self._sample % 2 == 0:
            self._partner = grad
            return None
        assert self._partner is not None
        half_difference = (self._partner - grad) / 2
        self._partner = None
        return half_difference

    def fold_into_averages(self, decay: float) -> None:
        """Take the products of this step into the averages that the bases follow.

        Those of a gradient that is not finite, or whose squares are not, are left out. The scale of an average does not
        matter to its eigenvectors, so that nothing is divided by what the weights of its terms sum up to.
        """
        for side, product in self.products.items():
            shape = _square(self.states[0][f"{side}_average"])
            averages = stacked([state[f"{side}_average"] for state in self.states], shape)
            usable = torch.isfinite(product.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
            averages = torch.where(usable, averages.lerp(product, 1 - decay), averages)
            torch._foreach_copy_([state[f"{side}_average"] for state in self.states], list(averages.unbind()))


def refresh(states: Sequence[State], shape: tuple[int, int], side: str, solve: bool) -> None:
    """Let the bases of one side, of matrices of one shape, follow the averages, and turn all that is kept in them."""
    basis, length = f"{side}_basis", states[0][f"{side}_basis"].shape[0]
    old = eigenbasis.wide(stacked([state[basis] for state in states], (length, length)))
    average = eigenbasis.wide(stacked([state[f"{side}_average"] for state in states], (length, length)))
    new = (eigenbasis.solved if solve else eigenbasis.turned)(
        old, average, rounding=torch.finfo(states[0][basis].dtype).eps
    )
    turn = eigenbasis.rotated(new, old, None)
    turns = (turn, None) if side == "left" else (None, turn)
    results = {basis: new, f"{side}_average": eigenbasis.rotated(average, turn, turn)}
    hess = eigenbasis.wide(stacked([state["hess"] for state in states], shape))
    results["hess"] = eigenbasis.projected(hess, *turns)
    if "momentum" in states[0]:
        momentum = eigenbasis.wide(stacked([state["momentum"] for state in states], shape))
        results["momentum"] = eigenbasis.rotated(momentum, *turns)
    for key, values in results.items():
        for state, value in zip(states, values, strict=True):
            state[key].copy_(value.reshape(state[key].shape))

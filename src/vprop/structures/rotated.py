"""The kernels of the diagonal, for matrices in rotated coordinates: noise of the right width, and the step.

To a kernel a rotated matrix is a parameter like any other. Its curvature and momentum are the state's own tensors; what
stands for the weights is made for each pass: zeros that a sample is written into, or the distance from the prior's
mean, which the step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vprop import kernels
from vprop.curvature import Folded, MeanSquare, SquaredGradient
from vprop.kernels.call import Curvature, Step
from vprop.kernels.table import COMPUTE, Role, Table
from vprop.noise import Stream
from vprop.structures.members import GroupStep, Member, State
from vprop.structures.packs import noise_of

_KEYS = {Role.HESS: "hess", Role.MOMENTUM: "momentum"}


def squares_in_kernel(step: GroupStep) -> bool:
    """Whether ĥ is a multiple of ĝ², which a kernel makes itself."""
    return step.samples <= 1 and type(step.estimator) in (SquaredGradient, MeanSquare)


def kernels_take(members: Sequence[Member], states: Sequence[State]) -> bool:
    """Whether kernels can do the work for a batch: they are there, are asked for, and all have made as many steps."""
    first, tensors = members[0], [state[key] for state in states for key in _KEYS.values() if key in state]
    return (
        first.step.fused
        and first.step.kernel is not None
        and not first.step.capturable
        and not torch.compiler.is_compiling()
        and kernels.takes(first.p)
        and len({int(state["step"]) for state in states}) == 1
        and all(type(t) is Tensor and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and first.p.numel() > 0
    )


class RotatedKernels:
    """Tables of matrices that are handled together, kept from step to step."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], Table] = {}

    def _table(self, members: Sequence[Member], states: Sequence[State], weights: Tensor) -> Table:
        """The table of a batch, with ``weights``, one matrix after the other, in the place of the parameters."""
        assert weights.dtype == COMPUTE  # a kernel would write past the end of anything shorter
        assert weights.is_contiguous()
        roles = [role for role, key in _KEYS.items() if key in states[0]]
        pointers = tuple(state[_KEYS[role]].data_ptr() for role in roles for state in states)
        key = (tuple(member.number for member in members), tuple(roles), pointers)
        table = self._tables.get(key)
        if table is None:
            numbers = {member.number for member in members}
            # What was moved, or is handled in other company now, is not looked up any more.
            self._tables = {k: t for k, t in self._tables.items() if k[1] != key[1] or not numbers & set(k[0])}
            fixed = {role: [state[_KEYS[role]] for state in states] for role in roles}
            steps = torch.zeros(len(members), dtype=torch.int64, device=weights.device)
            rows = [row.reshape(member.p.shape) for row, member in zip(weights, members, strict=True)]
            table = self._tables[key] = Table(
                [member.number for member in members], {Role.WEIGHT: rows, **fixed}, steps
            )
        table.point(Role.WEIGHT, _rows(weights), weights.dtype)
        table.first_step = int(states[0]["step"])
        return table

    def offsets(self, members: Sequence[Member], states: Sequence[State], sample: int, floor: float | Tensor) -> Tensor:
        """σ̃ε of a sample of the coming step."""
        out = torch.zeros(len(members), states[0]["hess"].numel(), dtype=torch.float32, device=states[0]["hess"].device)
        table = self._table(members, states, out)
        _set_floors(table, floor)
        _backend(out).perturb(table, noise_of(members[0].step, sample, Stream.TRAINING), 1)
        return out

    def step(
        self,
        members: Sequence[Member],
        states: Sequence[State],
        distance: Tensor,
        folded: Folded,
        estimate: Tensor | None,
        *,
        scale: float,
        gradient_scale: float | None,
        floor: float | Tensor,
        unusable: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One step, counted already, from the distances to the prior's mean: the new ones, and how many were clipped.

        Curvature and momentum are changed in place. Without an ``estimate``, ĥ is ``scale``·ĝ².
        """
        step, group = members[0].step, members[0].group
        new = distance.to(COMPUTE, copy=True, memory_format=torch.contiguous_format)
        table = self._table(members, states, new)
        _set_floors(table, floor)
        grad = folded.grad.contiguous()
        table.point(Role.GRAD, _rows(grad), grad.dtype)
        if estimate is not None:
            estimate = estimate.to(COMPUTE).expand_as(grad).contiguous()
            table.point(Role.OTHER, _rows(estimate), estimate.dtype)
        table.unusable = unusable
        table.clipped = torch.zeros_like(table.clipped)
        request = Step(
            noise=noise_of(step, max(1, step.samples) - 1, Stream.TRAINING),
            sampled=False,
            curvature=Curvature.SQUARE if estimate is None else Curvature.GIVEN,
            scale=scale,
            rule=step.kernel,  # type: ignore[arg-type]
            lr=group["lr"] * step.rate_factor,
            betas=group["betas"],
            clip_radius=group["clip_radius"],
            grad_sign=1,
            start_weight=step.start_weight,
            gradient_scale=gradient_scale or 1.0,
        )
        _backend(new).step(table, request)
        return new, table.clipped


def _rows(batch: Tensor) -> list[int]:
    """The addresses of the matrices of a batch."""
    stride = batch.stride(0) * batch.element_size()
    return [batch.data_ptr() + i * stride for i in range(len(batch))]


def _set_floors(table: Table, floor: float | Tensor) -> None:
    if isinstance(floor, Tensor):
        table.floors.copy_(floor.reshape(-1))
    else:
        table.floors.fill_(floor)


def _backend(tensor: Tensor) -> kernels.Backend:
    backend = kernels.backend_for(tensor.device)
    assert backend is not None
    return backend

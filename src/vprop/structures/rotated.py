"""The kernels of the diagonal, for matrices in rotated coordinates: noise of the right width, and the step.

To a kernel a rotated matrix is a parameter like any other. Its curvature and momentum are the state's own tensors; what
stands for weights and gradients lies in memory that is used in every pass, so that the addresses stay: zeros that a
sample is written into, the distance from the prior's mean, which the step changes, and the rotated gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vprop import kernels
from vprop.curvature import Folded, MeanSquare, Price, SquaredGradient
from vprop.kernels.call import Curvature, Step
from vprop.kernels.table import COMPUTE, Role, Table
from vprop.noise import Stream
from vprop.structures.companies import Company
from vprop.structures.members import GroupStep
from vprop.structures.packs import noise_of


def curvature_of_one(step: GroupStep) -> Curvature | None:
    """How a kernel makes ĥ of the gradient at a single sample; ``None`` if there are several, or it cannot."""
    if step.samples <= 1 and type(step.estimator) in (SquaredGradient, MeanSquare):
        return Curvature.SQUARE
    return Curvature.PRICE if step.samples == 1 and type(step.estimator) is Price else None


def kernels_take(company: Company) -> bool:
    """Whether kernels can do the work: they are there, are asked for, and know the update."""
    step, states = company.step, (company.hess, company.momentum)
    return (
        not torch.compiler.is_compiling()
        and step.fused
        and step.kernel is not None
        and company.size > 0
        and all(tensor is None or tensor.dtype == COMPUTE for tensor in states)
        and all(map(kernels.takes, company.params))
    )


class Scratch:
    """Memory for what stands for weights and gradients, as much as the largest company needs, for one after the other.

    A captured CUDA graph goes on using what it was captured with.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[Role, torch.device], Tensor] = {}

    def of(self, role: Role, company: Company) -> Tensor:
        """A flat tensor for a company."""
        kept = self._memory.get((role, company.device))
        if kept is None or len(kept) < company.size:
            kept = torch.empty(company.size, dtype=COMPUTE, device=company.device)
            self._memory[role, company.device] = kept
        return kept[: company.size]

    def make_room(self, companies: list[Company]) -> None:
        """Have enough for the largest, so that nothing moves later."""
        for company in sorted(companies, key=lambda company: -company.size):
            for role in (Role.WEIGHT, Role.GRAD):
                self.of(role, company)

    def everything(self) -> list[Tensor]:
        """All of it, to be kept alive."""
        return list(self._memory.values())


def offsets(company: Company, sample: int, scratch: Scratch) -> Tensor:
    """σ̃ε of a sample of the coming step."""
    out = scratch.of(Role.WEIGHT, company).zero_()
    backend = kernels.backend_for(company.device)
    assert backend is not None
    backend.perturb(_table(company, scratch), noise_of(company.step, sample, Stream.TRAINING), 1)
    return out


def step(
    company: Company,
    folded: Folded,
    curvature: Curvature,
    estimate: Tensor | None,
    scratch: Scratch,
    *,
    scale: float,
    gradient_scale: float | None,
    unusable: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step, counted already, from the distances to the prior's mean: the new ones, and how many were clipped.

    The distances lie in ``scratch``, where the new ones are written; curvature and momentum are changed in place.
    """
    group, table = company.step.group, _table(company, scratch)
    _place(scratch.of(Role.GRAD, company), folded.grad)
    if estimate is not None:
        other = scratch.of(Role.OTHER, company)
        other.copy_(estimate)
        table.point(Role.OTHER, _addresses(company, other))
    request = Step(
        noise=noise_of(company.step, max(1, company.step.samples) - 1, Stream.TRAINING),
        sampled=False,
        curvature=curvature,
        scale=scale,
        rule=company.step.kernel,  # type: ignore[arg-type]
        lr=group["lr"] * company.step.rate_factor if company.step.rate_factor != 1.0 else group["lr"],
        betas=group["betas"],
        clip_radius=group["clip_radius"],
        grad_sign=1,
        start_weight=company.step.start_weight,
        gradient_scale=gradient_scale or 1.0,
    )
    table.unusable = unusable
    if request.clips:
        table.clipped = torch.zeros_like(table.clipped)
    backend = kernels.backend_for(company.device)
    assert backend is not None
    backend.step(table, request)
    return scratch.of(Role.WEIGHT, company), table.clipped


def _place(target: Tensor, values: Tensor) -> None:
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)


def _addresses(company: Company, flat: Tensor) -> list[int]:
    """Where the matrices of a company begin in a flat tensor."""
    starts, at = [], flat.data_ptr()
    for length in company.lengths:
        starts.append(at)
        at += length * flat.element_size()
    return starts


def _table(company: Company, scratch: Scratch) -> Table:
    """The company's table, with the counts of this moment."""
    weights, grads = scratch.of(Role.WEIGHT, company), scratch.of(Role.GRAD, company)
    on_device = company.counts.device == company.device
    if company.table is None:
        fixed = {Role.WEIGHT: company.pieces(weights), Role.HESS: company.pieces(company.hess)}
        if company.momentum is not None:
            fixed[Role.MOMENTUM] = company.pieces(company.momentum)
        steps = company.counts if on_device else torch.zeros_like(company.counts, device=company.device)
        company.table = Table([member.number for member in company.members], fixed, steps)
        company.ahead = [0] * len(company.members)
        if isinstance(company.floor, Tensor):
            company.table.floors.copy_(company.floor)
        else:
            company.table.floors.fill_(company.floor)
    table = company.table
    table.point(Role.WEIGHT, _addresses(company, weights))
    table.point(Role.GRAD, _addresses(company, grads))
    if not on_device:
        _tell_counts(company, table)
    return table


def _tell_counts(company: Company, table: Table) -> None:
    """Let a table that cannot read the counts know them: one for all, and what some are ahead of it."""
    counts = company.counts.tolist()
    table.first_step, ahead = counts[0], [count - counts[0] for count in counts]
    if ahead != company.ahead:
        table.steps.copy_(torch.tensor(ahead, dtype=torch.int64, device="cpu"))
        company.ahead = ahead

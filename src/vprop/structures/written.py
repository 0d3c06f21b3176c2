"""Samples written with torch's own operations, on any device: the path that needs no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from vprop import noise
from vprop.bundles import bundles, gather, gather_or_number, limit_for, pieces_of, scatter_, scatter_add_
from vprop.functional import diagonal
from vprop.parallel.fsdp import drop_gathered
from vprop.structures.members import Member

KEPT_ELEMENTS = 1 << 20
"""A sample of at most this many weights on a CPU is kept until it is taken out of them."""


@dataclass
class Written:
    """A parameter that holds a sample, with all that is needed to generate its noise again.

    ``ess``, ``damping`` and ``floor`` are those of the moment of writing: a group can be edited while the sample is
    active.
    """

    member: Member
    draw: noise.Draw
    sign: int
    hess: Tensor
    ess: float
    damping: float | Tensor
    floor: float | Tensor
    mean: Tensor | None
    offset: Tensor | None = None
    """σ·ε, kept where the whole sample is so small that generating it again would only cost time."""
    done: bool = False
    """Whether the sample is in the weights: the truth also when an interrupt strikes half-way."""


class _HasMember(Protocol):
    @property
    def member(self) -> Member: ...


_Item = TypeVar("_Item", bound=_HasMember)


def bundles_of(items: list[_Item]) -> Iterator[list[_Item]]:
    """Items that can be handled as one flat tensor: of one group, device and dtype."""
    return bundles(
        items,
        kind=lambda item: (item.member.group_number, item.member.local.device, item.member.local.dtype),
        size=lambda item: item.member.local.numel(),
        limit=lambda item: limit_for(item.member.group["foreach"], item.member.local.device),
    )


def like_parameter(value: float | Tensor, parameter: Tensor) -> float | Tensor:
    """A number as it is, and a tensor of one as one that can be gathered with the others'."""
    return value.expand_as(parameter) if isinstance(value, Tensor) else value


def write(entries: list[Written]) -> None:
    """Write samples into the weights, which hold the mean."""
    keep = _small_enough_to_keep(entries)
    for bundle in bundles_of(entries):
        params, offset = [entry.member.local for entry in bundle], _offset(bundle)
        if keep:
            for entry, piece in zip(bundle, pieces_of(params, offset), strict=True):
                entry.offset = piece
        if bundle[0].mean is None:
            scatter_add_(params, offset)
        else:
            scatter_(params, gather([entry.mean for entry in bundle if entry.mean is not None]) + offset)
        for entry in bundle:
            entry.done = True
    _drop_gathered(entries)


def restore(entries: list[Written]) -> None:
    """Put the mean back, where a sample is in the weights."""
    active = [entry for entry in entries if entry.done]
    for bundle in bundles_of(active):
        if bundle[0].mean is None:
            scatter_add_([entry.member.local for entry in bundle], -_offset(bundle))
        for entry in bundle:
            if entry.mean is not None:
                entry.member.local.copy_(entry.mean)
            entry.done = False
    _drop_gathered(active)


def _drop_gathered(entries: list[Written]) -> None:
    drop_gathered(entry.member.p for entry in entries if entry.member.local is not entry.member.p)


def _small_enough_to_keep(entries: list[Written]) -> bool:
    on_cpu = all(entry.member.local.device.type == "cpu" for entry in entries)
    return on_cpu and sum(entry.member.local.numel() for entry in entries) <= KEPT_ELEMENTS


def _offset(bundle: list[Written]) -> Tensor:
    """σ·ε of a bundle, gathered: as it was kept, or generated again."""
    kept = [entry.offset for entry in bundle if entry.offset is not None]
    if len(kept) == len(bundle):
        return gather(kept)
    params, draws = [entry.member.p for entry in bundle], [entry.draw for entry in bundle]
    noises = dict(noise.normals_like(params, draws, portable=True))
    perturbation = diagonal.perturbation(
        gather([entry.hess for entry in bundle]),
        gather([noises[i] for i in range(len(bundle))]),
        bundle[0].ess,
        gather_or_number([entry.damping for entry in bundle]),
        gather_or_number([like_parameter(entry.floor, entry.hess) for entry in bundle]),
    )
    return perturbation.mul_(bundle[0].sign)

"""Which structure the groups of an optimizer ask for, by name."""

from __future__ import annotations

from collections.abc import Iterable

from vprop.structures.base import Structure
from vprop.structures.composed import Composed
from vprop.structures.diagonal import Diagonal
from vprop.structures.eigenbasis import Eigenbasis
from vprop.structures.full import Full

NAMED: dict[str, type[Structure]] = {cls.name: cls for cls in (Diagonal, Eigenbasis, Full)}
"""The structures that the argument ``structure`` names."""


def part_of(structure: Structure, name: str) -> Structure:
    """The structure of that name: the one that is there, alone or as a part, or a new one."""
    if structure.name == name:
        return structure
    if isinstance(structure, Composed) and name in structure.parts:
        return structure.parts[name]
    return NAMED[name](structure.optimizer)


def structure_for(names: Iterable[str], former: Structure) -> Structure:
    """What keeps Gaussians of these structures: one of them, or a composition. ``former`` is used as far as it fits."""
    wanted = list(dict.fromkeys(names))
    if len(wanted) == 1:
        return part_of(former, wanted[0])
    if isinstance(former, Composed) and set(former.parts) == set(wanted):
        return former
    return Composed(former.optimizer, {name: part_of(former, name) for name in wanted})

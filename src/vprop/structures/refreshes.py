"""When the bases of which matrices follow the gradients: every so many steps, in turns."""

from __future__ import annotations

from vprop.bundles import bundles
from vprop.functional.eigenbasis import is_solved, matrix_shape
from vprop.structures.companies import Company, Pair, batches
from vprop.structures.matrices import SIDES, refresh
from vprop.structures.members import GroupStep, members_of

TURNED_TOGETHER = 1 << 24
"""Elements of matrices whose bases are refreshed in the same step: few enough for it not to stall."""


class Refreshes:
    """The turns of all matrices: those of one shape have the same, if they are small, because that saves launches."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._of: list[GroupStep] | None = None

    def due(self, stepped: list[Company], groups: list[GroupStep]) -> None:
        """Let the bases of those sides follow whose turn it is, of parameters that have just made a step."""
        turns, due = self._turns_of(groups), dict[tuple[int, bool], list[Pair]]()
        for company in stepped:
            every = company.step.group["basis_every"]
            for member, state, steps in zip(company.members, company.states, company.counts.tolist(), strict=True):
                for number in range(len(SIDES)):
                    count = steps - 1 - (len(SIDES) * turns[member.number] + number) % every
                    if count >= 0 and count % every == 0:
                        due.setdefault((number, is_solved(count // every + 1)), []).append((member, state))
        for (number, solve), pairs in sorted(due.items(), key=lambda item: item[0]):
            _refresh_side(SIDES[number], solve, pairs)

    def all(self, stepped: list[Company], solve: bool | None) -> None:
        """Let all bases follow, by eigenvectors or small turns, or as the number of steps says.

        As many refreshes are then taken to have been as there were steps for.
        """
        due: dict[bool, list[Pair]] = {}
        for company in stepped:
            pairs = list(zip(company.members, company.states, strict=True))
            if solve is not None:  # without a look at the counts, which a graph in capture could not have
                due.setdefault(solve, []).extend(pairs)
                continue
            every = company.step.group["basis_every"]
            for pair, steps in zip(pairs, company.counts.tolist(), strict=True):
                if steps > 0:
                    due.setdefault(is_solved(max(1, steps // every)), []).append(pair)
        for side in SIDES:
            for chosen, pairs in sorted(due.items(), key=lambda item: item[0]):
                _refresh_side(side, chosen, pairs)

    def _turns_of(self, groups: list[GroupStep]) -> dict[int, int]:
        """By number of a parameter."""
        if self._of is not groups:
            found = bundles(
                members_of(groups),
                kind=lambda member: (member.group_number, member.p.shape),
                size=lambda member: member.p.numel(),
                limit=lambda member: TURNED_TOGETHER,
            )
            self._turns = {member.number: turn for turn, batch in enumerate(found) for member in batch}
            self._of = groups
        return self._turns


def _refresh_side(side: str, solve: bool, pairs: list[Pair]) -> None:
    for batch in batches([pair for pair in pairs if f"{side}_basis" in pair[1]]):
        refresh([state for _, state in batch], matrix_shape(batch[0][0].p.shape), side, solve)

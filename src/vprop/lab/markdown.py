"""Markdown pages whose tables stand between comments, so that every number in them comes from a file of results.

A place is ``<!-- KIND … -->`` and ``<!-- end -->``, each on a line of its own; what is between them is drawn anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_PLACE = r"(<!-- {kind}:? ([^\n]*?) -->\n).*?(<!-- end -->)"


def places(text: str, kind: str) -> list[str]:
    """What the places of that kind ask for."""
    return [wanted for _, wanted, _ in _pattern(kind).findall(text)]


def filled(text: str, kind: str, draw: Callable[[str], str]) -> str:
    """The page with ``draw`` of what each place asks for in it; the rest stays as it is."""
    return _pattern(kind).sub(lambda place: place[1] + draw(place[2]) + place[3], text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """A table; ``align`` is the rule below the columns after the first."""
    rule = ["---"] + [align] * (len(head) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def _pattern(kind: str) -> re.Pattern[str]:
    return re.compile(_PLACE.format(kind=re.escape(kind)), re.DOTALL)

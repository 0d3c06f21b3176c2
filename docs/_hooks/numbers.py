"""Numbers in tables stay in one line: a value with its spread, or with its unit."""

from __future__ import annotations

import re

CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
INSIDE = re.compile(r"(?<=\d) (?=± ?\d|(?:ms|µs|s|h|%|GiB|MiB|GB|MB)\b|%)|(?<=±) (?=\d)")
NO_BREAK = "\u00a0"


def on_page_content(content: str, **_: object) -> str:
    """Put spaces that do not break into the cells of tables."""
    return CELL.sub(lambda cell: INSIDE.sub(NO_BREAK, cell[0]), content)

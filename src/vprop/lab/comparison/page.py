"""A page whose tables stand between markers, so that every number in it comes from a file of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vprop.lab import markdown
from vprop.lab.comparison.table import table
from vprop.lab.engine.store import read_results

NOT_RUN = "*Not run yet.*\n"


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all tasks in ``folder``, by name."""
    return read_results(folder, "vprop compare", table, but="nuts-")


def with_tables(text: str, results: dict[str, dict[str, Any]]) -> str:
    """``text`` with each table between `<!-- table: NAME -->` and `<!-- end -->` drawn anew."""
    return markdown.filled(text, "table", lambda name: table(results[name]) if name in results else NOT_RUN)


def places(text: str) -> list[str]:
    """The names of the tables that ``text`` has a place for."""
    return markdown.places(text, "table")


def new_page(results: dict[str, dict[str, Any]]) -> str:
    """A page of nothing but tables."""
    return "\n".join(f"## {result['title']}\n\n{table(result)}" for result in results.values())

"""What goes wrong in a benchmark, for the user to read."""

from __future__ import annotations

from vprop.lab.errors import LabError


class BenchError(LabError):
    """A request that cannot be met."""


class Unavailable(Exception):
    """A contender that cannot take part here; the message says why."""


EXPECTED = (ValueError, TypeError, RuntimeError, NotImplementedError, ImportError, Unavailable)
"""What a contender that cannot take part raises. Out of memory is among them."""


def matching(words: list[str], names: list[str]) -> list[str]:
    """The names that hold one of the words of ``--only``; all if there are none."""
    for word in words:
        if not any(word.lower() in name.lower() for name in names):
            raise BenchError(f"Invalid --only {word!r}: part of no contender's name. There are: {', '.join(names)}.")
    return [name for name in names if not words or any(word.lower() in name.lower() for word in words)]


def first_line(error: BaseException) -> str:
    """The gist of an error, for a cell of a table."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

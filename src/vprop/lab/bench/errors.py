"""What goes wrong in a benchmark, for the user to read."""

from __future__ import annotations

from vprop.lab.errors import LabError


class BenchError(LabError):
    """A request that cannot be met."""


class Unavailable(Exception):
    """A contender that cannot take part here; the message says why."""


def first_line(error: BaseException) -> str:
    """The gist of an error, for a cell of a table."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether it is that; on a CPU torch has no type for it."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("out of memory", "allocate memory"))

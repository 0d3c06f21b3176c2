"""Which results there are, and an error for those that the report cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vprop.lab.errors import LabError

KINDS = {
    "demo": "demo",
    "logreg": "curves",
    "long": "curves",
    "mlp": "curves",
    "explore": "explore",
    "filter": "curves",
    "memory": "memory",
    "claims": "claims",
}
"""What a result is shown as, by its name, in the order of the page."""
METRICS = ("elbo", "log_loss")


class ReportError(LabError, ValueError):
    """A result that cannot be shown; the message says which one and why."""


@contextmanager
def showing(name: str) -> Iterator[None]:
    """An older file, or a damaged one, lacks what is looked for inside; say so."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        command = "vprop demo" if name == "demo" else f"vprop reproduce {name}"
        raise ReportError(
            f"Result '{name}' is not one of this version of `vprop reproduce` ({type(error).__name__}: {error}): run "
            f"`{command}` again."
        ) from error


def without_infinities(value: Any) -> Any:
    """A copy with infinities and NaN as null."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

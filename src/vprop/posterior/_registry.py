"""The classes of posteriors by the names that files have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

_classes: dict[str, type[Posterior]] = {}


def register(cls: type[Posterior]) -> None:
    """Let files with the class's ``structure`` be read as it."""
    name = cls.structure
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__name__}.structure: is {name!r}, must be a word. Files call the structure by it.")
    former = _classes.get(name)
    # A module that is imported again, or a cell of a notebook that is run again, replaces its own class.
    if former is not None and (former.__module__, former.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"{cls.__name__}.structure: is {name!r}, must be a word of its own: files call "
            f"{former.__module__}.{former.__qualname__} so. Choose another one; or leave structure out of the class, "
            "if files are to be read as that one."
        )
    _classes[name] = cls


def find(name: str) -> type[Posterior] | None:
    """The class that files call ``name``."""
    return _classes.get(name)


def registered() -> list[type[Posterior]]:
    """All classes, in the order of their names: imports decide which is registered first."""
    return [_classes[name] for name in sorted(_classes)]

"""Results on disk, one JSON file each: written whole or not at all, so that an interrupt loses nothing.

A file's name is a key: a hash of what was asked for and of the code that answers, so that nothing is computed twice and
nothing old is taken for new.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import vprop
from vprop.files import write_text
from vprop.lab.engine import sources
from vprop.lab.errors import UsageError

OTHER_FOLDER = "Choose another folder with --out."


def key_of(spec: dict[str, Any], *modules: ModuleType, library: bool = True) -> str:
    """A name for the outcome of ``spec`` as ``modules`` and the library compute it.

    A change in their sources makes a new name. ``library=False`` is for what computes without the library.
    """
    code = {"version": vprop.__version__, "core": sources.core() if library else None}
    digest = hashlib.sha256(json.dumps(spec | code, sort_keys=True, default=str).encode())
    for module in modules:
        digest.update(sources.source(module).encode())
    return digest.hexdigest()[:24]


class Store:
    """A folder of JSON files by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> dict[str, Any] | None:
        """What was stored under ``key``; ``None`` if nothing was, or if the file is damaged."""
        try:
            return json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # no JSON, or not even text
            return None

    def save(self, key: str, result: dict[str, Any]) -> None:
        """Store a result."""
        write_json(self._path(key), result)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def require_writable(folder: Path, named: Path | None = None, remedy: str = OTHER_FOLDER) -> None:
    """Refuse a folder that results could not be written to, before anything is run; ``named`` is what the user gave."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"Cannot write to {named or folder}: {error.strerror}. {remedy}") from error


def write_json(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    """Make ``value`` the content of a file, at once, in a folder that is made if it is not there."""
    text = json.dumps(value, indent=indent, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def read_json(path: Path, command: str) -> Any:
    """A result file, which ``command`` makes."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON file ({error}): run `{command}` again.") from error


def read_results(folder: Path, command: str, check: Callable[[Any], Any], *, but: str = "") -> dict[str, Any]:
    """The results of all tasks in ``folder``, by name, without files whose names start with ``but``.

    ``command`` makes them, and ``check`` takes one apart: what it cannot is a file of another version.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        if but and path.name.startswith(but):
            continue
        try:
            results[path.stem] = read_json(path, command)
            check(results[path.stem])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UsageError(
                f"{path} is no result of this version of `{command}` ({type(error).__name__}: {error}): run it again."
            ) from error
    return results


def finite_or_none(value: float | None) -> float | None:
    """What JSON can hold: ``None`` for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None

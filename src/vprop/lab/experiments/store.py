"""Results of runs on disk, one small file each: written whole or not at all, so that an interrupt loses nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import vprop
from vprop.files import write_text
from vprop.lab.experiments import sources


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
            return json.loads(self._path(key).read_text())
        except (OSError, json.JSONDecodeError):
            return None

    def save(self, key: str, result: dict[str, Any]) -> None:
        """Store a result."""
        write_json(self._path(key), result)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def write_json(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    """Make ``value`` the content of a file, at once, in a folder that is made if it is not there."""
    text = json.dumps(value, indent=indent, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)

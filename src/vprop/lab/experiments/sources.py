"""The code that decides an outcome, as a hash, so that no stored run outlives a change of an optimizer."""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import vprop

NOT_CORE = ("lab", "integrations")
"""Folders that no optimizer imports. Modules of ``lab`` are named one by one where they matter."""


def core_files(root: Path) -> list[Path]:
    """The sources of the library in ``root``, Python and C, that may change what an experiment finds."""
    paths = [path for ending in ("py", "c") for path in root.rglob(f"*.{ending}")]
    return sorted(path for path in paths if path.relative_to(root).parts[0] not in NOT_CORE)


@lru_cache
def core() -> str:
    """A hash of the names and the contents of the library's sources."""
    root = Path(vprop.__file__).parent
    digest = hashlib.sha256()
    for path in core_files(root):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def source(module: ModuleType) -> str:
    """The text of a module."""
    return inspect.getsource(module)

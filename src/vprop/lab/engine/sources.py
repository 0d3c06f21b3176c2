"""The code that decides an outcome, so that no stored run outlives a change of it.

That is the library itself, as one hash, and of the lab the module that a job is defined in with all that it imports.
Nobody keeps a list by hand: what is imported is found in the sources.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import vprop

NOT_CORE = ("lab", "integrations")
"""Folders that no optimizer imports."""
NOT_DECIDING = ("vprop.lab.data", "vprop.lab.engine.pool", "vprop.lab.environment")
"""Of the lab. Data are known by the hash of their numbers; the others do not change a result."""


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


@lru_cache
def behind(name: str) -> tuple[ModuleType, ...]:
    """The module of that name and those of the lab that it imports, directly or through others."""
    found: dict[str, ModuleType] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found and not current.startswith(NOT_DECIDING):
            found[current] = import_module(current)
            waiting += _imported_by(found[current])
    return tuple(found[name] for name in sorted(found))


def _imported_by(module: ModuleType) -> list[str]:
    """Names of the lab's modules that a module imports; the lab writes all imports as ``from … import``."""
    names = []
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vprop.lab."):
            names.append(node.module)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vprop.lab"):
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            names += [name for name in inner if name in sys.modules]
    return names

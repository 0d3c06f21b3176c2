"""The code that decides an outcome, as a hash, so that no cached run outlives a change of an optimizer."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import vprop


@lru_cache
def core() -> str:
    """A hash of the library's source without ``lab``, whose modules are named one by one where they matter."""
    root = Path(vprop.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "lab":
            digest.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]

"""A safetensors file with a checksum over all of it, written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from vprop.files import replacing

FORMAT = "vprop-posterior-1"
"""What the metadata of every file say under ``"format"``."""
CHECKSUM = "checksum"
"""The key, among the file's metadata, of the SHA-256 of the file with zeros in the checksum's own place."""
_EMPTY = "0" * 64
_CHUNK = 1 << 22
_HEADER_LENGTH = 8
"""A file begins with the length of its header, a number of eight bytes, and the header, which is JSON."""


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace the file at ``path`` by one with these tensors and metadata."""
    metadata = {"format": FORMAT} | metadata | {CHECKSUM: _EMPTY}
    library = _safetensors()
    with replacing(path) as part:
        try:
            library.torch.save_file(_apart(tensors), str(part), metadata=metadata)
        except library.SafetensorError as error:
            raise _as_os_error(error) from error
        start = _place_of(_EMPTY, part)
        if start is None:
            raise RuntimeError(f"{path}: this version of safetensors writes a header that has no place for a checksum.")
        digest = _digest(part, start)
        with open(part, "r+b") as file:
            file.seek(start)
            file.write(digest.encode())


def read(path: Path, known: set[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that :func:`write` wrote, which is checked if it has a checksum.

    ``known`` are the keys that the metadata may have: damage can change the name of the checksum, too.
    """
    library = _safetensors()
    with open(path, "rb"):  # what the system refuses is said in its own words, with the path
        pass
    try:
        with library.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata.pop("format", None))
            _verify(path, metadata, known)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
    except library.SafetensorError as error:
        raise damaged(path, f"it cannot be read as a safetensors file ({error})") from error
    metadata.pop(CHECKSUM, None)
    return tensors, metadata


def damaged(path: Path, what: str) -> ValueError:
    """The message for a file that is not what was written."""
    return ValueError(
        f"{path}: {what}. The file was cut short or changed after it was written, or it is no posterior: take another "
        "copy of it, or write it again with posterior.save(path)."
    )


def _check_format(path: Path, found: str | None) -> None:
    if found != FORMAT:
        raise ValueError(
            f"{path}: not a posterior of this library (format {found!r}, must be {FORMAT!r}). Write it with "
            "posterior.save(path)."
        )


def _verify(path: Path, metadata: dict[str, str], known: set[str]) -> None:
    """Refuse a file of which a single bit has changed. Files of old versions have no checksum."""
    strange = sorted(set(metadata) - known - {CHECKSUM})
    if strange:
        raise damaged(path, f"its metadata has the unknown entries {strange} (a newer version of vprop may know them)")
    if CHECKSUM not in metadata:
        return
    start = _place_of(metadata[CHECKSUM], path)
    if start is None or _digest(path, start) != metadata[CHECKSUM]:
        raise damaged(path, "its checksum is wrong")


def _place_of(checksum: str, path: Path) -> int | None:
    """Where in the file the checksum stands."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        header = file.read(length)
    key = f'"{CHECKSUM}":"'.encode()  # inside of the settings, which are JSON in JSON, quotes have a backslash
    entry = key + checksum.encode() + b'"'
    if header.count(entry) != 1:
        return None
    return _HEADER_LENGTH + header.index(entry) + len(key)


def _digest(path: Path, start: int) -> str:
    """The SHA-256 of a file with zeros in the place of its checksum, which begins at ``start``."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(start))
        digest.update(_EMPTY.encode())
        file.seek(start + len(_EMPTY))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each contiguous and in memory of its own: safetensors takes no others."""
    seen: set[Any] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        place = (tensor.device, tensor.untyped_storage().data_ptr())
        result[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return result


def _as_os_error(error: Exception) -> Exception:
    """What the system said, which safetensors packs into a text; its own errors as they are."""
    found = re.search(r"(?:os error |code: )(\d+)", str(error))
    if found is None:
        return OSError(errno.EIO, str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])))


def _safetensors() -> Any:
    """The package, which is optional, as is NumPy, without which it takes no tensors."""
    for package in ("safetensors", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"Saving and loading a posterior needs {package}: pip install {package}")
    import safetensors.torch

    return safetensors

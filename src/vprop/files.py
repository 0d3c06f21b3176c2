"""Files of the user that are replaced as a whole: whatever happens, there is the old one or the new one."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LONGEST_STEM = 100
"""Of the old name, what the temporary one repeats: together they must fit into a name."""


def path_of(path: Any, where: str) -> Path:
    """``path`` as a path; ``where`` names the argument for the message, e.g. ``"save(path)"``."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        name = ""
    if not name:
        raise TypeError(
            f"{where}: got {path!r} of type {type(path).__name__}, must be the name of a file, as a string or a "
            'pathlib.Path. Pass e.g. "posterior.safetensors".'
        )
    return Path(name)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside ``path`` for the caller to fill, which takes its place when the block ends.

    Its content is on the disk before it does, so that a crash of the process or of the machine leaves the old file or
    the new one. When the block ends by an exception the old file stays, and nothing is left beside it. The mode of an
    old file is kept; a new one has that of any new file. A link is followed to its target. Every ``OSError`` names
    ``path``, or its folder where that is what is missing.
    """
    part: Path | None = None
    try:
        target = _target(path)
        part = target.with_name(f".{target.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}.part")
        mode = _create(part, target)
        yield part
        _finish(part, mode)
        os.replace(part, target)
    except BaseException as error:
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _naming(error, path) from error
        raise
    with suppress(OSError):  # let the new name survive a crash of the machine, too, where the system can be asked
        _sync(target.parent, os.O_RDONLY)


def write_text(path: Path, text: str) -> None:
    """Make ``text``, in UTF-8, the content of a file, at once."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _target(path: Path) -> Path:
    """The file that ``path`` leads to, which is a plain one or not there yet."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a link that leads to itself has no end
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "Not a file that can be replaced (a device, a pipe)")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def _create(part: Path, target: Path) -> int:
    """Make an empty file; returns the mode that it is to have in the place of ``target``."""
    old_mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    # Nobody may read, while it is written, what nobody could read before. A new file has what the umask leaves.
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old_mode is None else 0o600)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode) if old_mode is None else old_mode
    finally:
        os.close(handle)


def _finish(part: Path, mode: int) -> None:
    """Set the mode and wait until the content is on the disk."""
    # The caller may have put another file in the place of the one that was made here: go by the name.
    os.chmod(part, mode | stat.S_IWUSR)
    _sync(part, os.O_RDWR)
    os.chmod(part, mode)


def _sync(path: Path, flags: int) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _naming(error: OSError, path: Path) -> OSError:
    """The same error about ``path``, of which alone the user knows, or about its folder, if there is none."""
    folder = Path(os.path.realpath(path)).parent
    if error.errno == errno.ENOENT and not folder.exists():
        return FileNotFoundError(errno.ENOENT, "There is no such folder; make it first", str(folder))
    return OSError(error.errno or errno.EIO, error.strerror or str(error), str(path))

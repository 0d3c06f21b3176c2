"""Where data lie: the folder the caller names, then ``$VPROP_DATA``, then the user's cache, then the public home."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vprop.lab.data.download import download_file
from vprop.lab.data.errors import DataError, DataNotFound, WrongChecksum
from vprop.lab.data.registry import DataFile, spec

Source = Literal["file", "cache", "downloaded", "scikit-learn"]


@dataclass(frozen=True)
class Located:
    """A data set that is there: its files in the order of the registry, and the least direct of their sources."""

    paths: tuple[Path, ...]
    source: Source


@dataclass(frozen=True)
class _Place:
    label: str
    folder: Path | None
    source: Source

    def describe(self) -> str:
        if self.folder is None:
            return self.label
        return f"{self.label} {self.folder}" + ("" if self.folder.is_dir() else " (no such folder)")


def cache_dir() -> Path:
    """The folder downloads go to: ``$XDG_CACHE_HOME/vprop``, or ``~/.cache/vprop``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG rules ignore a relative path
        return Path(given) / "vprop"
    try:
        return Path.home() / ".cache" / "vprop"
    except RuntimeError as error:
        raise DataError("This user has no home folder for the data cache. Set XDG_CACHE_HOME to a folder.") from error


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    on_download: Callable[[DataFile], None] | None = None,
) -> Located:
    """Find the files of a data set, downloading what is missing into the cache.

    Every file is checked against its checksum, so that a result never rests on a file that is almost right.
    ``on_download`` is told of each file before its download begins.
    """
    entry = spec(name)
    places = _places(data_dir)
    if not entry.files:
        return Located((), "scikit-learn")
    paths: list[Path] = []
    sources: set[Source] = set()
    for file in entry.files:
        path, source = _find(file, places)
        if path is None:
            path, source = cache_dir() / file.folder / file.name, "downloaded"
            failure = "was not tried (download=False)"
            if download:
                if on_download is not None:
                    on_download(file)
                failure = download_file(file, path)
            if failure:
                raise DataNotFound(_not_found(name, file, places, failure))
        paths.append(path)
        sources.add(source)
    order: tuple[Source, ...] = ("downloaded", "cache", "file")
    return Located(tuple(paths), next(source for source in order if source in sources))


def locate(name: str, file: DataFile, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """A file of a set that is not downloaded, wherever it lies."""
    places = _places(data_dir)
    path, _ = _find(file, places)
    if path is None:
        looked = ", ".join(place.describe() for place in places)
        raise DataNotFound(
            f"Data set {name!r} not found: no file {file.folder}/{file.name}. Looked in: {looked}. It is made from "
            f"what is at {file.url}; put it into a folder given with --data-dir or $VPROP_DATA."
        )
    return path


def _places(data_dir: str | os.PathLike[str] | None) -> tuple[_Place, ...]:
    given = None if data_dir is None else Path(data_dir).expanduser()
    if given is not None and not given.is_dir():
        problem = "is not a folder" if given.exists() else "does not exist"
        raise DataError(f"data_dir={str(given)!r} {problem}. Give --data-dir an existing folder, or leave it out.")
    variable = os.environ.get("VPROP_DATA", "")
    return (
        _Place("--data-dir" if given else "--data-dir (not given)", given, "file"),
        _Place(
            "$VPROP_DATA" if variable else "$VPROP_DATA (not set)",
            Path(variable).expanduser() if variable else None,
            "file",
        ),
        _Place("the cache", cache_dir(), "cache"),
    )


def _find(file: DataFile, places: tuple[_Place, ...]) -> tuple[Path | None, Source]:
    for place in places:
        if place.folder is None:
            continue
        for path in (place.folder / file.folder / file.name, place.folder / file.name):
            if os.path.isfile(path):  # unlike Path.is_file, False for a folder that may not be read
                _check(file, path, in_cache=place.source == "cache")
                return path, place.source
    return None, "downloaded"


def _check(file: DataFile, path: Path, *, in_cache: bool) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}. Make it readable, or remove it.") from error
    if found in (file.sha256, *file.also_sha256):
        return
    remedy = "it will be downloaded again" if in_cache else f"the published file is at {file.url}"
    raise WrongChecksum(
        f"{path} has the wrong checksum: expected sha256 {file.sha256}, found {found}. Remove or replace it; {remedy}.",
        path,
    )


def _not_found(name: str, file: DataFile, places: tuple[_Place, ...], failure: str) -> str:
    looked = ", ".join(place.describe() for place in places)
    return (
        f"Data set {name!r} not found: no file {file.name}. Looked in: {looked}. "
        f"The download from {file.url} {failure}. "
        "Get the file from there and put it into a folder given with --data-dir or $VPROP_DATA, "
        "or use breast_cancer, which ships with scikit-learn."
    )

"""What goes wrong with data, as one family, so that a command can turn all of it into one line."""

from __future__ import annotations

from pathlib import Path

from vprop.lab.errors import LabError


class DataError(LabError):
    """Data that cannot be used; the message says what was found, what was expected and what to do."""


class DataNotFound(DataError):
    """A data set that is in none of the places and could not be downloaded."""


class WrongChecksum(DataError):
    """A file that is there but is not the file the data set was registered with."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path

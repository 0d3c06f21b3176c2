"""The data of the experiments: which sets there are, where they lie, and how they are read."""

from __future__ import annotations

from vprop.lab.data.errors import DataError, DataNotFound, WrongChecksum
from vprop.lab.data.find import Located, Source, cache_dir, fetch
from vprop.lab.data.load import Dataset, load
from vprop.lab.data.registry import DATASETS, DataFile, Spec, spec

__all__ = [
    "DATASETS",
    "DataError",
    "DataFile",
    "DataNotFound",
    "Dataset",
    "Located",
    "Source",
    "Spec",
    "WrongChecksum",
    "cache_dir",
    "fetch",
    "load",
    "spec",
]

"""A reader of the idx format, in which MNIST and its successors are published."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib

import torch
from torch import Tensor

from vprop.lab.data.errors import DataError

_UNSIGNED_BYTES = 0x08


def parse_idx(path: str | os.PathLike[str], num_dims: int) -> Tensor:
    """The uint8 array of a gzipped idx file with ``num_dims`` dimensions."""
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Cannot read {os.fspath(path)}: {error}. Expected a whole gzip file.") from error
    header = 4 + 4 * num_dims
    magic = bytes((0, 0, _UNSIGNED_BYTES, num_dims))
    if content[:4] != magic or len(content) < header:
        raise DataError(
            f"{os.fspath(path)} starts with {content[:4].hex() or 'nothing'}: expected {magic.hex()}, "
            f"an idx file of bytes with {num_dims} dimension(s)."
        )
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    size = len(content) - header
    if size != math.prod(shape):
        raise DataError(f"{os.fspath(path)} holds {size} bytes: expected {math.prod(shape)} for shape {shape}.")
    # bytearray: torch warns about memory that it may not write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)

"""A strict reader of LIBSVM's text format, ``label index:value index:value …``.

Strict, because a file that is cut short or belongs to something else would otherwise load as plausible numbers.
"""

from __future__ import annotations

import math
import os
from array import array
from pathlib import Path

import torch
from torch import Tensor

from vprop.lab.data.errors import DataError, shorten


def parse_libsvm(path: str | os.PathLike[str], num_features: int) -> tuple[Tensor, Tensor]:
    """Rows (dense, float64) and labels (float64, as in the file).

    ``num_features`` must be given: a file need not use its last features, so it does not tell how many there are.
    Blank lines and everything after ``#`` are skipped.
    """
    if num_features < 1:
        raise ValueError(f"num_features={num_features}: must be at least 1. Give the number of columns.")
    labels = array("d")
    positions = array("q")  # into the flattened matrix
    values = array("d")
    start = 0
    for number, line in enumerate(_lines(path), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        try:
            label = _number(tokens[0])
            last = 0
            for token in tokens[1:]:
                index_text, _, value_text = token.partition(":")
                index = int(index_text)
                if not last < index <= num_features or not index_text.isdigit():
                    raise ValueError
                positions.append(start + index)
                values.append(_number(value_text))
                last = index
        except ValueError:
            raise DataError(f"{os.fspath(path)}, line {number}: {_explain(tokens, num_features)}.") from None
        labels.append(label)
        start += num_features
    if not labels:
        raise DataError(f"{os.fspath(path)} is empty: expected at least one line 'label index:value ...'.")
    x = torch.zeros(len(labels) * num_features, dtype=torch.float64)
    if values:
        x[torch.tensor(positions) - 1] = torch.tensor(values, dtype=torch.float64)
    return x.view(-1, num_features), torch.tensor(labels, dtype=torch.float64)


def _lines(path: str | os.PathLike[str]) -> list[str]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {os.fspath(path)}: {error.strerror}.") from error
    try:
        return content.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{os.fspath(path)}, line {number}: byte {content[error.start]:#04x} is not ASCII text. Expected LIBSVM's "
            "text format; unpack the file if it is compressed."
        ) from None


def _number(text: str) -> float:
    """A finite float as C would read it: Python's underscores are not part of the format."""
    value = float(text)
    if not math.isfinite(value) or "_" in text:
        raise ValueError
    return value


def _is_number(text: str) -> bool:
    try:
        _number(text)
    except ValueError:
        return False
    return True


def _explain(tokens: list[str], num_features: int) -> str:
    """What is wrong with a line. Apart from the loop above, which has to be fast."""
    if not _is_number(tokens[0]):
        return f"bad label {shorten(tokens[0])}: expected a finite number first, such as +1 or -1"
    last = 0
    for token in tokens[1:]:
        index_text, colon, value_text = token.partition(":")
        if not colon:
            return f"no colon in {shorten(token)}: expected index:value"
        if not index_text.isdigit():
            return f"bad index in {shorten(token)}: expected a whole number from 1 to {num_features} before the colon"
        # By length first: Python refuses to convert thousands of digits.
        digits = index_text.lstrip("0") or "0"
        index = int(digits) if len(digits) <= 18 else num_features + 1
        if index < 1:
            return f"index below 1 in {shorten(token)}: expected 1 to {num_features} (LIBSVM counts from 1)"
        if index > num_features:
            return f"index above num_features={num_features} in {shorten(token)}: expected 1 to {num_features}"
        if index <= last:
            return f"index not increasing in {shorten(token)}: expected an index above {last}, the one before it"
        if not _is_number(value_text):
            return f"bad value in {shorten(token)}: expected a finite number after the colon"
        last = index
    return f"cannot be read: {shorten(' '.join(tokens))}"

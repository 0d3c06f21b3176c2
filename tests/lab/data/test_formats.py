"""The formats of files: what is written is read back, and what is malformed says so."""

from __future__ import annotations

import gzip
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vprop.lab.data import DataError
from vprop.lab.data.idx import parse_idx
from vprop.lab.data.load import parse_libsvm

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(st.tuples(FINITE, st.dictionaries(st.integers(1, 9), FINITE, max_size=9)), min_size=1, max_size=8)


@given(rows=ROWS)
def test_what_is_written_is_read_back(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "round-trip"
    path.write_text(
        "".join(f"{label!r} " + " ".join(f"{i}:{v!r}" for i, v in sorted(row.items())) + "\n" for label, row in rows)
    )
    x, y = parse_libsvm(path, 9)
    assert y.tolist() == [label for label, _ in rows]
    assert x.tolist() == [[row.get(i, 0.0) for i in range(1, 10)] for _, row in rows]


def _idx(path, content):
    path.write_bytes(gzip.compress(content))
    return path


def test_idx(tmp_path):
    content = bytes((0, 0, 8, 2)) + struct.pack(">2I", 2, 3) + bytes(range(6))
    assert parse_idx(_idx(tmp_path / "file", content), 2).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file starts with nothing: expected 00000801, an idx file of bytes with 1 dimension"),
        (bytes((0, 0, 8, 3)) + bytes(12), "file starts with 00000803: expected 00000801"),
        (bytes((0, 0, 8, 1)), "file starts with 00000801: expected"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 3, 7)), r"file holds 1 bytes: expected 3 for shape \(3,\)"),
    ],
)
def test_a_malformed_idx_file(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        parse_idx(_idx(tmp_path / "file", content), 1)


def test_an_idx_file_that_is_not_gzip_or_cut_short(tmp_path):
    (tmp_path / "file").write_bytes(b"plain")
    with pytest.raises(DataError, match=r"Cannot read .*file: Not a gzipped file .*Expected a whole gzip file\."):
        parse_idx(tmp_path / "file", 1)
    (tmp_path / "file").write_bytes(gzip.compress(bytes(100))[:-10])
    with pytest.raises(DataError, match=r"Cannot read .*file: Compressed file ended"):
        parse_idx(tmp_path / "file", 1)

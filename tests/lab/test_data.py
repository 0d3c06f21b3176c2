"""The data sets: finding, checking, downloading, parsing, and the command that shows them."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vprop.lab import data
from vprop.lab.cli import app, main
from vprop.lab.data import DataError, DataFile, DataNotFound, Spec, WrongChecksum
from vprop.lab.data import download as download_module
from vprop.lab.data.idx import parse_idx
from vprop.lab.data.load import parse_libsvm

# The machine's own settings, read before the fixture below hides them.
REAL_DATA = Path(os.environ.get("VPROP_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")

TRAIN, TEST = b"+1 1:1 3:0.5 \n-1 2:1 \n", b"-1 3:1 \n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no $VPROP_DATA, and addresses that nothing answers: no test sees the user's files or the net."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("VPROP_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("COLUMNS", "400")  # tables that do not break paths
    for name, entry in data.DATASETS.items():
        files = tuple(dataclasses.replace(file, url=f"http://127.0.0.1:1/{file.name}") for file in entry.files)
        monkeypatch.setitem(data.DATASETS, name, dataclasses.replace(entry, files=files))
    return tmp_path / "xdg" / "vprop"


@pytest.fixture
def tiny(monkeypatch):
    """The files of a1a replaced by a few rows with their own checksums."""
    return _register(monkeypatch, "http://127.0.0.1:1/")


def _register(monkeypatch, base):
    files = tuple(
        DataFile(name, "libsvm", base + name, hashlib.sha256(content).hexdigest())
        for name, content in (("a1a", TRAIN), ("a1a.t", TEST))
    )
    entry = Spec("a1a", 2, 1, (123,), "tests", files)
    monkeypatch.setitem(data.DATASETS, "a1a", entry)
    return entry


def _write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a1a").write_bytes(contents.get("train", TRAIN))
    (folder / "a1a.t").write_bytes(contents.get("test", TEST))
    return folder


def _files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


# -- the registry --------------------------------------------------------------------------------------------


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"Unknown data set 'a2a'\. Must be one of: a1a, australian, breast_cancer, f"):
        data.load("a2a")


def test_every_file_has_a_checksum_and_a_public_address():
    from vprop.lab.data.registry import _SPECS

    files = [file for entry in _SPECS for file in entry.files]
    assert len(files) == 7
    for file in files:
        assert file.url.startswith("http")
        assert file.url.endswith("/" + file.name)
        assert all(len(bytes.fromhex(digest)) == 32 for digest in (file.sha256, *file.also_sha256))


def test_every_data_set_has_a_loader():
    from vprop.lab.data.load import _LOADERS

    assert set(_LOADERS) == set(data.DATASETS)


# -- finding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["libsvm", "."])
def test_data_dir_holds_the_files_directly_or_below_their_folder(tmp_path, tiny, below):
    _write(tmp_path / "given" / below)
    loaded = data.load("a1a", tmp_path / "given", download=False)
    assert loaded.source == "file"
    assert loaded.train_x.shape == (2, 123)
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    assert loaded.train_x[0].nonzero().flatten().tolist() == [0, 2]
    assert loaded.train_y.tolist() == [1.0, 0.0]
    assert loaded.test_y.tolist() == [0.0]


def test_order_of_the_places(tmp_path, tiny, cache, monkeypatch):
    folders = {name: _write(tmp_path / name) for name in ("given", "variable")}
    monkeypatch.setenv("VPROP_DATA", str(folders["variable"]))
    _write(cache / "libsvm")
    assert data.fetch("a1a", folders["given"]).paths[0] == folders["given"] / "a1a"
    assert data.fetch("a1a").paths[0] == folders["variable"] / "a1a"
    monkeypatch.setenv("VPROP_DATA", str(tmp_path / "missing"))
    located = data.fetch("a1a")
    assert located.paths == (cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t")
    assert located.source == "cache"


def test_a_place_may_hold_some_of_the_files(tmp_path, tiny, cache):
    """The source is then the least direct one."""
    folder = _write(tmp_path / "given")
    _write(cache)
    (folder / "a1a.t").unlink()
    located = data.fetch("a1a", folder, download=False)
    assert located.paths == (folder / "a1a", cache / "a1a.t")
    assert located.source == "cache"


def test_a_tilde_is_the_home_folder(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "given")
    assert data.fetch("a1a", "~/given").paths[0] == tmp_path / "given" / "a1a"
    monkeypatch.setenv("VPROP_DATA", "~/given")
    assert data.fetch("a1a").paths[0] == tmp_path / "given" / "a1a"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_an_absolute_xdg_folder_the_cache_is_in_the_home_folder(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.cache_dir() == tmp_path / ".cache" / "vprop"


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match=r"no home folder for the data cache. Set XDG_CACHE_HOME"):
        data.cache_dir()


@pytest.mark.parametrize("name", ["a1a", "breast_cancer"])
def test_a_data_dir_that_is_not_there_is_an_error_of_its_own(tmp_path, name):
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match=r"data_dir='.*missing' does not exist\. Give --data-dir an existing") as info:
        data.load(name, missing)
    assert not isinstance(info.value, DataNotFound)
    missing.write_text("")
    with pytest.raises(DataError, match=r"data_dir='.*missing' is not a folder\. Give --data-dir"):
        data.load(name, missing)


def test_a_wrong_checksum_in_a_folder(tmp_path, tiny):
    folder = _write(tmp_path / "given", test=TEST[:-1])
    with pytest.raises(WrongChecksum) as info:
        data.load("a1a", folder)
    found = hashlib.sha256(TEST[:-1]).hexdigest()
    assert str(info.value) == (
        f"{folder / 'a1a.t'} has the wrong checksum: expected sha256 {tiny.files[1].sha256}, found {found}. "
        "Remove or replace it; the published file is at http://127.0.0.1:1/a1a.t."
    )
    assert info.value.path == folder / "a1a.t"


def test_a_wrong_checksum_in_the_cache(tiny, cache):
    _write(cache, train=b"")
    with pytest.raises(WrongChecksum, match="Remove or replace it; it will be downloaded again"):
        data.load("a1a")


def test_another_edition_of_a_file(tmp_path, tiny, monkeypatch):
    file = dataclasses.replace(tiny.files[0], sha256="0" * 64, also_sha256=(tiny.files[0].sha256,))
    monkeypatch.setitem(data.DATASETS, "a1a", dataclasses.replace(tiny, files=(file, tiny.files[1])))
    assert data.load("a1a", _write(tmp_path / "given")).source == "file"


def test_a_file_that_cannot_be_read(tmp_path, tiny, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    folder = _write(tmp_path / "given")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"Cannot read .*a1a: Permission denied. Make it readable, or remove it."):
        data.load("a1a", folder)


def test_not_found_names_the_places_and_the_remedy(tmp_path, tiny, cache, monkeypatch):
    with pytest.raises(DataNotFound) as info:
        data.load("a1a", download=False)
    assert str(info.value) == (
        "Data set 'a1a' not found: no file a1a. Looked in: --data-dir (not given), $VPROP_DATA (not set), "
        f"the cache {cache} (no such folder). "
        "The download from http://127.0.0.1:1/a1a was not tried (download=False). "
        "Get the file from there and put it into a folder given with --data-dir or $VPROP_DATA, "
        "or use breast_cancer, which ships with scikit-learn."
    )
    monkeypatch.setenv("VPROP_DATA", str(tmp_path / "variable"))
    (tmp_path / "given").mkdir()
    cache.mkdir(parents=True)
    with pytest.raises(DataNotFound) as info:
        data.load("a1a", tmp_path / "given", download=False)
    assert (
        f"Looked in: --data-dir {tmp_path / 'given'}, $VPROP_DATA {tmp_path / 'variable'} (no such folder), "
        f"the cache {cache}. " in str(info.value)
    )


# -- downloading ---------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requested.append((self.path, self.headers["User-Agent"]))
        answer = self.server.answers.get(self.path)
        if answer is None:
            self.send_error(404)
            return
        content, announced = answer
        self.send_response(200)
        self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A web server on this machine as the public home of a1a."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.requested = []
    server.answers = {"/a1a": (TRAIN, len(TRAIN)), "/a1a.t": (TEST, len(TEST))}
    _register(monkeypatch, f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_download_into_the_cache_once(server, cache):
    loaded = data.load("a1a")
    assert loaded.source == "downloaded"
    assert loaded.train_x.shape == (2, 123)
    assert _files(cache) == [cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t"]
    assert (cache / "libsvm" / "a1a").read_bytes() == TRAIN
    assert (cache / "libsvm" / "a1a").stat().st_mode & 0o777 == 0o644
    assert [path for path, _ in server.requested] == ["/a1a", "/a1a.t"]
    assert all(agent.startswith("vprop/") for _, agent in server.requested)
    assert data.load("a1a").source == "cache"
    assert len(server.requested) == 2


def test_download_with_a_wrong_checksum(server, cache):
    server.answers["/a1a"] = (TEST, len(TEST))
    expected, found = (hashlib.sha256(content).hexdigest() for content in (TRAIN, TEST))
    with pytest.raises(DataNotFound, match=f"gave the wrong checksum: expected sha256 {expected}, found {found}"):
        data.load("a1a")
    assert _files(cache) == []


def test_download_that_is_not_there(server, cache):
    del server.answers["/a1a.t"]
    with pytest.raises(DataNotFound, match=r"no file a1a\.t\. .*/a1a\.t failed: HTTP 404 Not Found\. Get the file"):
        data.load("a1a")
    assert _files(cache) == [cache / "libsvm" / "a1a"]


def test_download_that_breaks_off(server, cache):
    server.answers["/a1a"] = (TRAIN[:5], len(TRAIN))
    with pytest.raises(
        DataNotFound, match=rf"failed: (the connection closed after 5 of {len(TRAIN)} bytes|Incomplete)"
    ):
        data.load("a1a")
    assert _files(cache) == []


def test_download_that_is_interrupted(server, cache, monkeypatch):
    def interrupt(path, content):
        assert path.suffix == ".part"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.load("a1a")
    assert _files(cache) == []


def test_download_without_an_answer(server, cache, monkeypatch):
    """A server that accepts the connection and falls silent after the headers."""
    release = threading.Event()

    def hang(handler):
        handler.send_response(200)
        handler.end_headers()
        release.wait(10)

    monkeypatch.setattr(_Handler, "do_GET", hang)
    monkeypatch.setattr(download_module, "TIMEOUT_S", 0.2)
    try:
        with pytest.raises(DataNotFound, match=r"failed: no answer within 0\.2 s\."):
            data.load("a1a")
    finally:
        release.set()
    assert _files(cache) == []


def test_the_timeout_is_twenty_seconds():
    assert download_module.TIMEOUT_S == 20


def test_download_from_something_that_speaks_no_http(server, monkeypatch):
    monkeypatch.setattr(_Handler, "do_GET", lambda handler: handler.wfile.write(b"hello\r\n"))
    with pytest.raises(DataNotFound, match="failed: BadStatusLine hello"):
        data.load("a1a")


def test_download_without_a_network(tiny, cache):
    with pytest.raises(DataNotFound, match=r"from http://127\.0\.0\.1:1/a1a failed: .*[Cc]onnection refused"):
        data.load("a1a")
    assert not cache.exists()


def test_download_into_a_cache_that_cannot_be_written(server, cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(DataNotFound, match=r"failed: .*vprop"):
        data.load("a1a")


# -- the LIBSVM format ---------------------------------------------------------------------------------------


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


# -- the idx format ------------------------------------------------------------------------------------------


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


# -- the data sets -------------------------------------------------------------------------------------------


def _real_data(*files):
    """The folder of the published files; skips when one of those named is not on this machine."""
    missing = [file for file in files if not (REAL_DATA / file).is_file()]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} in $VPROP_DATA or ../shared/data (looked in {REAL_DATA})")
    return REAL_DATA


def _check_against_registry(loaded):
    entry = data.DATASETS[loaded.name]
    assert loaded.train_x.shape == (entry.train_rows, *entry.shape)
    assert loaded.test_x.shape == (entry.test_rows, *entry.shape)
    assert loaded.train_y.shape == (entry.train_rows,)
    assert loaded.test_y.shape == (entry.test_rows,)


def test_a1a():
    from sklearn.datasets import load_svmlight_file

    real_data = _real_data("libsvm/a1a", "libsvm/a1a.t")
    loaded = data.load("a1a", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.source == "file"
    assert loaded.train_y.sum() == 395
    assert loaded.test_y.sum() == 7446
    for part, x, y in (("a1a", loaded.train_x, loaded.train_y), ("a1a.t", loaded.test_x, loaded.test_y)):
        rows, labels = load_svmlight_file(str(real_data / "libsvm" / part), n_features=123)
        assert (x.numpy() == rows.toarray()).all()
        assert (y.numpy() == (labels > 0)).all()


def test_australian():
    real_data = _real_data("libsvm/australian_scale")
    loaded = data.load("australian", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    assert loaded.train_y.sum() + loaded.test_y.sum() == 307
    everything = torch.cat([loaded.train_x, loaded.test_x])
    assert (everything[:, -1] == 1).all()
    assert (everything.amin(0)[:14] == -1).all()
    assert (everything.amax(0) == 1).all()
    rows, _ = parse_libsvm(real_data / "libsvm" / "australian_scale", 14)
    assert sorted(everything[:, :14].tolist()) == sorted(rows.tolist())  # each row once


def test_the_other_edition_of_australian_is_that_of_svm_scale():
    """A public copy fits svm-scale with values held in float32; the checksum is that of this recipe."""
    real_data = _real_data("libsvm/australian")
    rows, labels = parse_libsvm(real_data / "libsvm" / "australian", 14)
    low, high = rows.amin(0), rows.amax(0)
    single, low32, high32 = (tensor.float().double() for tensor in (rows, low, high))
    scaled = torch.where(rows == low, -1, torch.where(rows == high, 1, 2 * (single - low32) / (high32 - low32) - 1))
    text = "".join(
        f"{int(label):+d} " + "".join(f"{i}:{v:g} " for i, v in enumerate(row, 1) if v) + "\n"
        for label, row in zip(labels.tolist(), scaled.tolist(), strict=True)
    )
    (file,) = data.DATASETS["australian"].files
    assert (hashlib.sha256(text.encode()).hexdigest(),) == file.also_sha256


def test_fashion_mnist():
    real_data = _real_data(*(f"fashion_mnist/{file.name}" for file in data.DATASETS["fashion_mnist"].files))
    loaded = data.load("fashion_mnist", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.train_x.dtype == loaded.test_x.dtype == torch.float32
    assert loaded.train_x.amin() == 0
    assert loaded.train_x.amax() == 1
    assert loaded.train_y.bincount().tolist() == [6000] * 10
    assert loaded.test_y.bincount().tolist() == [1000] * 10
    assert float(loaded.train_x.mean()) == pytest.approx(0.2860, abs=1e-4)  # the published mean


def test_breast_cancer_is_standardised_by_its_training_rows():
    loaded = data.load("breast_cancer", download=False)
    _check_against_registry(loaded)
    assert loaded.source == "scikit-learn"
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    features = loaded.train_x[:, :-1]
    torch.testing.assert_close(features.mean(0), torch.zeros(30, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(features.var(0, correction=0), torch.ones(30, dtype=torch.float64))
    assert loaded.test_x[:, :-1].mean(0).abs().max() > 1e-3
    assert (loaded.train_x[:, -1] == 1).all()
    assert (loaded.test_x[:, -1] == 1).all()
    assert loaded.train_y.sum() + loaded.test_y.sum() == 357


def test_the_seed_chooses_the_split_and_nothing_else_does():
    first = data.load("breast_cancer")
    torch.rand(1)
    again, other = data.load("breast_cancer"), data.load("breast_cancer", seed=1)
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.test_y, again.test_y)
    assert not torch.equal(first.train_y, other.train_y)


def test_the_split_never_changes():
    """It is part of every reported number."""
    from vprop.lab.data.load import _halves

    assert [half.tolist() for half in _halves(10, 0)] == [[2, 8, 4, 9, 1], [6, 7, 3, 0, 5]]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=f"seed={seed}: must be from 0 to"):
        data.load("breast_cancer", seed=seed)


def test_breast_cancer_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="breast_cancer needs scikit-learn: pip install scikit-learn"):
        data.load("breast_cancer")


# -- the command ---------------------------------------------------------------------------------------------


def _run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def _row(result, name):
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_list_shows_where_each_is_without_downloading(server, tmp_path, cache):
    result = _run("list")
    assert result.exit_code == 0
    assert _row(result, "a1a") == ["a1a", "2 + 1", "123", "tests", "not found"]
    assert _row(result, "breast_cancer")[-1] == "ships with scikit-learn"
    assert _row(result, "fashion_mnist")[1:3] == ["60000 + 10000", "28×28"]
    assert server.requested == []
    folder = _write(tmp_path / "given [1]" / "libsvm")  # brackets: rich would take them for markup
    assert _row(_run("list", "--data-dir", folder.parent), "a1a")[-1] == f"{folder} (file)"
    _write(cache)
    assert _row(_run("list"), "a1a")[-1] == f"{cache} (cache)"


def test_list_shows_a_wrong_checksum_and_fails(tiny, tmp_path):
    folder = _write(tmp_path / "given", train=b"")
    result = _run("list", "--data-dir", folder)
    assert result.exit_code == 1
    assert _row(result, "a1a")[-1] == f"wrong checksum: {folder / 'a1a'}"
    assert _row(result, "fashion_mnist")[-1] == "not found"
    assert result.stderr.startswith(f"Error: {folder / 'a1a'} has the wrong checksum: expected sha256")
    assert result.stderr.count("\n") == 1


def test_fetch_downloads_and_says_where(server, cache):
    result = _run("fetch", "a1a", "breast_cancer", "a1a")
    assert result.exit_code == 0
    assert result.stdout == f"a1a: {cache / 'libsvm'} (downloaded)\nbreast_cancer: ships with scikit-learn\n"
    assert result.stderr.startswith(f"Downloading http://127.0.0.1:{server.server_port}/a1a\n")
    assert _run("fetch", "a1a").stdout == f"a1a: {cache / 'libsvm'} (cache)\n"


def test_fetch_all_says_what_is_missing_after_trying_everything(server, cache):
    result = _run("fetch")
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["a1a", "breast_cancer"]
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 2
    assert errors[0].startswith("Error: Data set 'australian' not found: no file australian_scale. Looked in: --data-")
    assert errors[1].startswith("Error: Data set 'fashion_mnist' not found: no file train-images-idx3-ubyte.gz. ")
    assert _files(cache) == [cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t"]


def test_fetch_of_an_unknown_name_downloads_nothing(server):
    result = _run("fetch", "a1a", "spam")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: Unknown data set 'spam'. Must be one of: a1a, australian, breast_cancer, fashion_mnist.\n"
    )
    assert server.requested == []


@pytest.mark.parametrize("command", ["list", "fetch"])
def test_a_wrong_data_dir_is_one_line(command, tmp_path):
    result = _run(command, "--data-dir", tmp_path / "missing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"Error: data_dir={str(tmp_path / 'missing')!r} does not exist. "
        "Give --data-dir an existing folder, or leave it out.\n"
    )


def test_a_terminal_without_the_signs_gets_question_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr("sys.argv", ["vprop", "data", "list"])
    with pytest.raises(SystemExit):
        main()
    assert b"28?28" in written.getvalue()


def test_the_command_line_starts_without_the_heavy_packages():
    check = "import sys, vprop.lab.cli; print({'sklearn', 'matplotlib', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr

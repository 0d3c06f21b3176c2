"""Files that come from their public home, checked."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from tests.lab.data.few_rows import TEST, TRAIN, Handler, files
from vprop.lab import data
from vprop.lab.data import DataNotFound
from vprop.lab.data import download as download_module


def test_download_into_the_cache_once(server, cache):
    loaded = data.load("a1a")
    assert loaded.source == "downloaded"
    assert loaded.train_x.shape == (2, 123)
    assert files(cache) == [cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t"]
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
    assert files(cache) == []


def test_download_that_is_not_there(server, cache):
    del server.answers["/a1a.t"]
    with pytest.raises(DataNotFound, match=r"no file a1a\.t\. .*/a1a\.t failed: HTTP 404 Not Found\. Get the file"):
        data.load("a1a")
    assert files(cache) == [cache / "libsvm" / "a1a"]


def test_download_that_breaks_off(server, cache):
    server.answers["/a1a"] = (TRAIN[:5], len(TRAIN))
    with pytest.raises(
        DataNotFound, match=rf"failed: (the connection closed after 5 of {len(TRAIN)} bytes|Incomplete)"
    ):
        data.load("a1a")
    assert files(cache) == []


def test_download_that_is_interrupted(server, cache, monkeypatch):
    def interrupt(path, content):
        assert path.suffix == ".part"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.load("a1a")
    assert files(cache) == []


def test_download_without_an_answer(server, cache, monkeypatch):
    """A server that accepts the connection and falls silent after the headers."""
    release = threading.Event()

    def hang(handler):
        handler.send_response(200)
        handler.end_headers()
        release.wait(10)

    monkeypatch.setattr(Handler, "do_GET", hang)
    monkeypatch.setattr(download_module, "TIMEOUT_S", 0.2)
    try:
        with pytest.raises(DataNotFound, match=r"failed: no answer within 0\.2 s\."):
            data.load("a1a")
    finally:
        release.set()
    assert files(cache) == []


def test_the_timeout_is_twenty_seconds():
    assert download_module.TIMEOUT_S == 20


def test_download_from_something_that_speaks_no_http(server, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.wfile.write(b"hello\r\n"))
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

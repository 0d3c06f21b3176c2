"""An empty machine: no data of the user, and nothing answers on the net but a server of the test."""

from __future__ import annotations

import dataclasses
import threading
from http.server import ThreadingHTTPServer

import pytest

from tests.lab.data.few_rows import TEST, TRAIN, Handler, register
from vprop.lab import data


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
    return register(monkeypatch, "http://127.0.0.1:1/")


@pytest.fixture
def server(monkeypatch):
    """A web server on this machine as the public home of a1a."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requested = []
    server.answers = {"/a1a": (TRAIN, len(TRAIN)), "/a1a.t": (TEST, len(TEST))}
    register(monkeypatch, f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()

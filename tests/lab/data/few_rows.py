"""A stand-in for a1a: a few rows in the files of its names, with checksums of their own."""

from __future__ import annotations

import hashlib
from http.server import BaseHTTPRequestHandler

from vprop.lab import data
from vprop.lab.data import DataFile, Spec

TRAIN, TEST = b"+1 1:1 3:0.5 \n-1 2:1 \n", b"-1 3:1 \n"


def register(monkeypatch, base):
    files = tuple(
        DataFile(name, "libsvm", base + name, hashlib.sha256(content).hexdigest())
        for name, content in (("a1a", TRAIN), ("a1a.t", TEST))
    )
    entry = Spec("a1a", 2, 1, (123,), "tests", files)
    monkeypatch.setitem(data.DATASETS, "a1a", entry)
    return entry


def write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a1a").write_bytes(contents.get("train", TRAIN))
    (folder / "a1a.t").write_bytes(contents.get("test", TEST))
    return folder


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Handler(BaseHTTPRequestHandler):
    """Of a server that knows what it answers, and keeps what it was asked."""

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

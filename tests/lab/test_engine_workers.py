"""Workers of a pool end with the process that started them, even where that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from vprop.lab.deep.pool import TimedPool
from vprop.lab.engine.job import Job
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.store import Store

POOLS = {"deep": TimedPool, "others": Pool}


@dataclass(frozen=True)
class Endless(Job):
    """Says who works on it, and sleeps."""

    note: str

    @property
    def key(self):
        return "endless"

    def compute(self):
        Path(self.note).write_text(str(os.getpid()))
        time.sleep(600)
        return {}


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.is_file() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def waited_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(os.name != "posix", reason="processes are killed by a signal here")
@pytest.mark.parametrize("name", list(POOLS))
def test_workers_of_a_parent_that_was_killed_end(name, tmp_path):
    note = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, __file__, name, str(note)], cwd=tmp_path)
    try:
        assert waited_for(lambda: note.is_file() and note.read_text())
        worker = int(note.read_text())
        assert is_alive(worker)
        parent.kill()
        parent.wait()
        ended = waited_for(lambda: not is_alive(worker), seconds=30)
        if not ended:
            os.kill(worker, signal.SIGKILL)
        assert ended
    finally:
        parent.kill()


if __name__ == "__main__":
    name, note = sys.argv[1:]
    POOLS[name](Store(Path("runs")), Console(file=StringIO()), 2).run_all("endless", [Endless(note)])

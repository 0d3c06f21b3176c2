"""The pool of `vprop compare deep`: runs that fail, that a GPU refuses, that have no time, and what each leaves."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.lab.deep import pool
from vprop.lab.deep.pool import MOST_TRIES, PAUSE
from vprop.lab.engine.job import Job


@dataclass(frozen=True)
class Small(Job):
    number: int
    fails: bool = False

    def compute(self):
        if self.fails:
            raise RuntimeError("this one\nfails")
        return {"number": self.number}

    @property
    def key(self):
        return f"small-{self.number}"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_fails_stops_no_other(tmp_path, workers):
    ours = pool(tmp_path, workers)
    done = ours.run_all("small", [Small(0), Small(1, fails=True), Small(2)])
    ours.close()
    assert {result["number"] for result in done.values()} == {0, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small-0.json", "small-2.json"]
    assert "RuntimeError: this one" in ours.failures["small-1"]
    assert "small-1 failed: RuntimeError: this one" in ours.console.file.getvalue()


@dataclass(frozen=True)
class Refused(Job):
    """As by a GPU: so many times, or its process ends; it says which processes it was in."""

    notes: str
    times: int
    dies: bool = False

    def compute(self):
        notes = Path(self.notes)
        notes.mkdir(exist_ok=True)
        before = [int(one.read_text()) for one in sorted(notes.iterdir())]
        (notes / str(len(before))).write_text(str(os.getpid()))
        if len(before) < self.times:
            if self.dies:
                os._exit(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"processes": [*before, os.getpid()]}

    @property
    def key(self):
        return "refused"


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_gpu_did_to_a_run_happens_in_its_process_alone(tmp_path, monkeypatch, dies):
    """A process whose GPU failed fails whatever comes after, in no time: it would go through the whole list."""
    monkeypatch.setattr("vprop.lab.deep.pool.PAUSE", 0.0)
    ours = pool(tmp_path / "runs", workers=2)
    done = ours.run_all("one", [Refused(str(tmp_path / "notes"), 1, dies)])  # one job, and so one process
    first, second = done["refused"]["processes"]
    assert first != second
    assert (ours.failures, ours.console.file.getvalue().count("comes again")) == ({}, 1)
    assert set(ours.run_all("others", [Small(0), Small(1)])) == {"small-0", "small-1"}
    ours.close()


class Inline:
    """In the place of a process: what it is given is done at once, here."""

    _processes = None

    def submit(self, work):
        future = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, cancel_futures=False):
        pass


class Threads(ThreadPoolExecutor):
    """In the place of processes."""

    _processes = None

    def __init__(self):
        super().__init__(1)


@dataclass(frozen=True)
class OnAFullGPU(Job):
    """There is room for seven."""

    number: int
    inside: ClassVar[list[int]] = []
    refusals: ClassVar[list[int]] = []

    def compute(self):
        self.inside.append(self.number)
        try:
            if len(self.inside) > 7:
                self.refusals.append(self.number)
                raise torch.OutOfMemoryError("CUDA out of memory")
            time.sleep(0.02)
            return {"number": self.number}
        finally:
            self.inside.remove(self.number)

    @property
    def key(self):
        return f"one-{self.number}"


def test_all_runs_end_where_there_is_room_for_some_of_them_at_a_time(tmp_path, monkeypatch):
    """To be refused beside others says nothing of a run, however often it happens."""
    monkeypatch.setattr("vprop.lab.deep.pool._process", Threads)
    ours = pool(tmp_path, workers=30)
    done = ours.run_all("many", [OnAFullGPU(number) for number in range(30)])
    ours.close()
    assert (len(done), ours.failures) == (30, {})
    assert OnAFullGPU.refusals


@pytest.fixture
def inline(monkeypatch):
    """Two processes that are none, and pauses that are written down and not made."""
    pauses = []
    monkeypatch.setattr("vprop.lab.deep.pool._process", Inline)
    monkeypatch.setattr("vprop.lab.deep.pool.sleep", pauses.append)
    return pauses


def test_a_run_that_is_always_refused_fails_in_the_end(tmp_path, inline):
    ours = pool(tmp_path / "runs", workers=2)
    assert ours.run_all("one", [Refused(str(tmp_path / "notes"), 99)]) == {}
    assert list(ours.failures) == ["refused"]
    assert len(list((tmp_path / "notes").iterdir())) == MOST_TRIES
    assert inline == [PAUSE] * (MOST_TRIES - 1)


def test_a_pause_is_no_longer_than_the_time_that_is_left(tmp_path, inline):
    ours = pool(tmp_path / "runs", workers=2, stop_at=time.time() + PAUSE / 2)
    ours.run_all("one", [Refused(str(tmp_path / "notes"), 1)])
    assert 0 < inline[0] <= PAUSE / 2


def test_a_refused_run_comes_again_when_there_is_room(tmp_path, inline):
    """As soon as another is over; it does not use up its tries while the GPU is as full as it was."""
    ours = pool(tmp_path / "runs", workers=2)
    done = ours.run_all("some", [Refused(str(tmp_path / "notes"), 1), Small(0), Small(1)])
    assert (set(done), inline) == ({"refused", "small-0", "small-1"}, [])


def test_a_refused_run_is_left_over_when_there_is_no_time(tmp_path, inline, monkeypatch):
    ours = pool(tmp_path / "runs", workers=2, stop_at=time.time() + 1e6)
    monkeypatch.setattr(ours, "_replaced", lambda process: setattr(ours, "stop_at", 0.0) or process)
    assert ours.run_all("one", [Refused(str(tmp_path / "notes"), 1)]) == {}
    assert (ours.unfinished, ours.failures, inline) == (["refused"], {}, [])


@pytest.mark.skipif(os.name != "posix", reason="a process is killed by a signal here")
def test_a_process_that_died_with_nothing_to_do_is_replaced(tmp_path):
    ours = pool(tmp_path, workers=2)
    ours.run_all("first", [Small(0), Small(1)])
    executor = ours._processes[0]
    (victim,) = executor._processes.values()
    victim.kill()
    end = time.monotonic() + 60
    while not executor._broken and time.monotonic() < end:  # a thread of the executor has to see it
        time.sleep(0.01)
    assert executor._broken
    assert set(ours.run_all("second", [Small(2), Small(3)])) == {"small-2", "small-3"}
    ours.close()
    assert "comes again" not in ours.console.file.getvalue()


def test_a_run_that_fails_by_itself_is_not_tried_again(tmp_path):
    ours = pool(tmp_path, workers=2)
    assert ours.run_all("small", [Small(0, fails=True)]) == {}
    ours.close()
    assert "comes again" not in ours.console.file.getvalue()
    assert list(ours.failures) == ["small-0"]


def test_what_was_kept_is_not_run_again(tmp_path):
    pool(tmp_path).run_all("small", [Small(0)])
    again = pool(tmp_path).run_all("small", [Small(0, fails=True)])
    assert again["small-0"]["number"] == 0


def test_no_run_is_begun_that_has_no_time(tmp_path):
    ours = pool(tmp_path, stop_at=time.time() - 1)
    assert ours.run_all("small", [Small(0)]) == {}
    assert ours.unfinished == ["small-0"]

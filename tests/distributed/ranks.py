"""Several processes that train together over gloo, started once and given one job after another."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.programs import free_port, started

LIMIT = 240
"""Seconds that a job may take: ranks that wait for each other for ever must not stop the suite."""


class Ranks:
    """``ranks(function, *args)`` runs ``function(*args)`` on every rank and returns what each returned.

    What a rank raises is returned as a pair of type name and message by :meth:`errors`, and raised by a call.
    """

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.count, self.backend = count, backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        replies = self._run(function, args)
        for rank, (fine, value) in enumerate(replies):
            if not fine:
                raise AssertionError(f"rank {rank}: {value[2]}")
        return [value for _, value in replies]

    def errors(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, str] | None]:
        """What each rank raised: the name of the type and the message."""
        return [None if fine else (value[0], value[1]) for fine, value in self._run(function, args)]

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[bool, Any]]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(_packed((function.__module__, function.__qualname__, args)))
        try:
            return [self._reply(rank) for rank in range(self.count)]
        except BaseException:
            self.stop()
            raise

    def _reply(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(LIMIT):
            raise TimeoutError(f"Rank {rank} of {self.count} has not answered within {LIMIT} s.")
        return _unpacked(self._pipes[rank].recv_bytes())

    def _start(self) -> None:
        context, port = started(), free_port()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            arguments = (rank, self.count, self.backend, port, theirs, [p for p in sys.path if p])
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes; the next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, count: int, backend: str, port: int, pipe: Connection, path: list[str]) -> None:
    """One rank: wait for jobs, run them, answer."""
    sys.path[:] = path
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, rank=rank, world_size=count)
    while True:
        module, name, args = _unpacked(pipe.recv_bytes())
        try:
            answer = (True, getattr(importlib.import_module(module), name)(*args))
        except Exception as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(_packed(answer))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)

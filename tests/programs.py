"""Programs in processes of their own, which start from one that has imported torch: a fraction of a second each.

A new process would import torch, vprop and what else is below: five seconds and more, for every one of them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import socket
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

import torch

LIMIT = 240
"""Seconds that a program may take. They take a few; a machine that does other things beside may need more."""

IMPORTED = (
    "vprop",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "sklearn.datasets",
    "sklearn.model_selection",
    "matplotlib.pyplot",
)
"""Before a process starts. What reads the environment when it is imported is not here."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""One thread, no network, no GPU."""


class Said(NamedTuple):
    """What the processes of a program printed, one after the other."""

    stdout: str
    stderr: str


def started() -> ForkServerContext:
    """Where processes come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_program(file: Path, *arguments: str, cwd: Path, logs: Path, ranks: int | None = None) -> Said:
    """Run ``python FILE ARGUMENTS``, or what torchrun does on so many ranks, and expect that it ends well.

    ``cwd`` is the current folder; what is printed goes to files in the folder ``logs``.
    """
    worlds = [{}] if ranks is None else _worlds(ranks)
    names = [[str(logs / f"{file.name}.{number}.{kind}") for kind in ("out", "err")] for number in range(len(worlds))]
    processes = [
        started().Process(target=_run, args=([str(file), *arguments], str(cwd), world, *printed))
        for world, printed in zip(worlds, names, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
        process.join()
    said = Said(*("\n".join(Path(name).read_text() for name in column) for column in zip(*names, strict=True)))
    ended = [process.exitcode for process in processes]
    assert not any(ended), f"{file.name} ended with {ended}:\n{said.stdout}\n{said.stderr}"
    return said


def _worlds(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives to each of its processes."""
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    each = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in world.items()} for world in each]


def _run(argv: list[str], cwd: str, world: dict[str, str], stdout: str, stderr: str) -> None:
    """One process: its output into files, its environment, and then the file."""
    for number, name in ((1, stdout), (2, stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.update(world | ENVIRONMENT, MPLBACKEND="Agg")
    sys.argv, sys.path[0:0] = argv, [str(Path(argv[0]).parent)]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT - 10, file=2)  # where it waits, if it waits for ever
    # Torch may hang or abort when a model in DDP over gloo is freed after its process group: nothing is freed here.
    _kept = runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

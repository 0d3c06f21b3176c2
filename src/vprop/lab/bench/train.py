"""`vprop bench train`: whole training steps of a GPT and a ResNet, forward and backward included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

import vprop
from vprop.lab.bench import peers
from vprop.lab.bench.clock import Clock, Spread
from vprop.lab.bench.contenders import EXPECTED, TINY
from vprop.lab.bench.errors import Unavailable, first_line, matching
from vprop.lab.bench.models import Task
from vprop.lab.bench.step import clean_up

REFERENCE = "AdamW fused"


@dataclass
class Rounds:
    """How much to measure."""

    count: int
    steps: int
    """Timed in a row, after one that is not."""
    report: Callable[[str], None] = field(default=lambda text: None)


class Trainer:
    """An optimizer with its loop, on a model that it shares with the others."""

    def __init__(self, task: Task, optimizer: Any) -> None:
        self.task = task
        self.optimizer = optimizer

    def begin(self) -> None:
        """It is our turn."""

    def end(self) -> None:
        """It is another one's turn: leave the model as it was found."""

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.task().backward()
        self.optimizer.step()


class Closure(Trainer):
    """``step(closure)``."""

    def step(self) -> None:
        """One step of training."""

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.task()
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Context(Trainer):
    """``with sampled_params():``."""

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        with self.optimizer.sampled_params():
            self.task().backward()
        self.optimizer.step()


class Attached(Trainer):
    """``attach``, and then a plain loop."""

    def begin(self) -> None:
        """Attach."""
        self.handle = self.optimizer.attach(self.task)

    def end(self) -> None:
        """Detach, which leaves the mean in the weights."""
        self.handle.remove()


class IvonOpt(Trainer):
    """The loop of ivon-opt."""

    def begin(self) -> None:
        """It gives the parameters new storage; remember the old one."""
        self.storage = [(p, p.data) for p in self.task.parameters()]

    def end(self) -> None:
        """Put the old storage back, with the new values."""
        for p, data in self.storage:
            data.copy_(p.data)
            p.data = data

    def step(self) -> None:
        """One step of training."""
        with self.optimizer.sampled_params(train=True):
            self.optimizer.zero_grad()
            self.task().backward()
        self.optimizer.step()


def _torch(optimizer: Any, **arguments: Any) -> Callable[[Task], Trainer]:
    return lambda task: Trainer(task, optimizer(task.parameters(), lr=TINY, **arguments))


def _ours(optimizer: Any, loop: type[Trainer]) -> Callable[[Task], Trainer]:
    return lambda task: loop(task, optimizer(task.parameters(), lr=TINY, num_data=1e6, fused=True))


def _ivon_opt(task: Task) -> Trainer:
    peers.require(peers.PEERS[0])
    return IvonOpt(task, import_module("ivon").IVON(task.parameters(), lr=TINY, ess=1e6))


CONTENDERS: dict[str, Callable[[Task], Trainer]] = {
    REFERENCE: _torch(torch.optim.AdamW, fused=True),
    "AdamW default": _torch(torch.optim.AdamW),
    "RMSprop default": _torch(torch.optim.RMSprop),
    "Vprop fused context": _ours(vprop.Vprop, Context),
    "Vprop fused closure": _ours(vprop.Vprop, Closure),
    "Vprop fused attach": _ours(vprop.Vprop, Attached),
    "Vprop default closure": lambda task: Closure(task, vprop.Vprop(task.parameters(), lr=TINY, num_data=1e6)),
    "IVON fused closure": _ours(vprop.IVON, Closure),
    "IVON fused attach": _ours(vprop.IVON, Attached),
    "ivon-opt": _ivon_opt,
}


def choose(words: list[str]) -> list[str]:
    """Those whose name holds one of the words, and the reference; all if there are none."""
    wanted = matching(words, list(CONTENDERS))
    return wanted if REFERENCE in wanted else [REFERENCE, *wanted]


def measure(task: Task, names: list[str], plan: Rounds, rows: list[dict[str, Any]]) -> None:
    """Add a row for each contender to ``rows``: memory one by one, then times in turns."""
    device = next(task.parameters()).device
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        plan.report(f"{name}: memory")
        found[name] = {"name": name} | _alone(CONTENDERS[name], task, device)
    going = [name for name in names if found[name]["available"]]
    trainers = {name: CONTENDERS[name](task) for name in going}
    seconds = _in_rounds(trainers, Clock(device), plan)
    base = seconds.get(REFERENCE)
    for name in going:
        times, row = seconds[name], found[name]
        row["time"] = Spread.of(times).as_json()
        # Of neighbours in time, so that a clock that drifts cancels.
        ratios = None if base is None else [own / other for own, other in zip(times, base, strict=True)]
        row["ratio"] = None if ratios is None else Spread.of(ratios).as_json()
    rows += found.values()


def _alone(build: Callable[[Task], Trainer], task: Task, device: torch.device) -> dict[str, Any]:
    """Whether it can take part, and the peak of memory while nobody else is there."""
    clean_up()
    task.zero_grad()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = build(task)
        trainer.begin()
        try:
            for _ in range(3):
                trainer.step()
        finally:
            trainer.end()
    except (*EXPECTED, Unavailable) as error:
        with contextlib.suppress(RuntimeError):
            task.zero_grad()
        return {"available": False, "reason": first_line(error)}
    return {"available": True, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}


def _in_rounds(trainers: dict[str, Trainer], clock: Clock, plan: Rounds) -> dict[str, list[float]]:
    """Seconds per step, one number for each round; each round begins with another contender."""
    names = list(trainers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(plan.count):
        plan.report(f"round {number + 1} of {plan.count}")
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            trainer = trainers[name]
            trainer.begin()
            try:
                trainer.step()
                seconds[name].append(clock.wall(trainer.step, plan.steps))
            finally:
                trainer.end()
    return seconds

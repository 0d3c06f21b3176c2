"""`vprop bench train`: whole training steps of a GPT and a ResNet, forward and backward included."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

import vprop
from vprop.lab.bench import peers
from vprop.lab.bench.clock import Call, Report, seconds_per_call, spread
from vprop.lab.bench.contenders import TINY, attach_loop, closure_loop, context_loop, ivon_loop, plain_loop
from vprop.lab.bench.errors import EXPECTED, BenchError, first_line, matching
from vprop.lab.bench.models import Task
from vprop.lab.bench.step import clean_up

REFERENCE = "AdamW fused"

_OURS = {"lr": TINY, "num_data": 1e6}
# (the optimizer, its arguments, the loop)
CONTENDERS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Call]]] = {
    REFERENCE: (torch.optim.AdamW, {"lr": TINY, "fused": True}, plain_loop),
    "AdamW default": (torch.optim.AdamW, {"lr": TINY}, plain_loop),
    "RMSprop default": (torch.optim.RMSprop, {"lr": TINY}, plain_loop),
    "Vprop fused context": (vprop.Vprop, _OURS | {"fused": True}, context_loop),
    "Vprop fused closure": (vprop.Vprop, _OURS | {"fused": True}, closure_loop),
    "Vprop fused attach": (vprop.Vprop, _OURS | {"fused": True}, attach_loop),
    "Vprop default closure": (vprop.Vprop, _OURS, closure_loop),
    "IVON fused closure": (vprop.IVON, _OURS | {"fused": True}, closure_loop),
    "IVON fused attach": (vprop.IVON, _OURS | {"fused": True}, attach_loop),
    "ivon-opt": (peers.ivon, {}, ivon_loop),
}


def choose(words: list[str]) -> list[str]:
    """Those whose name holds one of the words, and the reference; all if there are none."""
    wanted = matching(words, list(CONTENDERS))
    return wanted if REFERENCE in wanted else [REFERENCE, *wanted]


def step_of(name: str, task: Task) -> Call:
    """A step of training, on a copy of the model."""
    own = deepcopy(task)
    build, arguments, loop = CONTENDERS[name]
    optimizer = build(own.parameters(), **arguments)

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = own()
        loss.backward()
        return loss

    return loop(optimizer, own, backward)


def measure(task: Task, names: list[str], rounds: int, steps: int, report: Report) -> list[dict[str, Any]]:
    """A row for each contender: memory one by one, then times in turns."""
    rows = {}
    for name in names:
        report(f"{name}: memory")
        rows[name] = {"name": name} | _alone(name, task)
    if not rows[REFERENCE]["available"]:
        raise BenchError(f"{REFERENCE}, which times are divided by, cannot run here: {rows[REFERENCE]['reason']}")
    going = {name: step_of(name, task) for name in names if rows[name]["available"]}
    seconds: dict[str, list[float]] = {name: [] for name in going}
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        order = list(going)
        first = number % len(order)
        for name in order[first:] + order[:first]:  # each round begins with another one
            going[name]()
            seconds[name].append(seconds_per_call(going[name], steps, task.inputs.device))
    for name, times in seconds.items():
        # Of neighbours in time, so that a clock that drifts cancels.
        ratios = [own / other for own, other in zip(times, seconds[REFERENCE], strict=True)]
        rows[name] |= {"time": spread(times), "ratio": spread(ratios)}
    return list(rows.values())


def _alone(name: str, task: Task) -> dict[str, Any]:
    """Whether it can take part, and the peak of memory while nobody else is there."""
    clean_up()
    on_gpu = task.inputs.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        step = step_of(name, task)
        for _ in range(3):
            step()
    except EXPECTED as error:
        return {"available": False, "reason": first_line(error)}
    return {"available": True, "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None}

"""`vprop bench step`: the time of the optimizer alone, sampling included, on tensors whose gradients are there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vprop.lab.bench.clock import Clock, Runner, Spread, in_turns
from vprop.lab.bench.contenders import REFERENCE, Contender, by_name
from vprop.lab.bench.errors import Unavailable
from vprop.lab.bench.tensors import Tensors

Report = Callable[[str], None]


@dataclass
class Plan:
    """How much to measure."""

    device: torch.device
    budget: float = 1.0
    """Seconds for each contender."""
    least: int = 3
    slow: float = 5.0
    """A contender whose call takes longer is called as little as possible."""
    report: Report = field(default=lambda text: None)


def copy_bandwidth(tensors: Tensors, plan: Plan) -> dict[str, Any]:
    """Bytes per second of a copy of as many float32 numbers as there are parameters: 4 read and 4 written for each."""
    source = torch.ones(tensors.numel, device=tensors.device)
    target = torch.empty_like(source)
    clock = Clock(plan.device)
    runner = Runner.warmed_up({"copy": lambda: target.copy_(source)}, clock, plan.slow)
    in_turns([runner], clock, plan.budget / 2, plan.least)
    moved, spread = 8 * tensors.numel, runner.spread("copy")
    return {"bytes": moved, "time": spread.as_json(), "bytes_per_second": moved / spread.median}


def measure(chosen: Sequence[Contender], tensors: Tensors, plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a row (or one for each stage) for each contender to ``rows``; returns the time of a copy.

    The copy is measured before and after, and the faster one is the limit.

    The reference is measured in turns with every contender, so that both meet the same weather, and each ratio is
    that of its own pair of medians.
    """
    copies = [copy_bandwidth(tensors, plan)]
    # Graphs last: a capture that fails can leave the device in disorder.
    for contender in sorted(chosen, key=lambda contender: contender.captured):
        plan.report(contender.name)
        try:
            rows += _rows(contender, tensors, plan)
        except Unavailable as reason:
            rows.append(describe(contender) | {"available": False, "reason": str(reason)})
        clean_up()
    copies.append(copy_bandwidth(tensors, plan))
    copy = max(copies, key=lambda copy: copy["bytes_per_second"])
    for row in rows:
        if row["available"]:
            bandwidth = copy["bytes_per_second"]
            row |= against_limit(row["time"]["median"], row["bytes_per_param"], tensors.numel, bandwidth)
    order = [contender.name for contender in chosen]
    rows.sort(key=lambda row: order.index(row["contender"]))
    return copy


def describe(contender: Contender) -> dict[str, Any]:
    """Who it is."""
    return {
        "name": contender.name,
        "contender": contender.name,
        "family": contender.family,
        "method": contender.method,
        "path": contender.path,
        "loop": contender.loop,
    }


def clean_up() -> None:
    """Free what the last contender left, so that the next one meets the same memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rows(contender: Contender, tensors: Tensors, plan: Plan) -> list[dict[str, Any]]:
    clock = Clock(plan.device)
    ready = contender.ready(tensors)
    try:
        runner = Runner.warmed_up(ready.stages, clock, plan.slow)
        runners = [runner]
        plain = reference = None
        if ready.plain is not None:
            plain = Runner.warmed_up({"plain": ready.plain}, clock, plan.slow)
            runners.append(plain)
        if contender.name != REFERENCE:
            reference = Runner.warmed_up(by_name(REFERENCE).ready(tensors).stages, clock, plan.slow)
            runners.append(reference)
        slow = runner.seconds > plan.slow
        in_turns(runners, clock, 0.0 if slow else plan.budget, 1 if slow else plan.least)
    except RuntimeError as error:  # out of memory, for one
        raise Unavailable(str(error).splitlines()[0]) from error
    return [_row(contender, stage, runner, plain, reference, tensors) for stage in ready.stages]


def _row(
    contender: Contender,
    stage: str,
    runner: Runner,
    plain: Runner | None,
    reference: Runner | None,
    tensors: Tensors,
) -> dict[str, Any]:
    alone = len(runner.stages) == 1
    time, wall = runner.spread(stage), runner.wall if alone else None
    row = describe(contender) | {"available": True, "params": tensors.numel, "tensors": tensors.count}
    if not alone:
        row |= {"name": f"{contender.method} {contender.path}: {stage} alone", "loop": f"{stage} alone"}
    if plain is not None:
        uncounted = plain.spread("plain")
        row["whole"] = time.as_json()
        row["not_counted"] = uncounted.as_json()
        time = time.minus(uncounted.median)
        wall = wall.minus(plain.wall.median) if wall is not None and plain.wall is not None else None
    row["time"] = time.as_json()
    row["wall"] = None if wall is None else wall.as_json()
    row |= _against_reference(time, wall, reference or runner)
    row["bytes_per_param"] = contender.bytes_per_param.get(stage)
    if contender.note:
        row["note"] = contender.note
    return row


def _against_reference(time: Spread, wall: Spread | None, reference: Runner) -> dict[str, Any]:
    (stage,) = reference.stages
    base, base_wall = reference.spread(stage), reference.wall
    return {
        "reference_time": base.as_json(),
        "reference_wall": None if base_wall is None else base_wall.as_json(),
        "ratio": time.median / base.median,
        "wall_ratio": None if wall is None or base_wall is None else wall.median / base_wall.median,
    }


def against_limit(seconds: float, moved: int | None, numel: int, bandwidth: float) -> dict[str, Any]:
    """How far from the time in which a copy would move the bytes that must be moved.

    >>> against_limit(2.0, 32, 100, 3200.0)["times_limit"]
    2.0
    """
    if moved is None:
        return {"bytes_per_param": None, "limit": None, "times_limit": None, "bandwidth_fraction": None}
    limit = moved * numel / bandwidth
    return {
        "bytes_per_param": moved,
        "limit": limit,
        "times_limit": seconds / limit,
        "bandwidth_fraction": limit / seconds if seconds > 0 else None,
    }

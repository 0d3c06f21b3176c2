"""`vprop bench step`: the time of the optimizer alone, sampling included, on tensors whose gradients are there."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vprop.lab.bench.clock import Report, Runner, in_turns, spread
from vprop.lab.bench.contenders import GRAPH, REFERENCE, Contender, by_name
from vprop.lab.bench.errors import Unavailable, first_line
from vprop.lab.bench.tensors import Tensors

Rows = list[dict[str, Any]]

SWEPT = ("Vprop fused closure", "Vprop foreach closure", REFERENCE, "AdamW fused", "ivon-opt")
SLOW = 5.0
"""Seconds of a step: what is slower is left out of the rest of a sweep."""


def clean_up() -> None:
    """Free what the last contender left, so that the next one meets the same memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(tensors: Tensors, budget: float) -> dict[str, Any]:
    """Bytes per second of a copy of as many float32 numbers as there are parameters: 4 read and 4 written for each."""
    source = torch.ones(tensors.numel, device=tensors.device)
    target = torch.empty_like(source)
    runner = Runner({"copy": lambda: target.copy_(source)}, tensors.device)
    in_turns([runner], budget / 2)
    moved, times = 8 * tensors.numel, spread(runner.times["copy"])
    return {"bytes": moved, "time": times, "bytes_per_second": moved / times["median"]}


def measure(
    chosen: Sequence[Contender], tensors: Tensors, budget: float, report: Report
) -> tuple[Rows, dict[str, Any]]:
    """A row (or one for each stage) for each contender, and the time of a copy.

    The copy is measured before and after, and the faster one is the limit. The reference is measured in turns with
    every contender, so that both meet the same weather, and each ratio is that of its own pair of medians.
    """
    copies = [copy_bandwidth(tensors, budget)]
    rows: Rows = []
    for contender in chosen:
        report(contender.name)
        try:
            rows += _rows(contender, tensors, budget)
        except Unavailable as reason:
            rows.append({"name": contender.name, "available": False, "reason": str(reason)})
        clean_up()
    copies.append(copy_bandwidth(tensors, budget))
    copy = max(copies, key=lambda copy: copy["bytes_per_second"])
    for row in rows:
        if row["available"] and row["bytes_per_param"] is not None:
            row["limit"] = row["bytes_per_param"] * tensors.numel / copy["bytes_per_second"]
            row["times_limit"] = row["time"]["median"] / row["limit"]
    return rows, copy


def _rows(contender: Contender, tensors: Tensors, budget: float) -> Rows:
    stages = contender.ready(tensors)
    try:
        runner = reference = Runner(stages, tensors.device)
        if contender.name != REFERENCE:
            reference = Runner(by_name(REFERENCE).ready(tensors), tensors.device)
        in_turns([runner] if runner is reference else [runner, reference], budget)
    except RuntimeError as error:  # out of memory, for one
        raise Unavailable(first_line(error)) from error
    base = spread(reference.times["step"])
    rows = []
    for stage in stages:
        times = spread(runner.times[stage])
        whole = contender.name.removesuffix(" in parts")
        rows.append(
            {
                "name": contender.name if whole == contender.name else f"{whole}: {stage} alone",
                "available": True,
                "params": tensors.numel,
                "tensors": tensors.count,
                "time": times,
                "reference_time": base,
                "ratio": times["median"] / base["median"],
                "bytes_per_param": contender.bytes_per_param.get(stage),
            }
        )
    return rows


def sizes(least: float, most: float) -> list[float]:
    """1, 3, 10, 30, … times ``least``.

    >>> sizes(10, 1000)
    [10, 30, 100, 300, 1000]
    """
    values, decade = [], least
    while decade <= most * 1.001:
        values += [value for value in (decade, 3 * decade) if value <= most * 1.001]
        decade *= 10
    return values


def sweep(
    points: Iterable[tuple[float, int]], device: torch.device, budget: float, minutes: float, report: Report
) -> Rows:
    """Rows at points (parameters, tensors), until ``minutes`` are over."""
    going = [by_name(name) for name in SWEPT]
    if device.type == "cuda":
        going.append(GRAPH)  # Python is the cost of many tensors, and a graph needs none
    rows: Rows = []
    started = time.monotonic()
    for params, count in points:
        if time.monotonic() - started >= 60 * minutes:
            break
        report(f"{params:,.0f} parameters in {count:,} tensors")
        try:
            found, _ = measure(going, Tensors(params, count, device), budget, lambda name: None)
        except RuntimeError:  # out of memory
            break
        finally:
            clean_up()
        rows += [row | {"params": int(params), "tensors": count} for row in found]
        done = {row["name"] for row in found if row["available"] and row["time"]["median"] <= SLOW}
        going = [contender for contender in going if contender.name in done]
    return rows

"""`vprop bench step --sweep`: how the cost grows with the number of parameters, and with the number of tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from vprop.lab.bench.contenders import REFERENCE, Contender, by_name
from vprop.lab.bench.errors import first_line
from vprop.lab.bench.step import Plan, clean_up, measure
from vprop.lab.bench.tensors import Tensors

MAIN = ("Vprop fused closure", "Vprop foreach closure", REFERENCE, "AdamW fused", "ivon-opt")
GRAPHS = ("Vprop fused CUDA graph closure",)
"""For many tensors, where Python is the cost: a graph needs none."""
LEAN_SIZES, OTHER_SIZES = 4, 18
"""Rough peaks in parameter-sizes, to refuse in time what would not fit: without and with large temporaries."""


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


class Sweep:
    """Points of a sweep, within limits of time and memory."""

    def __init__(self, plan: Plan, minutes: float) -> None:
        self.plan = replace(plan, budget=plan.budget / 4)
        self.seconds = 60 * minutes
        self.out_of_time = False

    def over_parameters(self, most: float, tensors: int, rows: list[dict[str, Any]]) -> None:
        """Cost against the number of parameters."""
        self._run(((params, tensors) for params in sizes(1e4, most)), [by_name(name) for name in MAIN], rows)

    def over_tensors(self, params: float, most: int, rows: list[dict[str, Any]]) -> None:
        """Cost against the number of tensors."""
        names = MAIN + GRAPHS if self.plan.device.type == "cuda" else MAIN
        points = ((params, int(count)) for count in sizes(1, most))
        self._run(points, [by_name(name) for name in names], rows)

    def _run(self, points: Iterable[tuple[float, int]], going: list[Contender], rows: list[dict[str, Any]]) -> None:
        started = time.monotonic()
        for params, count in points:
            if not going:
                return
            if time.monotonic() - started >= self.seconds:
                self.out_of_time = True
                return
            fitting = [contender for contender in going if self._fits(contender, params)]
            if not fitting:
                return
            plan = self._plan_at(f"{params:,.0f} parameters in {count:,} tensors")
            found: list[dict[str, Any]] = []
            try:
                measure(fitting, Tensors(params, count, plan.device), plan, found)
            except RuntimeError as error:  # out of memory
                rows.append({"params": params, "tensors": count, "available": False, "reason": first_line(error)})
                return
            finally:
                clean_up()
            rows += [{"params": int(params), "tensors": count} | row for row in found]
            done = {row["name"] for row in found if row["available"] and self._fast(row)}
            going = [contender for contender in fitting if contender.name in done]

    def _plan_at(self, here: str) -> Plan:
        return replace(self.plan, report=lambda text: self.plan.report(f"{here}: {text}"))

    def _fast(self, row: dict[str, Any]) -> bool:
        return (row["wall"] or row["time"])["median"] <= self.plan.slow

    def _fits(self, contender: Contender, params: float) -> bool:
        lean = contender.family == "torch" or "fused" in contender.path
        return 4 * params * (LEAN_SIZES if lean else OTHER_SIZES) < free_memory(self.plan.device)


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had; unlimited where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")

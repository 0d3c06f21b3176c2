"""Figures of runs that are here, with those of a file: tasks run on several machines, and runs do not stay for ever."""

from __future__ import annotations

from typing import Any

from vprop.lab.deep.contenders import CONTENDERS, GROUPS
from vprop.lab.deep.results import machine

Result = dict[str, Any]


def with_kept_rows(found: Result | None, costs: dict[str, Result], kept: Result | None) -> Result | None:
    """``found``, and of contenders and groups without runs here the rows that the file had.

    ``costs`` are what was timed here, by contender; if there are any, those of the file go, for ratios are of times of
    one machine.
    """
    if kept is None or (found is None and not costs):
        return found
    kept = kept | {"machines": kept.get("machines", [machine(kept["environment"])])}
    found = found or kept | {"contenders": [], "groups": []}
    known = {row["name"]: row for row in kept["contenders"]}
    contenders = _joined(found["contenders"], kept["contenders"], [one.name for one in CONTENDERS])
    there = {row["name"] for row in found["contenders"]}
    others = [row for row in kept["groups"] if row["of"] not in there]
    return found | {
        "machines": sorted({*found["machines"], *kept["machines"]}),
        "code": sorted({*found["code"], *kept["code"]}),
        "cost_of_adamw": costs.get("adamw") if costs else kept["cost_of_adamw"],
        "contenders": [
            row | {"cost": costs.get(row["name"]) if costs else _cost(row, known.get(row["name"]))}
            for row in contenders
        ],
        "groups": _joined(found["groups"], others, [one.name for one in GROUPS]),
    }  # fmt: skip


def _joined(found: list[Result], kept: list[Result], order: list[str]) -> list[Result]:
    """Those that were found in place of those that were kept, in the order of the configuration."""
    rows = {row["name"]: row for row in (*kept, *found)}
    return [rows[name] for name in order if name in rows]


def _cost(row: Result, kept: Result | None) -> Result | None:
    """What the file has for this setting."""
    return kept["cost"] if kept is not None and kept["setting"] == row["setting"] else None

"""Figures of runs that are here, with those of a file: tasks run on several machines, and runs do not stay for ever."""

from __future__ import annotations

from typing import Any

from vprop.lab.deep.contenders import CONTENDERS, GROUPS
from vprop.lab.deep.kept import has_diverged, has_same_steps, key_of, tried_settings
from vprop.lab.deep.results import machine

Result = dict[str, Any]


def with_kept_rows(
    found: Result | None, costs: dict[str, Result], kept: Result | None, choices: dict[str, Result] | None = None
) -> Result | None:
    """``found``, and of contenders and groups without runs here the rows that the file had.

    ``costs`` are what was timed here, by contender; if there are any, those of the file go, for ratios are of times of
    one machine. ``choices`` are what was chosen here: rows of the file learn of settings that were tried since.
    """
    if kept is None or (found is None and not costs and not choices):
        return found
    kept = kept | {"machines": kept.get("machines", [machine(kept["environment"])])}
    found = found or kept | {"contenders": [], "groups": []}
    known = {row["name"]: row for row in kept["contenders"]}
    found = _without(found, {row["name"] for row in found["contenders"] if _has_fewer(row, known.get(row["name"]))})
    there = {row["name"] for row in found["contenders"]}
    told = [_told(row, (choices or {}).get(row["name"])) for row in kept["contenders"]]
    contenders = _joined(found["contenders"], told, [one.name for one in CONTENDERS])
    others = [row for row in kept["groups"] if row["of"] not in there]
    return found | {
        "machines": sorted({*found["machines"], *kept["machines"]}),
        "code": sorted({*found["code"], *kept["code"]}),
        "cost_of_adamw": costs.get("adamw") if costs else kept["cost_of_adamw"],
        "contenders": [
            _with_left(row, known.get(row["name"]))
            | {"cost": costs.get(row["name"]) if costs else _cost(row, known.get(row["name"]))}
            for row in contenders
        ],
        "groups": _joined(found["groups"], others, [one.name for one in GROUPS]),
    }  # fmt: skip


def _has_fewer(row: Result, kept: Result | None) -> bool:
    """Seeds than the file's row, and no others, of the same setting: that one says more."""
    return kept is not None and row["setting"] == kept["setting"] and set(row["seeds"]) < set(kept["seeds"])


def _without(found: Result, names: set[str]) -> Result:
    """Without the rows of these contenders, and the groups that are made of them."""
    rows = [row for row in found["contenders"] if row["name"] not in names]
    return found | {"contenders": rows, "groups": [row for row in found["groups"] if row["of"] not in names]}


def _told(row: Result, choice: Result | None) -> Result:
    """A row of the file with the settings that were tried here; it stays one of the setting that it was run with."""
    if choice is None:
        return row
    tuned = choice["tuned"] and choice["setting"] == row["setting"]
    predicts = choice["predicts"] if tuned and choice["predicts"] in row["scores"] else row["predicts"]
    return row | {"grid": choice["grid"], "tuned": tuned, "predicts": predicts}


def _with_left(row: Result, kept: Result | None) -> Result:
    """Settings that were tried and are not offered any more: they were looked at, too."""
    row = {name: value for name, value in row.items() if name != "left"}
    if kept is None or "grid" not in row:
        return row
    # a loss is of the best kind of predictions; older files say that once, of the best setting
    kind = {"predicts": kept["predicts"]} if "predicts" in kept else {}
    before = {
        key_of(one): one | {"diverged": True} if has_diverged(kept, one) else kind | one
        for one in tried_settings(kept)
        if one["nll"] is not None or has_diverged(kept, one)
    }
    # what was not tried here may have been before: nothing is where there is no choice
    known = [one["nll"] is not None or "diverged" in one for one in row["grid"]]
    grid = [one if here else before.get(key_of(one), one) for one, here in zip(row["grid"], known, strict=True)]
    offered = {key_of(one) for one in grid}
    left = [one for key, one in before.items() if key not in offered]
    return row | {"grid": grid} | ({"left": left} if left else {})


def _joined(found: list[Result], kept: list[Result], order: list[str]) -> list[Result]:
    """Those that were found in place of those that were kept, in the order of the configuration."""
    rows = {row["name"]: row for row in (*kept, *found)}
    return [rows[name] for name in order if name in rows]


def _cost(row: Result, kept: Result | None) -> Result | None:
    """What the file has for a setting with the same steps."""
    if kept is None or not has_same_steps(row["setting"], kept["setting"]):
        return None
    return kept["cost"]

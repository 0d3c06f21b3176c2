"""What a file of results has that was made before, perhaps on another machine, whose runs are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vprop.lab.deep.contenders import DeepContender
from vprop.lab.deep.tasks import DeepTask

Result = dict[str, Any]
Key = frozenset[tuple[str, float]]
"""A setting."""


def kept_in(folder: Path | None, task: DeepTask) -> Result | None:
    """The task's file, if it is of the task as it is now: of another budget, or other data, nothing can stay."""
    if folder is None:
        return None
    try:
        kept = json.loads((folder / f"{task.name}.json").read_text(encoding="utf-8"))
        same = kept["settings"] == json.loads(json.dumps(task.shown()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if same else None


def tried_before(kept: Result | None, contender: DeepContender, task: DeepTask) -> dict[Key, dict[str, float]]:
    """Log-losses on held-out data by setting, as far as they are known, and by the kind of predictions; none if it
    diverged.

    Results of before every setting had its kind tell that of the best one alone. If that is not in the grid any more,
    they say nothing.
    """
    row = row_of(kept, contender)
    if row is None or "predicts" not in row:
        return {}
    found: dict[Key, dict[str, float]] = {}
    is_known = key_of(row["setting"]) in {key_of(one) for one in contender.grid(task)}
    for one in tried_settings(row):
        loss: float | None = one["nll"]
        if has_diverged(row, one):
            found[key_of(one)] = {}
        elif loss is not None and ("predicts" in one or is_known):
            found[key_of(one)] = {str(one.get("predicts", row["predicts"])): loss}
    return found


def tried_settings(row: Result) -> list[Result]:
    """Of a row, those that there were to choose from, and those that there had been before."""
    return [*row.get("left", []), *row["grid"]]


def has_diverged(row: Result, setting: Result) -> bool:
    """Or was not tried, if it has no loss. In older files all was tried that the row's setting was chosen from."""
    of_before = row.get("tuned") and len(row["grid"]) > 1 and setting in row["grid"]
    return setting["nll"] is None and bool(setting.get("diverged") or of_before)


def row_of(kept: Result | None, contender: DeepContender) -> Result | None:
    """The contender's figures, if the file has any."""
    rows = [] if kept is None else kept["contenders"]
    return next((row for row in rows if row["name"] == contender.name), None)


def key_of(setting: Mapping[str, Any]) -> Key:
    """Without the loss and what goes with it."""
    return frozenset((name, value) for name, value in setting.items() if name not in ("nll", "predicts", "diverged"))


def has_same_steps(setting: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether steps of the two take the same time, within one contender's grids: masks of dropout take some.

    >>> has_same_steps({"lr": 0.1}, {"lr": 0.2, "dropout": 0.0}), has_same_steps({"dropout": 0.1}, {"lr": 0.1})
    (True, False)
    """
    return bool(setting.get("dropout")) == bool(other.get("dropout"))

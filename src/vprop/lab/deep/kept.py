"""What a file of results has that was made before, perhaps on another machine, whose runs are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vprop.lab.deep.contenders import DeepContender
from vprop.lab.deep.tasks import DeepTask

Result = dict[str, Any]
Setting = frozenset[tuple[str, float | None]]
Losses = dict[Setting, float | None]
"""By setting; ``None`` where it diverged."""


def kept_in(folder: Path, task: DeepTask) -> Result | None:
    """The task's file, if it is of the task as it is now: of another budget, or other data, nothing can stay."""
    try:
        kept = json.loads((folder / f"{task.name}.json").read_text(encoding="utf-8"))
        same = kept["settings"] == json.loads(json.dumps(task.shown()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if same else None


def tried_before(kept: Result | None, contender: DeepContender) -> tuple[Losses, str]:
    """The log-loss on held-out data of every setting of the contender that was tried, and how the best one predicts."""
    rows = [] if kept is None else [row for row in kept["contenders"] if row["name"] == contender.name]
    for row in rows:
        if row["tuned"] and "predicts" in row and len(row["grid"]) > 1:
            return {items(one): one["nll"] for one in row["grid"]}, row["predicts"]
    return {}, ""


def items(setting: Mapping[str, float | None]) -> Setting:
    """Without the loss, as a key."""
    return frozenset((name, value) for name, value in setting.items() if name != "nll")

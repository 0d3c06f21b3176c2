"""What a file of results has that was made before, perhaps on another machine, whose runs are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vprop.lab.deep.contenders import DeepContender
from vprop.lab.deep.tasks import DeepTask

Result = dict[str, Any]


def kept_in(folder: Path, task: DeepTask) -> Result | None:
    """The task's file, if it is of the task as it is now: of another budget, or other data, nothing can stay."""
    try:
        kept = json.loads((folder / f"{task.name}.json").read_text(encoding="utf-8"))
        same = kept["settings"] == json.loads(json.dumps(task.shown()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if same else None


def tuned_row(kept: Result | None, contender: DeepContender, task: DeepTask) -> Result | None:
    """The contender's row, if its setting was chosen from the grid that there is now."""
    rows = [] if kept is None else [row for row in kept["contenders"] if row["name"] == contender.name]
    for row in rows:
        grid = tuple({name: value for name, value in one.items() if name != "nll"} for one in row["grid"])
        if row["tuned"] and "predicts" in row and len(grid) > 1 and grid == contender.grid(task):
            return row
    return None

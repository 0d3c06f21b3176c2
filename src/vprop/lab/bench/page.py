"""Tables of a Markdown page, made of result files: no figure is written by hand.

A table stands between two comments,

    <!-- bench FILE: name, name, … -->
    <!-- end -->

with the rows of the results file that it shows, in their order; all of them without names. Of a sweep
(``FILE#parameters`` or ``FILE#tensors``) the names are columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vprop.lab import markdown
from vprop.lab.bench.errors import BenchError
from vprop.lab.bench.show import NOTHING, gibibytes, number, seconds, sweep_cells


def filled(text: str, results: Path) -> str:
    """The page with its tables made anew from the files in a folder."""

    def draw(place: str) -> str:
        source, _, names = place.partition(": ")
        file, _, part = source.partition("#")
        path = results / file
        if not path.exists():
            raise BenchError(f"The page asks for {file}, which is not in {results}.")
        return _table(json.loads(path.read_text()), part, names.split(", ") if names else [])

    return markdown.filled(text, "bench", draw)


def _table(result: dict[str, Any], part: str, wanted: list[str]) -> str:
    if "models" in result:
        return _training(next(model for model in result["models"] if model["model"] == part), wanted)
    if part:
        points = sweep_cells(result["sweep"][part], wanted)
        places = (number(params) if part == "parameters" else f"{tensors:,}" for params, tensors in points)
        cells = [[place, *cells] for place, cells in zip(places, points.values(), strict=True)]
        return _markdown([part, *wanted], cells)
    rows = _chosen(result["rows"], wanted)
    if "steady" in rows[0]:
        cells = [[row["name"], f"{row['steady']:.2f}", f"{row['peak']:.2f}"] for row in rows]
        return _markdown(["", "steady", "at most"], cells)
    return _markdown(
        ["", "time", "× RMSprop", "bytes per parameter", "× limit"],
        [
            [
                row["name"],
                seconds(row["time"]["median"]),
                f"{row['ratio']:.2f}",
                str(row["bytes_per_param"] or NOTHING),
                f"{row['times_limit']:.2f}" if row.get("times_limit") else NOTHING,
            ]
            for row in rows
        ],
    )


def _training(model: dict[str, Any], wanted: list[str]) -> str:
    rows = []
    for row in _chosen(model["rows"], wanted):
        ratio = f"{row['ratio']['median']:.3f} ({row['ratio']['low']:.3f}–{row['ratio']['high']:.3f})"
        rows.append([row["name"], seconds(row["time"]["median"]), ratio, gibibytes(row.get("peak_bytes"))])
    return _markdown(["", "time", "× AdamW fused (quartiles)", "peak memory"], rows)


def _chosen(rows: list[dict[str, Any]], wanted: list[str]) -> list[dict[str, Any]]:
    there = {row["name"]: row for row in rows if row["available"]}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise BenchError(f"No result for {', '.join(missing)}. There are: {', '.join(there)}.")
    return [there[name] for name in wanted] if wanted else list(there.values())


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return markdown.table(head, rows, align="---:")

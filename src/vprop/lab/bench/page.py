"""Tables of a Markdown page, made of result files: no figure is written by hand.

A table stands between two comments,

    <!-- bench FILE: name, name, … -->
    <!-- end -->

with the rows of the results file that it shows, in their order; all of them without names. Of a sweep
(``FILE#parameters`` or ``FILE#tensors``) the names are columns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vprop.lab.bench.errors import BenchError
from vprop.lab.bench.show import NOTHING, number, seconds

_TABLE = re.compile(r"(<!-- bench ([\w.-]+)(?:#(\w+))?(?:: (.*?))? -->\n).*?(<!-- end -->)", flags=re.S)


def filled(text: str, results: Path) -> str:
    """The page with its tables made anew from the files in a folder."""

    def table(found: re.Match[str]) -> str:
        begin, file, part, names, end = found.groups()
        path = results / file
        if not path.exists():
            raise BenchError(f"The page asks for {file}, which is not in {results}.")
        wanted = names.split(", ") if names else []
        return begin + "\n".join(_lines(json.loads(path.read_text()), part, wanted)) + "\n" + end

    return _TABLE.sub(table, text)


def _lines(result: dict[str, Any], part: str | None, wanted: list[str]) -> list[str]:
    if "models" in result:
        return _training(next(model for model in result["models"] if model["model"] == part), wanted)
    if part is not None:
        return _sweep(result["sweep"][part], part, wanted)
    rows = _chosen(result["rows"], wanted)
    if "steady" in rows[0]:
        return _table(["", "steady", "at most"], [[r["name"], f"{r['steady']:.2f}", f"{r['peak']:.2f}"] for r in rows])
    return _table(
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


def _training(model: dict[str, Any], wanted: list[str]) -> list[str]:
    rows = []
    for row in _chosen(model["rows"], wanted):
        peak = row.get("peak_bytes")
        ratio = f"{row['ratio']['median']:.3f} ({row['ratio']['low']:.3f}–{row['ratio']['high']:.3f})"
        memory = NOTHING if peak is None else f"{peak / 2**30:.2f} GiB"
        rows.append([row["name"], seconds(row["time"]["median"]), ratio, memory])
    return _table(["", "time", "× AdamW fused (quartiles)", "peak memory"], rows)


def _sweep(rows: list[dict[str, Any]], along: str, wanted: list[str]) -> list[str]:
    key = "params" if along == "parameters" else "tensors"
    table = []
    for value in dict.fromkeys(row[key] for row in rows):
        here = {row["name"]: row for row in rows if row[key] == value and row.get("available")}
        cells = [seconds((here[n]["wall"] or here[n]["time"])["median"]) if n in here else NOTHING for n in wanted]
        table.append([number(value) if key == "params" else f"{value:,}", *cells])
    return _table([along, *wanted], table)


def _chosen(rows: list[dict[str, Any]], wanted: list[str]) -> list[dict[str, Any]]:
    there = {row["name"]: row for row in rows if row["available"]}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise BenchError(f"No result for {', '.join(missing)}. There are: {', '.join(there)}.")
    return [there[name] for name in wanted] if wanted else list(there.values())


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]

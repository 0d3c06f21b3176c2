"""Results as tables, in a terminal and in Markdown pages: no figure is written by hand.

In a page a table stands between two comments,

    <!-- bench FILE: name, name, … -->
    <!-- end -->

with the rows of the results file that it shows, in their order; all of them without names. Of a sweep
(``FILE#parameters`` or ``FILE#tensors``) the names are columns, of training (``FILE#gpt``) the part is the model. Of
predictions the models are rows and the names columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vprop.lab import markdown
from vprop.lab.bench.errors import BenchError

Cells = list[list[str]]
"""The first row is the head."""

NOTHING = "–"


def seconds(value: float) -> str:
    """Three digits, in the unit that reads best.

    >>> seconds(1.5), seconds(0.0123456), seconds(4.2e-05)
    ('1.50 s', '12.3 ms', '42.0 µs')
    """
    unit, size = ("s", 1.0) if value >= 1 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    value /= size
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def number(value: float) -> str:
    """A count that may be large.

    >>> number(12), number(12600000), number(1.007e9)
    ('12', '12.6M', '1.01G')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def time_of(row: dict[str, Any]) -> dict[str, float]:
    """Of a point of a sweep, Python included; older files have that beside the time of the device."""
    return row.get("wall") or row["time"]


def cells(result: dict[str, Any], part: str = "", wanted: list[str] | None = None) -> Cells:
    """One table of a result: all of it, or a ``part`` (a model, or what a sweep goes along)."""
    if "predictions" in result:
        return _predictions(result["predictions"], wanted)
    if "models" in result:
        return _training(_chosen(_model(result, part)["rows"], wanted))
    if part:
        return _sweep(result["sweep"][part], part, wanted)
    rows = _chosen(result["rows"], wanted)
    if rows and "steady" in rows[0]:
        return [["", "steady", "at most"], *([r["name"], f"{r['steady']:.2f}", f"{r['peak']:.2f}"] for r in rows)]
    return [
        ["", "time", "× RMSprop", "bytes per parameter", "× limit"],
        *(
            [
                row["name"],
                seconds(row["time"]["median"]),
                f"{row['ratio']:.2f}",
                str(row["bytes_per_param"]),
                f"{row['times_limit']:.2f}",
            ]
            for row in rows
        ),
    ]


def _model(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in result["models"] if model["model"] == name)


def _training(rows: list[dict[str, Any]]) -> Cells:
    table = [["", "time", "× AdamW fused (quartiles)", "peak memory"]]
    for row in rows:
        ratio, peak = row["ratio"], row["peak_bytes"]
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"
        memory = NOTHING if peak is None else f"{peak / 2**30:.2f} GiB"
        table.append([row["name"], seconds(row["time"]["median"]), spread, memory])
    return table


def _predictions(models: list[dict[str, Any]], wanted: list[str] | None) -> Cells:
    """Seconds of the first, what the others take in its units: the least of each."""
    first, *others = wanted or [row["name"] for row in models[0]["rows"]]
    table = [["", "weights", first, *(f"× {name}" for name in others)]]
    for model in models:
        rows = {row["name"]: row for row in model["rows"] if row["available"]}
        ratios = [f"{rows[name]['ratio']:.2f}" if name in rows else NOTHING for name in others]
        table.append([model["model"], number(model["params"]), seconds(rows[first]["time"]["least"]), *ratios])
    return table


def _sweep(rows: list[dict[str, Any]], along: str, wanted: list[str] | None) -> Cells:
    points: dict[float, dict[str, str]] = {}
    for row in rows:
        point = points.setdefault(row["params" if along == "parameters" else "tensors"], {})
        if row["available"]:
            point[row["name"]] = seconds(time_of(row)["median"])
    names = wanted or list(dict.fromkeys(name for point in points.values() for name in point))
    shown = number if along == "parameters" else "{:,}".format
    lines = [[shown(at), *(point.get(name, NOTHING) for name in names)] for at, point in points.items()]
    return [[along, *names], *lines]


def _chosen(rows: list[dict[str, Any]], wanted: list[str] | None) -> list[dict[str, Any]]:
    there = {row["name"]: row for row in rows if row["available"]}
    missing = [name for name in wanted or [] if name not in there]
    if missing:
        raise BenchError(f"No result for {', '.join(missing)}. There are: {', '.join(there)}.")
    return [there[name] for name in wanted or there]


def filled(text: str, results: Path) -> str:
    """A Markdown page with its tables made anew from the files in a folder."""

    def draw(place: str) -> str:
        source, _, names = place.partition(": ")
        file, _, part = source.partition("#")
        path = results / file
        if not path.exists():
            raise BenchError(f"The page asks for {file}, which is not in {results}.")
        head, *rows = cells(json.loads(path.read_text()), part, names.split(", ") if names else None)
        return markdown.table(head, rows, align="---:")

    return markdown.filled(text, "bench", draw)


def show(result: dict[str, Any], console: Console) -> None:
    """All tables of a result in a terminal, and who is missing."""
    size, measured = result["settings"], result.get("rows", [])
    if "predictions" in result:
        title = f"a prediction with {size['samples']} draws, beside as many forwards, {where(result)}"
        _print(cells(result), title, console)
        measured = [row for model in result["predictions"] for row in model["rows"]]
    elif "models" in result:
        for model in result["models"]:
            title = f"training step: {model['model']}, {number(model['params'])} parameters, batch of {model['batch']}"
            _print(cells(result, model["model"]), f"{title}, {where(result)}", console)
            measured = measured + model["rows"]
    else:
        what = "sample + step" if "copy" in result else "memory beyond weights and gradients, in their size"
        title = f"{what}: {number(size['params'])} float32 parameters in {size['tensors']:,} tensors"
        _print(cells(result), f"{title}, {where(result)}", console)
    if "copy" in result:
        rate = result["copy"]["bytes_per_second"] / 1e9
        console.print(
            f"Limit: the bytes that must be moved, at the speed of a copy, {rate:,.1f} GB/s.", highlight=False
        )
    for along in result.get("sweep", {}):
        _print(cells(result, along), f"sample + step against the number of {along}", console)
    _absent(measured, console)


def where(result: dict[str, Any]) -> str:
    """The device, in a few words."""
    place = result["environment"]
    threads = "1 thread" if place["threads"] == 1 else f"{place['threads']} threads"
    return place["cuda"] if place["device"] == "cuda" else f"CPU, {threads}"


def _print(lines: Cells, title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for place, head in enumerate(lines[0]):
        table.add_column(head, justify="right" if place else "left", no_wrap=not place)
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def _absent(rows: list[dict[str, Any]], console: Console) -> None:
    """Who is missing and why."""
    for row in rows:
        if not row["available"]:
            text = f"Not available here: {row['name']}: {row['reason']}"
            console.print(text, style="yellow", markup=False, highlight=False)

"""Results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

NOTHING = "–"
MOST_NAMES = 4


def seconds(value: float) -> str:
    """Three digits, in the unit that reads best.

    >>> seconds(1.5), seconds(0.0123456), seconds(4.2e-05)
    ('1.50 s', '12.3 ms', '42.0 µs')
    """
    unit, size = ("s", 1.0) if value >= 1 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    return f"{_digits(value / size)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def number(value: float) -> str:
    """A count that may be large.

    >>> number(12), number(12600000), number(1.007e9)
    ('12', '12.6M', '1.01G')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _spread(values: dict[str, float] | None, shown: Callable[[float], str] = seconds, unit: str = "") -> str:
    """The median, and the quartiles beside it."""
    if values is None:
        return NOTHING
    return f"{shown(values['median'])}{unit} [dim]({shown(values['low'])}–{shown(values['high'])})[/dim]"


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def gibibytes(size: int | None) -> str:
    """A size of memory; none where nobody measured it."""
    return NOTHING if size is None else f"{size / 2**30:.2f} GiB"


def sweep_cells(rows: list[dict[str, Any]], names: list[str]) -> dict[tuple[int, int], list[str]]:
    """The times of the contenders at each point (parameters, tensors) of a sweep."""
    points: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        point = points.setdefault((row["params"], row["tensors"]), {})
        if row["available"]:
            point[row["name"]] = row["wall"] or row["time"]
    return {
        point: [seconds(times[name]["median"]) if name in times else NOTHING for name in names]
        for point, times in points.items()
    }


def step_table(result: dict[str, Any], console: Console) -> None:
    """Times of one step, with ratios and limits."""
    settings, on_gpu = result["settings"], result["environment"]["device"] == "cuda"
    title = f"sample + step: {number(settings['params'])} float32 parameters in {settings['tensors']:,} tensors"
    heads = ["GPU time (quartiles)", "wall time", "× RMSprop"] if on_gpu else ["time (quartiles)", "× RMSprop"]
    table = _table(f"{title}, {where(result)}", [*heads, "B/param", "× limit"])
    family = None
    for row in result["rows"]:
        if not row["available"]:
            continue
        if family not in (None, row["family"]):
            table.add_section()
        family = row["family"]
        wall = [NOTHING if row["wall"] is None else seconds(row["wall"]["median"])] if on_gpu else []
        moved = row["bytes_per_param"]
        cells = [_spread(row["time"]), *wall, _times(row["ratio"]), NOTHING if moved is None else str(moved)]
        table.add_row(row["name"], *cells, _times(row.get("times_limit")))
    console.print(table)
    if result.get("copy"):
        rate = result["copy"]["bytes_per_second"] / 1e9
        console.print(
            f"Limit: the bytes that must be moved, at the speed of a copy, {rate:,.1f} GB/s.", highlight=False
        )
    _absent(result["rows"], console)


def sweep_table(rows: list[dict[str, Any]], along: str, console: Console) -> None:
    """Times along a sweep, a column for each contender."""
    names = list(dict.fromkeys(row["name"] for row in rows if row["available"]))
    if names:
        table = Table(title=f"sample + step against the number of {along}", title_justify="left", header_style="bold")
        for head in ("parameters", "tensors", *names):
            table.add_column(head, justify="right")
        for (params, tensors), cells in sweep_cells(rows, names).items():
            table.add_row(number(params), f"{tensors:,}", *cells)
        console.print(table)


def memory_table(result: dict[str, Any], console: Console) -> None:
    """Extra memory in parameter-sizes."""
    settings = result["settings"]
    title = f"memory beyond weights and gradients, in sizes of the {number(settings['params'])} float32 parameters"
    table = _table(f"{title} ({settings['tensors']:,} tensors), {where(result)}", ["steady", "peak"])
    table.add_column("peak of each part", no_wrap=True)
    for row in result["rows"]:
        if row["available"]:
            several = len(row["peaks"]) > 1
            parts = ", ".join(f"{name} {peak:.2f}" for name, peak in row["peaks"].items()) if several else ""
            table.add_row(row["name"], f"{row['steady']:.2f}", f"{row['peak']:.2f}", parts)
    console.print(table)
    _absent(result["rows"], console)


def train_table(result: dict[str, Any], console: Console) -> None:
    """Whole training steps."""
    for model in result["models"]:
        title = f"training step: {model['model']}, {number(model['params'])} parameters, batch of {model['batch']}"
        heads = ["time (quartiles)", "× AdamW fused (quartiles)", "peak memory"]
        table = _table(f"{title}, {where(result)}", heads)
        for row in model["rows"]:
            if row["available"]:
                ratio = _spread(row["ratio"], lambda value: f"{value:.3f}", "×")
                table.add_row(row["name"], _spread(row["time"]), ratio, gibibytes(row["peak_bytes"]))
        console.print(table)
        _absent(model["rows"], console)


def _table(title: str, heads: list[str]) -> Table:
    """Contenders on the left, figures on the right."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("contender", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def where(result: dict[str, Any]) -> str:
    """The device, in a few words."""
    place = result["environment"]
    threads = "1 thread" if place["threads"] == 1 else f"{place['threads']} threads"
    return place["cuda"] if place["device"] == "cuda" else f"CPU, {threads}"


def _absent(rows: list[dict[str, Any]], console: Console) -> None:
    """Who is missing and why, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["available"]:
            reasons.setdefault(row["reason"], []).append(row.get("name", "all"))
    for reason, names in reasons.items():
        some = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
        console.print(f"Not available here: {some}: {reason}", style="yellow", markup=False, highlight=False)

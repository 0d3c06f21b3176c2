"""Plots of cost, from result files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, no display needed
import matplotlib.pyplot as plt

from vprop.lab.bench.limits import loop_bytes
from vprop.lab.bench.tables import number, seconds, time_of, where
from vprop.plots import style

# (name in the results, colour, label)
LOOKS = (
    ("Vprop fused closure", style.BLUE, "Vprop, fused"),
    ("Vprop fused CUDA graph closure", style.PURPLE, "Vprop, CUDA graph"),
    ("Vprop foreach closure", style.SKY, "Vprop, portable"),
    ("RMSprop default", style.BLACK, "torch RMSprop"),
    ("AdamW fused", style.OCHRE, "torch AdamW, fused"),
    ("ivon-opt", style.ORANGE, "ivon-opt"),
)


def draw(result: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Cost against parameters and against tensors; returns the files."""
    made = []
    for along, key in (("parameters", "params"), ("tensors", "tensors")):
        rows = [row for row in result["sweep"][along] if row["available"]]
        if rows:
            made.append(folder / f"{stem}-{along}.png")
            _draw(result, rows, along, key, made[-1])
    return made


@style.pictures()
def _draw(result: dict[str, Any], rows: list[dict[str, Any]], along: str, key: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axes.set(xscale="log", yscale="log", xlabel=f"number of {along}")
    for name, colour, label in LOOKS:
        own = [row for row in rows if row["name"] == name]
        if own:
            places, times = [row[key] for row in own], [time_of(row) for row in own]
            low, high = [t["low"] for t in times], [t["high"] for t in times]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)
            axes.plot(places, [t["median"] for t in times], "o-", color=colour, ms=4, label=label)
    bottom, top = axes.get_ylim()
    axes.set_ylim(0.6 * bottom, top)  # room for the words
    _out_of_reach(axes, result, rows, key)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value).replace(".00", "").replace(".0", ""))
    fixed = f"{rows[0]['tensors']:,} tensors" if key == "params" else f"{number(rows[0]['params'])} parameters"
    axes.set_title(f"Time of a step, sampling included ({fixed}; {where(result)})")
    style.name_lines(axes)
    style.save(figure, path)


def _out_of_reach(axes: Any, result: dict[str, Any], rows: list[dict[str, Any]], key: str) -> None:
    """Grey: faster than a copy of the bytes of Vprop's sample and step, at the run's own bandwidth."""
    rate = result["copy"]["bytes_per_second"]
    points = sorted({(row[key], loop_bytes("closure") * row["params"] / rate) for row in rows})
    places, limits = zip(*points, strict=True)
    floor, _ = axes.get_ylim()
    axes.fill_between(places, floor, limits, where=[limit > floor for limit in limits], color=style.GRID, lw=0)
    words = {"ha": "right", "va": "bottom", "fontsize": 8.5, "color": style.SOFT}
    axes.text(0.98, 0.015, "grey: below the bandwidth limit of Vprop", transform=axes.transAxes, **words)

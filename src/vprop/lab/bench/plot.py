"""Plots of cost, from result files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, no display needed
import matplotlib.pyplot as plt

from vprop.lab.bench.limits import loop_bytes
from vprop.lab.bench.tables import number, seconds, time_of, where

# (name in the results, colour, label)
LOOKS = (
    ("Vprop fused closure", "#2166ac", "Vprop, fused"),
    ("Vprop fused CUDA graph closure", "#35978f", "Vprop, CUDA graph"),
    ("Vprop foreach closure", "#74add1", "Vprop, portable"),
    ("RMSprop default", "#444444", "torch RMSprop"),
    ("AdamW fused", "#9a9a9a", "torch AdamW, fused"),
    ("ivon-opt", "#d6604d", "ivon-opt"),
)
LIMIT = "#c9a227"


def draw(result: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Cost against parameters and against tensors; returns the files."""
    made = []
    for along, key in (("parameters", "params"), ("tensors", "tensors")):
        rows = [row for row in result["sweep"][along] if row["available"]]
        if rows:
            made.append(folder / f"{stem}-{along}.png")
            _draw(result, rows, along, key, made[-1])
    return made


def _draw(result: dict[str, Any], rows: list[dict[str, Any]], along: str, key: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axes.set(xscale="log", yscale="log", xlabel=f"number of {along}")
    for name, colour, label in LOOKS:
        own = [row for row in rows if row["name"] == name]
        if own:
            places, times = [row[key] for row in own], [time_of(row) for row in own]
            low, high = [t["low"] for t in times], [t["high"] for t in times]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)
            axes.plot(places, [t["median"] for t in times], "o-", color=colour, lw=1.8, ms=4, label=label)
    # What a copy would need for the bytes of Vprop's sample and step, at the run's own bandwidth.
    rate = result["copy"]["bytes_per_second"]
    points = sorted({(row[key], loop_bytes("closure") * row["params"] / rate) for row in rows})
    axes.plot(*zip(*points, strict=True), "--", color=LIMIT, lw=1.3, zorder=1, label="bandwidth limit of Vprop")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e8e8e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value).replace(".00", "").replace(".0", ""))
    fixed = f"{rows[0]['tensors']:,} tensors" if key == "params" else f"{number(rows[0]['params'])} parameters"
    axes.set_title(f"Time of a step, sampling included ({fixed}; {where(result)})", loc="left", fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)

"""Plots of cost, from result files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, no display needed
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from vprop.lab.bench.limits import loop_bytes
from vprop.lab.bench.show import number, seconds, where

COLOURS = {
    "Vprop fused closure": "#2166ac",
    "Vprop fused CUDA graph closure": "#35978f",
    "Vprop foreach closure": "#74add1",
    "RMSprop default": "#444444",
    "AdamW fused": "#9a9a9a",
    "ivon-opt": "#d6604d",
}
LABELS = {
    "Vprop fused closure": "Vprop, fused",
    "Vprop fused CUDA graph closure": "Vprop, CUDA graph",
    "Vprop foreach closure": "Vprop, portable",
    "RMSprop default": "torch RMSprop",
    "AdamW fused": "torch AdamW, fused",
}
LIMIT = "#c9a227"
APART = 0.055
"""Least distance of two labels, as a part of the height of the axes."""


def draw(result: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Cost against parameters and against tensors; returns the files."""
    made = []
    for along, key in (("parameters", "params"), ("tensors", "tensors")):
        rows = [row for row in result["sweep"][along] if row["available"]]
        if rows:
            made.append(_draw(result, rows, along, key, folder / f"{stem}-{along}.png"))
    return made


def _draw(result: dict[str, Any], rows: list[dict[str, Any]], along: str, key: str, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axes.set(xscale="log", yscale="log")
    ends = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        places, times = [row[key] for row in own], [row["wall"] or row["time"] for row in own]
        colour, strong = COLOURS.get(name, "#7b3294"), name.startswith("Vprop fused")
        axes.fill_between(places, [t["low"] for t in times], [t["high"] for t in times], color=colour, alpha=0.15, lw=0)
        medians = [t["median"] for t in times]
        axes.plot(places, medians, "o-", color=colour, lw=2.4 if strong else 1.5, ms=4, zorder=3 if strong else 2)
        ends.append((places[-1], medians[-1], LABELS.get(name, name), colour))
    ends += _draw_limit(axes, result, rows, key)
    _style(axes, rows, along, key, result)
    _label(axes, ends)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _draw_limit(
    axes: Any, result: dict[str, Any], rows: list[dict[str, Any]], key: str
) -> list[tuple[float, float, str, str]]:
    """What a copy would need for the bytes of Vprop's sample and step; the run's own bandwidth."""
    if not result.get("copy"):
        return []
    rate = result["copy"]["bytes_per_second"]
    points = sorted({(row[key], loop_bytes("closure") * row["params"] / rate) for row in rows})
    axes.plot([x for x, _ in points], [y for _, y in points], "--", color=LIMIT, lw=1.3, zorder=1)
    return [(*points[-1], "bandwidth limit of Vprop", LIMIT)]


def _style(axes: Any, rows: list[dict[str, Any]], along: str, key: str, result: dict[str, Any]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e8e8e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _round_seconds(value)))
    other = f"{number(max(row['params'] for row in rows))} parameters" if key == "tensors" else ""
    fixed = other or f"{rows[0]['tensors']:,} tensors"
    axes.set_xlabel(f"number of {along}")
    axes.set_title(f"Time of a step, sampling included ({fixed}; {where(result)})", loc="left", fontsize=11)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.28)  # room for the labels
    ticks = [10.0**power for power in range(0, 13) if low <= 10.0**power <= high]
    axes.set_xticks(ticks)


def _round_seconds(value: float) -> str:
    text = seconds(value)
    figure, unit = text.split()
    return f"{float(figure):g} {unit}"


def _label(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """A name at the end of each line, moved up or down where two would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[1])
    places = [to_axes.transform((x, y)) for x, y, _, _ in ends]
    right = max(place[0] for place in places)
    heights = apart([float(place[1]) for place in places])
    for (_, _, text, colour), place, height in zip(ends, places, heights, strict=True):
        axes.annotate(
            text,
            place,
            xytext=(right + 0.02, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6, "shrinkB": 4, "relpos": (0, 0.5)},
        )


def apart(heights: list[float], least: float = APART) -> list[float]:
    """Ascending heights, moved as little as it takes for neighbours to keep their distance.

    >>> [round(height, 3) for height in apart([0.5, 0.5, 0.9], least=0.1)]
    [0.45, 0.55, 0.9]
    """
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            overlap = least - (moved[i + 1] - moved[i])
            if overlap > 0:
                moved[i] -= overlap / 2
                moved[i + 1] += overlap / 2
    return moved

"""Figures for print, a PNG and a PDF each; the page shows those that need no buttons as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, no display needed
import matplotlib.pyplot as plt
import numpy as np

from vprop.lab.report import ranges
from vprop.lab.report.curves import axis_ranges, has_more, rank
from vprop.lab.report.style import MATPLOTLIB_DASH, Styles, legend_label
from vprop.plots import style
from vprop.plots.style import INK, SOFT

LOOK: dict[Any, Any] = style.LOOK | {"text.parse_math": False}  # a dollar sign in a label is a dollar sign
TITLES = {"elbo": "ELBO (higher is better)", "log_loss": "Test log-loss (lower is better)"}


def draw_panel(panel: dict[str, Any], styles: Styles, folder: Path) -> None:
    """ELBO and log-loss against passes, counted fairly: the first six methods, and in a second figure all of them."""
    with matplotlib.rc_context(LOOK):
        _draw_methods(panel, styles.shown(panel["methods"]), styles, folder / panel["id"], named=True)
        if has_more(panel):
            _draw_methods(panel, styles.sort(panel["methods"]), styles, folder / f"{panel['id']}-all", named=False)


def _draw_methods(
    panel: dict[str, Any], methods: list[dict[str, Any]], styles: Styles, path: Path, *, named: bool
) -> None:
    """With bands of one standard deviation; ``named`` at the lines, or in a legend below."""
    rows = 0 if named else -(-len(methods) // 4)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.1 + 0.2 * rows), layout="constrained")
    limits = axis_ranges(panel)
    first, last = ranges.first_and_last(panel["methods"], "passes")
    handles: dict[str, Any] = {}
    for ax, (metric, title) in zip(axes, TITLES.items(), strict=True):
        for method in methods:
            line = _curve(ax, method, metric, styles)
            if line is not None:
                handles.setdefault(legend_label(method), line)
        lines = [line for line in panel["lines"] if line["metric"] == metric]
        _levels(ax, lines, higher_is_better=metric == "elbo")
        ax.set(xscale="log", xlabel="passes over the data (gradient evaluations of all data)", title=title)
        ax.set_xlim(first / 1.05, 1.05 * last)
        if limits[metric]:
            ax.set_ylim(*limits[metric])
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}".replace("-", "−"))
    figure.suptitle(panel["title"], x=0.01, ha="left")
    if named:
        style.name_lines(*axes)
    elif handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)))
    _save(figure, path)


def draw_explore(result: dict[str, Any], styles: Styles, folder: Path) -> None:
    """Contours with paths on the left, success rates on the right."""
    with matplotlib.rc_context(LOOK):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), width_ratios=(1.45, 1), layout="constrained")
        surface = result["surface"]
        height = _heights(surface["value"])
        shades = matplotlib.colors.LinearSegmentedColormap.from_list("low", ["#b9c6d6", "#dfe6ee", "#fbfcfd"])
        left.contourf(surface["x"], surface["y"], height, levels=18, cmap=shades)
        left.contour(surface["x"], surface["y"], height, levels=18, colors="#aab6c4", linewidths=0.5)
        _marks(left, result)
        for path in styles.sort(result["trajectories"]):
            points, color = np.array(path["points"], dtype=float), styles.of(path["label"]).color
            left.plot(*points.T, color=color, linewidth=1.6, label=path["label"])
            left.plot(*points[-1], "o" if path["success"] else "X", color=color, markeredgecolor="white", markersize=8)
        left.set(xlabel="first parameter", ylabel="second parameter", title=result["title"])
        left.set_xlim(surface["x"][0], surface["x"][-1])
        left.set_ylim(surface["y"][0], surface["y"][-1])
        left.grid(False)
        handles, names = left.get_legend_handles_labels()
        unique = dict(zip(reversed(names), reversed(handles), strict=True))
        ordered = list(dict.fromkeys(names))
        figure.legend([unique[name] for name in ordered], ordered, loc="outside lower center", ncols=5)
        _rates(right, result["success"], styles)
        _save(figure, folder / "explore")


def draw_memory(result: dict[str, Any], styles: Styles, folder: Path) -> None:
    """One bar for each optimizer, hatched where it is ours."""
    with matplotlib.rc_context(LOOK | {"hatch.linewidth": 0.8}):
        rows = result["rows"]
        figure, ax = plt.subplots(figsize=(8, 1.3 + 0.36 * len(rows)), layout="constrained")
        values = [row["bytes_per_parameter"] for row in rows]
        bars = ax.barh(range(len(rows)), values, height=0.62, color=[styles.color(row["label"]) for row in rows])
        for bar, row in zip(bars, rows, strict=True):
            if row["group"] == "ours":
                bar.set(hatch="///", edgecolor="white", linewidth=0)
        ax.bar_label(bars, [f"{value:g}" for value in values], padding=4, color=INK)
        ax.set_yticks(range(len(rows)), [legend_label(row) for row in rows])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.08)
        ax.set(xlabel="bytes per parameter", title=result["title"])
        _save(figure, folder / "memory")


def _curve(ax: Any, method: dict[str, Any], metric: str, styles: Styles) -> Any:
    """The mean, its band, and a cross where the runs ended early."""
    curve = method.get(metric)
    if not curve:
        return None
    look = styles.of(method["name"])
    x, mean, std = (np.array(values, dtype=float) for values in (method["passes"], curve["mean"], curve["std"]))
    if not np.isfinite(mean).any():
        return None
    if method["group"] != "extra":  # a figure that cannot be toggled has no room for every band
        ax.fill_between(x, mean - std, mean + std, color=look.color, alpha=0.16, linewidth=0)
    width = 1.0 if method["group"] == "extra" else 1.7
    (line,) = ax.plot(
        x, mean, color=look.color, linestyle=MATPLOTLIB_DASH[look.dash], linewidth=width, label=legend_label(method)
    )
    if not np.isfinite(mean[-1]):
        last = np.flatnonzero(np.isfinite(mean))[-1]
        ax.plot(x[last], mean[last], marker="X", color=look.color, markersize=6, label="_cross")
    return line


def _levels(ax: Any, lines: list[dict[str, Any]], *, higher_is_better: bool) -> None:
    """Dashed lines; the best one's label is on its far side, the others' on the near side."""
    for index, line in enumerate(sorted(lines, key=rank)):
        ax.axhline(line["value"], color=INK, linestyle="--", linewidth=1, label="_level")
        end, below = index > 1, higher_is_better != (index == 0)
        ax.annotate(
            line["label"],
            xy=(1.0 if end else 0.0, line["value"]),
            xycoords=("axes fraction", "data"),
            xytext=(-4 if end else 4, -3 if below else 3),
            textcoords="offset points",
            ha="right" if end else "left",
            va="top" if below else "bottom",
            fontsize=8.5,
            color=INK,
        )


def _heights(values: list[list[float | None]]) -> np.ndarray:
    """The root of the height above the lowest point, cut at its top tenth: contours are then dense near the minima."""
    heights = np.array(values, dtype=float)
    cut = np.nanquantile(heights, 0.9, method="lower")
    return np.sqrt(np.minimum(heights, cut) - np.nanmin(heights))


def _marks(ax: Any, result: dict[str, Any]) -> None:
    """Where paths begin and where they may end."""
    ax.plot(*result["start"], "o", markersize=9, markeredgecolor=INK, markerfacecolor="none", label="start")
    for minimum in result["minima"]:
        marker, size = ("*", 19) if minimum["label"] == "global minimum" else ("D", 10)
        look = {"color": INK, "markeredgecolor": "white", "markersize": size, "label": minimum["label"]}
        ax.plot(minimum["x"], minimum["y"], marker, **look)


def _rates(ax: Any, rows: list[dict[str, Any]], styles: Styles) -> None:
    for place, row in enumerate(rows):
        ax.plot([100 * row["low"], 100 * row["high"]], [place, place], color=SOFT, linewidth=1.6)
        ax.plot(100 * row["rate"], place, "o", color=styles.of(row["label"]).color, markersize=8)
    ax.set_yticks(range(len(rows)), [row["label"] for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-4, 104)
    ax.xaxis.set_major_formatter("{x:.0f}%")
    ax.set(xlabel="runs that reach the global minimum", title="How often it succeeds")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path.with_name(f"{path.name}.pdf"), metadata={"CreationDate": None})  # the same bytes every time
    style.save(figure, path.with_name(f"{path.name}.png"))

"""Plots of a task's results: accuracy and log-loss, reliability, draws, time. Drawing never trains."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vprop.lab.deep.page import plots_of
from vprop.lab.deep.table import own_kind, own_scores
from vprop.lab.plots import BLUE, GREY, ORANGE, plt, save
from vprop.plots import style

Row = dict[str, Any]


@style.pictures()
def draw(result: Row, folder: Path) -> dict[str, Path]:
    """All plots that the results have figures for, by name."""
    makers = {"scores": _scores, "reliability": _reliability, "draws": _draws, "time": _time}
    folder.mkdir(parents=True, exist_ok=True)
    return {name: makers[name](result, folder / f"{result['task']}-{name}.png") for name in plots_of(result)}


def _far(values: list[float]) -> float:
    """Beyond this, a point would leave no room for the others: it is named, and not drawn."""
    return 1.6 * min(values)


def _scores(result: Row, path: Path) -> Path:
    """Accuracy against log-loss, with the spread over seeds; a text's group has no accuracy, and is not here."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = [(row, own_scores(row)) for row in (*result["contenders"], *result["groups"])]
    known = [(row, one) for row, one in rows if "accuracy" in one and one["nll"]["mean"] is not None]
    limit = _far([one["nll"]["mean"] for _, one in known] or [1.0])
    points: list[tuple[tuple[float, float], str, str]] = []
    few = len(known) <= style.MOST_LINES  # more names than that would lie on each other: numbers then, and a list
    for number, (row, scores) in enumerate(known, 1):
        x, y, color = scores["nll"], scores["accuracy"], BLUE if row["ours"] else ORANGE
        name = row["label"] if few else f"{number}  {row['label']}"
        if x["mean"] > limit:
            axes.plot([], [], " ", label=f"{name}: NLL {x['mean']:.2f}, not drawn")
            continue
        marker = "s" if "members" in row else "o"
        spread = [one["std"] and one["std"] * by for one, by in ((y, 100), (x, 1))]
        look = {"fmt": marker, "color": color, "capsize": 2, "elinewidth": 0.8, "markersize": 5}
        axes.errorbar(x["mean"], 100 * y["mean"], *spread, label=name, **look)  # type: ignore[arg-type]
        points.append(((x["mean"], 100 * y["mean"]), name if few else str(number), color))
    title = result["title"] if few else textwrap.fill(result["title"], 44)  # the list of names is beside it
    axes.set(xlabel="NLL (lower is better)", ylabel="accuracy, %", title=title)
    axes.margins(0.2 if few else 0.05, 0.1)
    beside = [(6.0, 5.0)] * len(points)
    if not few:
        figure.legend(fontsize=7, loc="outside right upper")
        figure.canvas.draw()  # so that it is known where points are
        at = axes.transData.transform([place for place, _, _ in points]) * 72 / figure.dpi
        beside = _beside(at, [text for _, text, _ in points])
    for (place, text, color), offset in zip(points, beside, strict=True):
        axes.annotate(text, place, offset, textcoords="offset points", fontsize=8, color=color)
    return save(figure, path)


_AROUND = [
    (distance * math.cos(angle), distance * math.sin(angle))
    for distance in (11, 15, 20, 26, 33, 40)
    for angle in (math.pi * turn / 8 for turn in (1, 15, 7, 9, 3, 13, 5, 11, 2, 14, 6, 10, 4, 12, 0, 8))
]
"""From a point to the middle of its number, in typographic points, the nearest first."""


def _beside(points: Iterable[tuple[float, float]], texts: Sequence[str]) -> list[tuple[float, float]]:
    """Where texts begin, seen from what they name: near, where they hide no other and no point if there is room."""
    at = [(float(x), float(y)) for x, y in points]
    taken = [(x, y, 7.0, 7.0) for x, y in at]  # the middle, width and height of the marks
    found = []
    for (x, y), text in zip(at, texts, strict=True):
        size = 5.5 * len(text) + 1, 8.0
        boxes = [(x + right, y + up, *size) for right, up in _AROUND]
        box = next((one for one in boxes if not any(_overlap(one, other) for other in taken)), boxes[0])
        taken.append(box)
        found.append((box[0] - x - size[0] / 2, box[1] - y - 3))
    return found


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(abs(one[axis] - other[axis]) < (one[axis + 2] + other[axis + 2]) / 2 for axis in (0, 1))


def _diagram(row: Row) -> Row | None:
    return row["diagrams"][own_kind(row)]


def _reliability(result: Row, path: Path) -> Path:
    rows = [row for row in result["contenders"] if _diagram(row)]
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    size = (2.2 * columns, 2.3 * lines)
    figure, panels = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in panels.flat[len(rows) :]:
        axes.remove()
    for axes in panels.flat[len(rows) - columns : len(rows)]:
        axes.tick_params(labelbottom=True)
    for axes, row in zip(panels.flat, rows, strict=False):
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
        diagram, color = _diagram(row), BLUE if row["ours"] else ORANGE
        assert diagram is not None
        sizes = [5 + 100 * share for share in diagram["share"]]
        axes.scatter(diagram["confidence"], diagram["accuracy"], s=sizes, color=color, alpha=0.8, linewidths=0)
        axes.set_title(row["label"], fontsize=8)
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accuracy", fontsize=9)
    return save(figure, path)


def _draws(result: Row, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    curves = {
        row["label"]: {int(count): one["mean"] for count, one in row["nll_by_draws"].items()}
        for row in result["contenders"]
        if row["nll_by_draws"] and all(one["mean"] is not None for one in row["nll_by_draws"].values())
    }
    at_mean = {row["label"]: row["scores"]["mean"]["nll"]["mean"] for row in result["contenders"]}
    limit = _far([min(curve.values()) for curve in curves.values()] or [1.0])
    best = sorted(curves, key=lambda label: min(curves[label].values()))[: style.MOST_LINES]  # the table has all
    curves = {label: curve for label, curve in curves.items() if label in best and min(curve.values()) <= limit}
    for label, curve in curves.items():
        (line,) = axes.plot(list(curve), list(curve.values()), marker="o", markersize=4, label=label)
        if at_mean[label] is not None and at_mean[label] <= limit:
            axes.axhline(at_mean[label], color=line.get_color(), linestyle=":", linewidth=0.8)
    counts = sorted({count for curve in curves.values() for count in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="draws of the weights (dotted: at the mean)", ylabel="NLL", title=result["title"])
    style.name_lines(axes)
    return save(figure, path)


def _time(result: Row, path: Path) -> Path:
    rows = [row for row in result["contenders"] if row["cost"]]
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(rows) + 1.2), layout="constrained")
    colors = [BLUE if row["ours"] else ORANGE for row in rows]
    axes.barh([row["label"] for row in rows], [row["cost"]["gradient_ms"] for row in rows], color=colors)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of training for one gradient", title=result["title"])
    return save(figure, path)

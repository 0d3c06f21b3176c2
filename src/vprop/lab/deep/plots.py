"""Plots of a task's results: accuracy and log-loss, reliability, draws, time. Drawing never trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vprop.lab.deep.page import plots_of
from vprop.lab.deep.table import own_scores
from vprop.lab.plots import BLUE, GREY, ORANGE, plt, save

Row = dict[str, Any]


def draw(result: Row, folder: Path) -> dict[str, Path]:
    """All plots that the results have figures for, by name."""
    makers = {"scores": _scores, "reliability": _reliability, "draws": _draws, "time": _time}
    folder.mkdir(parents=True, exist_ok=True)
    return {name: makers[name](result, folder / f"{result['task']}-{name}.png") for name in plots_of(result)}


def _points(result: Row) -> list[tuple[Row, Row]]:
    rows = [(row, own_scores(row)) for row in (*result["contenders"], *result["groups"])]
    return [(row, scores) for row, scores in rows if scores["nll"]["mean"] is not None]


def _scores(result: Row, path: Path) -> Path:
    """Accuracy against log-loss, with the spread over seeds; a text's group has no accuracy."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row, scores in _points(result):
        if "accuracy" not in scores:
            continue
        color = BLUE if row["ours"] else ORANGE
        x, y = scores["nll"], scores["accuracy"]
        marker, spread = "s" if "members" in row else "o", (x["std"] or 0, 100 * (y["std"] or 0))
        axes.errorbar(x["mean"], 100 * y["mean"], spread[1], spread[0], fmt=marker, color=color, capsize=2)
        axes.annotate(row["label"], (x["mean"], 100 * y["mean"]), (4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="NLL (lower is better)", ylabel="accuracy, %", title=result["title"])
    return save(figure, path)


def _diagram(row: Row) -> Row | None:
    return row["diagrams"].get("averaged", row["diagrams"]["mean"])


def _reliability(result: Row, path: Path) -> Path:
    rows = [row for row in result["contenders"] if _diagram(row)]
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    size = (2.2 * columns, 2.3 * lines)
    figure, panels = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in panels.flat:
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for axes, row in zip(panels.flat, rows, strict=False):
        diagram, color = _diagram(row), BLUE if row["ours"] else ORANGE
        assert diagram is not None
        sizes = [5 + 100 * share for share in diagram["share"]]
        axes.scatter(diagram["confidence"], diagram["accuracy"], s=sizes, color=color, alpha=0.8, linewidths=0)
        axes.set_title(row["label"], fontsize=8)
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accuracy", fontsize=9)
    return save(figure, path)


def _draws(result: Row, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for row in result["contenders"]:
        known = {int(count): one["mean"] for count, one in row["nll_by_draws"].items() if one["mean"] is not None}
        if known:
            (line,) = axes.plot(list(known), list(known.values()), marker="o", markersize=3, label=row["label"])
            mean = row["scores"]["mean"]["nll"]["mean"]
            if mean is not None:
                axes.axhline(mean, color=line.get_color(), linestyle=":", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="draws of the weights (dotted: at the mean)", ylabel="NLL", title=result["title"])
    axes.legend(fontsize=7)
    return save(figure, path)


def _time(result: Row, path: Path) -> Path:
    rows = [row for row in result["contenders"] if row["cost"]]
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(rows) + 1.2), layout="constrained")
    colors = [BLUE if row["ours"] else ORANGE for row in rows]
    axes.barh([row["label"] for row in rows], [row["cost"]["gradient_ms"] for row in rows], color=colors)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of training for one gradient", title=result["title"])
    return save(figure, path)

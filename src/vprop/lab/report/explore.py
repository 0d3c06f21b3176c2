"""The surface with two minima: contours with the paths of the methods, and how often each succeeds."""

from __future__ import annotations

import math
from typing import Any

from vprop.lab.report.markup import label
from vprop.lab.report.style import Styles

PAPER_WHITE = [[0.0, "#b9c6d6"], [0.5, "#dfe6ee"], [1.0, "#fbfcfd"]]  # low is dark, and paths stand out


def heights(surface: dict[str, Any]) -> list[list[float | None]]:
    """The root of the height above the lowest point, cut at its top tenth: contours are then dense near the minima."""
    flat = sorted(value for row in surface["value"] for value in row if value is not None)
    lowest, cut = flat[0], flat[int(0.9 * (len(flat) - 1))]
    return [
        [None if value is None else math.sqrt(min(value, cut) - lowest) for value in row] for row in surface["value"]
    ]


def figures(result: dict[str, Any], styles: Styles) -> dict[str, dict[str, Any]]:
    """Two plotly figures by their identifiers."""
    return {
        "explore": {"kind": "plain", "data": _paths(result, styles), "layout": _paths_layout(result)},
        "explore-success": _success(result, styles),
    }


def _paths(result: dict[str, Any], styles: Styles) -> list[dict[str, Any]]:
    surface = result["surface"]
    traces: list[dict[str, Any]] = [
        {
            "type": "contour",
            "x": surface["x"],
            "y": surface["y"],
            "z": heights(surface),
            "customdata": surface["value"],
            "hovertemplate": "loss %{customdata:.4~g}<extra></extra>",
            "colorscale": PAPER_WHITE,
            "showscale": False,
            "ncontours": 18,
            "line": {"width": 0.6, "color": "#aab6c4"},
        }
    ]
    start_x, start_y = result["start"]
    traces.append(_mark([start_x], [start_y], ["start"], "circle-open", "start"))
    for name, symbol in (("global minimum", "star"), ("near minimum", "diamond")):
        found = [minimum for minimum in result["minima"] if minimum["label"] == name]
        texts = [f"{label(minimum['label'])}, loss {minimum['value']:.4g}" for minimum in found]
        if found:
            traces.append(_mark([m["x"] for m in found], [m["y"] for m in found], texts, symbol, name))
    named: set[str] = set()
    for path in styles.sort(result["trajectories"]):
        traces.append(_path(path, styles.of(path["label"]).color, showlegend=path["label"] not in named))
        named.add(path["label"])
    return traces


def _path(path: dict[str, Any], color: str, *, showlegend: bool) -> dict[str, Any]:
    """A path whose last point says whether it arrived: a disc, or a cross."""
    name = label(path["label"])
    steps = len(path["points"])
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point[0] for point in path["points"]],
        "y": [point[1] for point in path["points"]],
        "name": name,
        "legendgroup": name,
        "showlegend": showlegend,
        "line": {"color": color, "width": 2},
        "marker": {
            "color": color,
            "size": [0] * (steps - 1) + [9],
            "symbol": "circle" if path["success"] else "x",
            "line": {"width": [0] * (steps - 1) + [1.5], "color": "#ffffff"},
        },
        "hovertemplate": f"<b>{name}</b>, {'arrived' if path['success'] else 'did not arrive'}<br>"
        "step %{pointNumber}: (%{x:.3~g}, %{y:.3~g})<extra></extra>",
    }


def _mark(x: list[float], y: list[float], texts: list[str], symbol: str, name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "text": texts,
        "name": name,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": symbol, "size": 17, "color": "#111827", "line": {"width": 1.5, "color": "#ffffff"}},
    }


def _paths_layout(result: dict[str, Any]) -> dict[str, Any]:
    surface = result["surface"]
    return {
        "height": 480,
        "legend_items": len({path["label"] for path in result["trajectories"]}) + 3,
        "xaxis": {"range": [surface["x"][0], surface["x"][-1]], "title": "first parameter"},
        "yaxis": {"range": [surface["y"][0], surface["y"][-1]], "title": "second parameter"},
    }


def _success(result: dict[str, Any], styles: Styles) -> dict[str, Any]:
    """Rates as points with their intervals: bars would hide where an interval begins."""
    rows = result["success"]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [100 * row["rate"] for row in rows],
        "y": [label(row["label"]) for row in rows],
        "marker": {"size": 12, "color": [styles.of(row["label"]).color for row in rows]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [100 * max(row["high"] - row["rate"], 0) for row in rows],
            "arrayminus": [100 * max(row["rate"] - row["low"], 0) for row in rows],
            "thickness": 1.6,
            "width": 5,
            "color": "#52606d",
        },
        "customdata": [row["seeds"] for row in rows],
        "hovertemplate": "<b>%{y}</b><br>%{x:.1f}% of %{customdata} runs<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "height": 100 + 36 * len(rows),
        "xaxis": {"range": [-4, 104], "ticksuffix": "%", "title": "global minimum reached"},
        "yaxis": {"range": [len(rows) - 0.5, -0.5], "automargin": True, "showline": False},
    }
    return {"kind": "plain", "data": [trace], "layout": layout}

"""State per parameter, as bars."""

from __future__ import annotations

from typing import Any

from vprop.lab.report.markup import label
from vprop.lab.report.style import Styles, legend_label


def figure(result: dict[str, Any], styles: Styles) -> dict[str, Any]:
    """One bar for each optimizer, hatched where it is ours."""
    rows = result["rows"]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [row["bytes_per_parameter"] for row in rows],
        "y": [label(legend_label(row)) for row in rows],
        "text": [f"{row['bytes_per_parameter']:g}" for row in rows],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [label(row["tensors"]) for row in rows],
        "hovertemplate": "<b>%{y}</b><br>%{x:g} bytes per parameter<br>%{customdata}<extra></extra>",
        "marker": {
            "color": [styles.color(row["label"]) for row in rows],
            "pattern": {
                "shape": ["/" if row["group"] == "ours" else "" for row in rows],
                "size": 7,
                "solidity": 0.2,
                "fillmode": "overlay",
                "fgcolor": "#ffffff",
            },
        },
        "showlegend": False,
    }
    layout = {
        "height": 90 + 34 * len(rows),
        "bargap": 0.35,
        "xaxis": {"rangemode": "tozero", "title": "bytes per parameter"},
        "yaxis": {"autorange": "reversed", "automargin": True, "showline": False, "showgrid": False},
    }
    return {"kind": "plain", "data": [trace], "layout": layout}

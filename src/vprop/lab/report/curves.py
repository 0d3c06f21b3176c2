"""Panels of curves: what the page's script needs to draw ELBO and log-loss against passes, and the panel's HTML."""

from __future__ import annotations

from typing import Any

from vprop.lab.report import ranges
from vprop.lab.report.markup import picture, setting, text
from vprop.lab.report.schema import METRICS
from vprop.lab.report.style import Styles, legend_label
from vprop.lab.report.tables import method_table
from vprop.plots.style import MOST_LINES


def figure(panel: dict[str, Any], styles: Styles) -> dict[str, Any]:
    """The panel's curves and how to draw them; page.js draws them, since its buttons change them."""
    methods, opening = [], {method["name"] for method in styles.shown(panel["methods"])}
    for method in styles.sort(panel["methods"]):
        style = styles.of(method["name"])
        methods.append(
            {
                "name": method["name"],
                "label": legend_label(method),
                "color": style.color,
                "dash": style.dash,
                "width": style.width,
                "visible": method["group"] != "extra" and method["name"] in opening,
                "passes": method["passes"],
                "paper_passes": method["paper_passes"],
                "elbo": _band(method.get("elbo")),
                "log_loss": _band(method.get("log_loss")),
            }
        )
    lines = [{**line, "rank": rank(line)} for line in panel["lines"]]
    return {"methods": methods, "lines": lines, "ranges": axis_ranges(panel)}


def axis_ranges(panel: dict[str, Any]) -> dict[str, Any]:
    """Initial ranges of the y axes; ``distance`` has one for each of the panel's lines."""
    shown = [method for method in panel["methods"] if method["group"] != "extra"] or panel["methods"]
    curves = {metric: [method[metric]["mean"] for method in shown if method.get(metric)] for metric in METRICS}
    lines = {metric: [line["value"] for line in panel["lines"] if line["metric"] == metric] for metric in METRICS}
    return {
        "elbo": ranges.limits(curves["elbo"], lines["elbo"], higher_is_better=True),
        "log_loss": ranges.limits(curves["log_loss"], lines["log_loss"], higher_is_better=False),
        "distance": [
            ranges.distance_limits(curves["elbo"], line["value"]) if is_exact(line) else None for line in panel["lines"]
        ],
    }


def is_exact(line: dict[str, Any]) -> bool:
    """Whether the distance to a line means something."""
    return bool(line["metric"] == "elbo" and "exact" in line["label"].lower())


def rank(line: dict[str, Any]) -> float:
    """Smaller is better, whichever way the metric goes."""
    return float(-line["value"] if line["metric"] == "elbo" else line["value"])


def html(panel: dict[str, Any], styles: Styles) -> str:
    """Heading, buttons, the place of the figure, and the table behind it."""
    identifier = text(panel["id"])
    return f"""
<article class="panel" id="panel-{identifier}">
<header class="panel-head">
<div><h3>{text(panel["title"])}</h3><p class="facts">{text(_facts(panel))}</p></div>
{files(panel["id"], has_all=has_more(panel))}
</header>
{_controls(panel)}
{_plot(panel["id"], f"{panel['title']}: ELBO and test log-loss against passes over the data")}
<details><summary>Numbers: step sizes, grids, final values</summary>
{method_table(panel, styles)}
</details>
</article>"""


def files(identifier: str, *, has_all: bool = False) -> str:
    """Links to the static versions of a figure."""
    path = f"figures/{text(identifier)}"
    links = f'<a href="{path}.png">PNG</a> <a href="{path}.pdf">PDF</a>'
    more = f' <a href="{path}-all.png">all methods: PNG</a> <a href="{path}-all.pdf">PDF</a>' if has_all else ""
    return f'<p class="files">{links}{more}</p>'


def has_more(panel: dict[str, Any]) -> bool:
    """Whether there are more methods than a figure opens with, and so a second static one."""
    return len(panel["methods"]) > MOST_LINES


def _plot(identifier: str, description: str) -> str:
    """The place of a figure; a reader without scripts sees the static one."""
    return (
        f'<div class="plot" data-figure="{text(identifier)}" role="figure" aria-label="{text(description)}"></div>\n'
        f"<noscript>{picture(f'figures/{identifier}.png', description)}</noscript>"
    )


def _facts(panel: dict[str, Any]) -> str:
    batch = "full batch" if panel["batch"] == "full" else f"batches of {panel['batch']}"
    return (
        f"{panel['data']} · {panel['num_data']:,} training examples · {batch} · "
        f"{panel['num_parameters']:,} parameters · prior precision {setting(panel['prior_precision'])}"
    )


def _controls(panel: dict[str, Any]) -> str:
    """Three groups of buttons. The first of each is how the figure opens."""
    distances = [
        (f"distance-{index}", f"distance to {line['label']}", "line minus ELBO, on a logarithmic axis")
        for index, line in enumerate(panel["lines"])
        if is_exact(line)
    ]
    groups = [
        (
            "passes",
            "Count a pass",
            [
                ("fair", "fair", "a gradient evaluation of all data is a pass"),
                ("paper", "as in the paper", "one step over all data is a pass, however many samples it takes"),
            ],
        ),
        ("x", "Axis of passes", [("log", "log", "logarithmic axis"), ("linear", "linear", "linear axis")]),
    ]
    if distances:
        groups.append(("y", "Left figure", [("elbo", "ELBO", "the ELBO as it is"), *distances]))
    return '<div class="controls">' + "".join(_group(*group) for group in groups) + "</div>"


def _group(key: str, name: str, choices: list[tuple[str, str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" data-key="{key}" data-value="{value}" title="{text(tip)}" '
        f'aria-pressed="{"true" if index == 0 else "false"}">{text(caption)}</button>'
        for index, (value, caption, tip) in enumerate(choices)
    )
    return f'<div class="group" role="group" aria-label="{text(name)}"><span>{text(name)}</span>{buttons}</div>'


def _band(curve: dict[str, Any] | None) -> dict[str, Any] | None:
    return {"mean": curve["mean"], "std": curve["std"]} if curve else None

"""The page, put together: claims, a section for each experiment, settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from vprop.lab.gains import gains
from vprop.lab.report import curves
from vprop.lab.report.markup import inline_json, picture, setting, text
from vprop.lab.report.schema import KINDS, showing
from vprop.lab.report.style import Styles
from vprop.lab.report.tables import claims_table, facts_table, memory_table, success_table

TITLE = "vprop: the paper’s experiments, repeated"
INTRODUCTION = (
    "<em>Vprop: Variational Inference using RMSprop</em> (Khan et al., 2017) claims that RMSprop with noisy weights "
    "performs Gaussian variational inference. This page repeats its experiments with the vprop library, adds methods "
    "of our own and some that came later, and says of each claim where it holds. Every number comes from the JSON "
    "files in the folder results beside this report."
)
HINT = (
    "Lines are means over seeds, bands ± one standard deviation. Click a method above a figure to hide or show it in "
    "both charts, double-click to see it alone; drag to zoom, double-click in a chart to zoom out. A figure opens with "
    "at most six methods, the paper’s first. Dashed or dotted lines are ours; thin ones are extras. A cross marks "
    "where a method diverged."
)
Pictures = Mapping[str, bytes]
"""Static figures by name, as PNG, which the page holds inside; one that is not there is a file beside the page."""


def render(results: dict[str, dict[str, Any]], styles: Styles, pictures: Pictures) -> str:
    """The page as a string; no clock, no machine: the same results give the same bytes."""
    experiments = {name: results[name] for name in KINDS if name in results and name not in ("claims", "demo")}
    claims = results["claims"]["claims"] if "claims" in results else []
    figures: dict[str, Any] = {}
    sections = []
    for name, result in experiments.items():
        with showing(name):
            sections.append(_section(name, result, styles, figures, pictures))
    links = [("claims", "Claims")] if claims else []
    links += [("demo", "What a posterior adds")] if "demo" in results else []
    links += [(name, result["title"]) for name, result in experiments.items()]
    links += [("settings", "Settings")] if experiments else []
    return Template(_resource("page.html")).substitute(
        title=text(TITLE),
        introduction=INTRODUCTION,
        environment=_environment_line(experiments),
        links="".join(f'<a href="#{text(target)}">{text(caption)}</a>' for target, caption in links),
        claims=_claims(claims),
        demo=_demo(results["demo"], pictures) if "demo" in results else "",
        sections="\n".join(sections),
        settings=_settings(experiments),
        css=_resource("page.css"),
        data=inline_json(figures),
        script=_resource("chart.js") + _resource("page.js"),
    )


def _section(name: str, result: dict[str, Any], styles: Styles, figures: dict[str, Any], pictures: Pictures) -> str:
    """One experiment; its figures are added to ``figures``."""
    kind = KINDS[name]
    if kind == "curves":  # how to read the figures is said once, at the first of them
        hint = "" if figures else f'<p class="hint">{HINT}</p>'
        figures.update({panel["id"]: curves.figure(panel, styles) for panel in result["panels"]})
        body = hint + "".join(curves.html(panel, styles) for panel in result["panels"])
    elif kind == "explore":
        body = _explore(result, styles, pictures)
    else:
        body = _memory(result, pictures)
    notes = "".join(f"<li>{text(note)}</li>" for note in result["notes"])
    return f"""
<section id="{text(name)}">
<h2>{text(result["title"])}</h2>
<p class="lead">{text(result["description"])}</p>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
{body}
</section>"""


def _explore(result: dict[str, Any], styles: Styles, pictures: Pictures) -> str:
    return f"""
<article class="panel" id="panel-explore">
<header class="panel-head"><div><h3>Paths and success rates</h3>
<p class="facts">A path ends in a disc where it arrived, in a cross where it did not.</p></div>
{curves.files("explore")}</header>
{_image("explore", pictures, "Contours of the surface with the path of each method, and how often it succeeds")}
{success_table(result["success"], styles)}
</article>"""


def _memory(result: dict[str, Any], pictures: Pictures) -> str:
    return f"""
<article class="panel" id="panel-memory">
<header class="panel-head"><div><h3>Bytes per parameter</h3><p class="facts">Hatched bars are ours.</p></div>
{curves.files("memory")}</header>
{_image("memory", pictures, "Bytes of state per parameter for each optimizer")}
{memory_table(result["rows"])}
</article>"""


def _demo(result: dict[str, Any], pictures: Pictures) -> str:
    """The demo's pictures, and what they are worth."""
    with showing("demo"):
        found, last = gains(result)
    items = "".join(f"<li>{text(gain.mark)} {text(gain.words)}</li>" for gain in found)
    return f"""
<section id="demo">
<h2>What a posterior adds</h2>
<p class="lead">From the demo: Vario against Adam on scikit-learn’s digits, and a regression with error bars.</p>
<article class="panel" id="panel-demo">
<ul class="gains">{items}</ul><p>{text(last)}</p>
<div class="pair">
{_image("demo-regression", pictures, "A regression with error bars that widen where there are no data")}
{_image("demo-calibration", pictures, "How often predictions of each confidence are right, with Adam and with Vario")}
</div>
</article>
</section>"""


def _image(name: str, pictures: Pictures, description: str) -> str:
    return picture(pictures.get(name, f"figures/{name}.png"), description)


def _claims(claims: list[dict[str, Any]]) -> str:
    return f'<section id="claims"><h2>Claims</h2>{claims_table(claims)}</section>' if claims else ""


def _settings(experiments: dict[str, dict[str, Any]]) -> str:
    """How every number was obtained."""
    if not experiments:
        return ""
    blocks = "".join(
        f"<details><summary>{text(result['title'])}</summary><div class='pair'>"
        f"<div><h4>Settings</h4>{facts_table(result['settings'])}</div>"
        f"<div><h4>Environment</h4>{facts_table(result['environment'])}</div></div></details>"
        for result in experiments.values()
    )
    return (
        f'<section id="settings"><h2>Settings and environment</h2><article class="panel">{blocks}</article></section>'
    )


def _environment_line(experiments: dict[str, dict[str, Any]]) -> str:
    """What all experiments have in common; the rest is in the settings at the end."""
    environments = [result["environment"] for result in experiments.values()]
    if not environments:
        return ""
    common = {
        key: value
        for key, value in environments[0].items()
        if value is not None and all(environment.get(key) == value for environment in environments)
    }
    return " · ".join(f"{text(key)} {text(setting(value))}" for key, value in common.items())


def _resource(name: str) -> str:
    return resources.files("vprop.lab.report").joinpath(name).read_text(encoding="utf-8")

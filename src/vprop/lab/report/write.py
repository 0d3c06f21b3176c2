"""Entry point: draw, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vprop.files import write_text
from vprop.lab import plots
from vprop.lab.report import page, static
from vprop.lab.report.schema import KINDS, ReportError, showing, without_infinities
from vprop.lab.report.style import Styles


def write_report(results: dict[str, dict[str, Any]], out: Path) -> Path:
    """Write ``out/report/index.html`` and ``out/report/figures/``; return the page.

    ``results`` maps the name of an experiment to its result, as loaded from JSON; any subset will do, and ``"demo"`` is
    what ``vprop demo`` found. A result that lacks something raises ``ReportError``, which names it.
    """
    if not results:
        raise ReportError("no results: there is nothing to report")
    results = without_infinities(results)
    styles = Styles(results)
    page.render(results, styles, {})  # a result that cannot be shown is told before anything is drawn, which takes time
    folder = out / "report"
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for name in sorted(results, key=lambda name: KINDS[name] == "curves"):  # those that take longest last
        with showing(name):
            _draw(KINDS[name], results[name], styles, figures)
    inside: list[str] = [name for name in ("explore", "memory") if name in results]
    inside += ["demo-regression", "demo-calibration"] if "demo" in results else []
    pictures = {name: (figures / f"{name}.png").read_bytes() for name in inside}
    target = folder / "index.html"
    write_text(target, page.render(results, styles, pictures))
    return target


def _draw(kind: str, result: dict[str, Any], styles: Styles, figures: Path) -> None:
    """The static figures of a result."""
    if kind == "curves":
        for panel in result["panels"]:
            static.draw_panel(panel, styles, figures)
    elif kind == "explore":
        static.draw_explore(result, styles, figures)
    elif kind == "memory":
        static.draw_memory(result, styles, figures)
    elif kind == "demo":
        plots.regression_band(result["regression"], figures / "demo-regression.png")
        plots.calibration(result["digits"], figures / "demo-calibration.png")

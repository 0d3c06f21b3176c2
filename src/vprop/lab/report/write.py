"""Entry point: draw, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from vprop.files import write_text
from vprop.lab.report import page, static
from vprop.lab.report.schema import KINDS, ReportError, showing, without_infinities
from vprop.lab.report.style import Styles


def write_report(results: dict[str, dict[str, Any]], out: Path) -> Path:
    """Write ``out/report/index.html`` and ``out/report/figures/``; return the page.

    ``results`` maps the name of an experiment to its result, as loaded from JSON; any subset will do. A result that
    lacks something raises ``ReportError``, which names it.
    """
    if not results:
        raise ReportError("no results: there is nothing to report")
    results = without_infinities(results)
    styles = Styles(results)
    html = page.render(results, styles, get_plotlyjs())
    folder = out / "report"
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        with showing(name):
            if KINDS[name] == "curves":
                for panel in result["panels"]:
                    static.draw_panel(panel, styles, figures)
            elif KINDS[name] == "explore":
                static.draw_explore(result, styles, figures)
            elif KINDS[name] == "memory":
                static.draw_memory(result, styles, figures)
    target = folder / "index.html"
    write_text(target, html)
    return target

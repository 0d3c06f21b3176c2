"""Entry point: check, draw, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from vprop.files import write_text
from vprop.lab.report import page, static
from vprop.lab.report.schema import checked, kind_of
from vprop.lab.report.style import Styles


def write_report(results: dict[str, dict[str, Any]], out: Path) -> Path:
    """Write ``out/report/index.html`` and ``out/report/figures/``; return the page.

    ``results`` maps the name of an experiment to its result, as loaded from JSON; any subset will do. A result that
    lacks something raises ``ReportError``, which names it, before anything is written.
    """
    results = checked(results)
    styles = Styles(results.values())
    html = page.render(results, styles, get_plotlyjs())
    folder = out / "report"
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        kind = kind_of(name, result)
        if kind == "curves":
            for panel in result["panels"]:
                static.draw_panel(panel, styles, figures)
        elif kind == "explore":
            static.draw_explore(result, styles, figures)
        elif kind == "memory":
            static.draw_memory(result, styles, figures)
    target = folder / "index.html"
    write_text(target, html)
    return target

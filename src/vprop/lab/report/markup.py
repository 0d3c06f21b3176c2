"""Small pieces of HTML and numbers as text. Everything that comes from a result is escaped here."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: Any) -> str:
    """Escaped for HTML, attributes included."""
    return html.escape(str(value))


def picture(source: str | bytes, description: str) -> str:
    """An image: the bytes of a PNG inside of the page, or the path of a file beside it."""
    if isinstance(source, bytes):
        source = "data:image/png;base64," + base64.b64encode(source).decode()
    return f'<img src="{text(source)}" alt="{text(description)}">'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "", numeric: Sequence[int] = ()) -> str:
    """A table that scrolls inside its container. Cells are HTML; ``numeric`` columns are aligned to the right.

    Each cell knows its column's name: on a narrow screen a row is a card, with the name before the value.
    """
    marks = [' class="num"' if index in numeric else "" for index in range(len(head))]
    top = "".join(f'<th scope="col"{mark}>{cell}</th>' for cell, mark in zip(head, marks, strict=True))
    columns = [f'<td{mark} data-name="{text(name)}">' for mark, name in zip(marks, head, strict=True)]
    body = "".join(
        "<tr>" + "".join(f"{td}<div>{cell}</div></td>" for td, cell in zip(columns, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{css}"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def swatch(color: str, dash: str = "solid") -> str:
    """The line of a method in a table."""
    dashes = {"dash": "5 2", "dot": "2 2", "dashdot": "5 2 2 2"}.get(dash, "none")
    return (
        f'<svg class="swatch series" style="--c:{color}" width="22" height="8" aria-hidden="true">'
        f'<line class="line" x1="0" y1="4" x2="22" y2="4" stroke-width="3" stroke-dasharray="{dashes}"/></svg>'
    )


def number(value: float | None, digits: int = 4) -> str:
    """A number for people.

    >>> number(-1234.5678), number(0.31234567), number(3), number(None), number(1e-5)
    ('−1,235', '0.3123', '3', '–', '1e−05')
    """
    if value is None:
        return "–"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}".replace("-", "−")
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 8:
        return f"{value:.{max(digits - 2, 0)}g}".replace("-", "−")
    return f"{value:,.{max(digits - 1 - size, 0)}f}".replace("-", "−")


def plus_minus(mean: float | None, spread: float | None, *, digits: int = 5) -> str:
    """A mean and its spread, with as many decimals as the spread deserves."""
    if mean is None:
        return "diverged"
    if spread is None or spread == 0:
        return number(mean, digits)
    decimals = min(max(1 - math.floor(math.log10(spread)), 0), 6)
    return f"{mean:,.{decimals}f} ± {spread:,.{decimals}f}".replace("-", "−")


def setting(value: Any) -> str:
    """A value of the settings or the environment."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(setting(item) for item in value)
    return "none" if value is None else str(value)


def inline_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    dumped = json.dumps(_rounded(value), allow_nan=False, separators=(",", ":"))
    return dumped.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _rounded(value: Any) -> Any:
    """Nine digits are more than a screen shows and half the bytes."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value

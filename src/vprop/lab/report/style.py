"""One colour, one dash and one place in the order for each method, the same in every figure and table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vprop.lab.report.schema import showing
from vprop.plots.style import MOST_LINES

# The paper's six stay apart for every kind of sight (tests/test_picture_style.py), and open the figures. A family
# shares a hue: the more samples, the darker. The order is that of legends and tables.
KNOWN = {
    "rmsprop": "#2b2b2b",
    "adam": "#8c8c8c",
    "bbvi": "#c64600",
    "bbvi-rmsprop": "#e08a3c",
    "bbvi-adam": "#8f3a08",
    "vprop": "#0b4a94",
    "vprop-0": "#7cc0ec",
    "vprop-1": "#2e8bc9",
    "vprop-2": "#0b4a94",
    "vprop-5": "#2f5aa8",
    "vprop-10": "#332288",
    "cvi": "#c99a00",
    "cvi-10": "#c99a00",
    "vprop-2-centered": "#cc79a7",
    "von-1": "#009e73",
    "von-10": "#009e73",
    "vong-2-centered": "#882255",
    "vogn": "#117733",
    "vogn-10": "#117733",
    "vadam": "#aa4499",
    "ivon": "#999933",
    "newton": "#6b7280",
    "gradient-descent": "#a6761d",
}
# For methods that are not in the table, in order of appearance.
SPARE = ["#d55e00", "#cc79a7", "#882255", "#cc6677", "#7a5195", "#a6761d", "#1b7837", "#5e4fa2", "#c51b7d", "#35978f"]
NEUTRAL = "#7b8794"

GROUP_ORDER = {"paper": 0, "ours": 1, "extra": 2}
OUR_DASHES = ("dash", "dot", "dashdot")
MATPLOTLIB_DASH = {"solid": "-", "dash": (0, (5, 1.8)), "dot": (0, (1.2, 1.4)), "dashdot": (0, (5, 1.6, 1.2, 1.6))}


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    color: str
    dash: str
    width: float
    order: tuple[int, int]


class Styles:
    """The styles of all methods in a set of results."""

    def __init__(self, results: dict[str, dict[str, Any]]):
        self._styles: dict[str, Style] = {}
        self._names: dict[str, str] = {}  # label as a slug -> method name
        for name, result in results.items():
            with showing(name):
                for method in (method for panel in result.get("panels", ()) for method in panel["methods"]):
                    self._names.setdefault(slug(method["label"]), method["name"])
                    self._add(method["name"], method["group"])
        for name, result in results.items():
            with showing(name):
                for trajectory in [*result.get("trajectories", ()), *result.get("success", ())]:
                    self._add(self._key(trajectory["label"]), "paper")

    def of(self, name: str) -> Style:
        """The style of a method by its name, or by its label where a result has no names."""
        return self._styles[self._key(name)]

    def color(self, label: str, default: str = NEUTRAL) -> str:
        """The colour of a method that may not be in any other figure."""
        key = self._key(label)
        return self._styles[key].color if key in self._styles else KNOWN.get(key, default)

    def shown(self, methods: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that a figure opens with, in order: as many as can be told apart."""
        return self.sort(methods)[:MOST_LINES]

    def sort(self, methods: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Methods in the order of the report: the paper's, ours, extras."""
        return sorted(methods, key=lambda method: self.of(method.get("name", method["label"])).order)

    def _key(self, name: str) -> str:
        if name in self._styles:
            return name
        plain = re.sub(r"-n-\d+$", "", slug(name))  # the same method with another N
        plain = plain.replace("centred", "centered").replace("-with-", "-")
        return self._names.get(slug(name), plain)

    def _add(self, name: str, group: str) -> None:
        if name in self._styles:
            return
        taken = {style.color for style in self._styles.values()}
        spare = [color for color in SPARE if color not in taken] or SPARE
        ours = sum(style.order[0] == GROUP_ORDER["ours"] for style in self._styles.values())
        place = list(KNOWN).index(name) if name in KNOWN else len(KNOWN) + len(self._styles)
        self._styles[name] = Style(
            color=KNOWN.get(name, spare[0]),
            dash=OUR_DASHES[ours % len(OUR_DASHES)] if group == "ours" else "solid",
            width=1.3 if group == "extra" else 2.2,
            order=(GROUP_ORDER[group], place),
        )


def slug(text: str) -> str:
    """Lower case, with hyphens for everything that is no letter or digit, and without the mark of ours.

    >>> slug("Vprop-2, centred (ours)")
    'vprop-2-centred'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("(ours)", "")).strip("-")


def legend_label(method: dict[str, Any]) -> str:
    """The label, with "(ours)" for what is not in the paper."""
    return method["label"] + (" (ours)" if method["group"] == "ours" and "ours" not in method["label"].lower() else "")

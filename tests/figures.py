"""Figures of committed runs, in the form in which pages show them."""

from __future__ import annotations

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def measured_on_networks() -> set[tuple[str, ...]]:
    """Accuracy, log-loss and calibration error of each row of ``networks-*.json``, at the mean and of the posterior."""
    rows = [row for file in RESULTS.glob("networks-*.json") for row in json.loads(file.read_text())["rows"]]
    return {
        tuple(f"{row[f'{kind}_{score}'][0]:.4f}" for score in ("accuracy", "nll", "ece"))
        for row in rows
        for kind in ("mean", "posterior")
        if f"{kind}_nll" in row
    }


def measured_on_deep_networks() -> set[tuple[str, ...]]:
    """The same of each contender and group of ``docs/deep/results``."""
    files = (RESULTS.parents[1] / "docs" / "deep" / "results").glob("*.json")
    found = set()
    for result in (json.loads(file.read_text()) for file in files):
        scores = [one for row in result["contenders"] for one in row["scores"].values()]
        scores += [row["scores"] for row in result["groups"] if "accuracy" in row["scores"]]
        found |= {tuple(f"{one[name]['mean']:.4f}" for name in ("accuracy", "nll", "ece")) for one in scores}
    return found


def shown_of_networks(page: str) -> list[tuple[str, ...]]:
    """The rows of a page that end with three such figures."""
    return re.findall(r"^\| .* \| (0\.\d{4}) \| (\d\.\d{4}) \| (0\.\d{4}) \|$", page, flags=re.M)

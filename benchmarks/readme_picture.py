"""The picture of the README: runs the snippet that stands there, as it stands, and draws what it predicts.

python benchmarks/readme_picture.py --picture docs/start/first.png
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch

from vprop.plots import style
from vprop.plots.style import BLACK, BLUE, GREY

ROOT = Path(__file__).parents[1]


def names_of_the_snippet() -> dict[str, Any]:
    """Run it; returns what it leaves behind: data and a posterior."""
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[0]
    names: dict[str, Any] = {}
    exec(snippet, names)
    return names


def draw(names: dict[str, Any], path: Path) -> None:
    """Mean and two standard deviations of a new observation, over the data and the function that made them."""
    grid = torch.linspace(-3, 3, 241)[:, None]
    prediction = names["posterior"].predict(grid, num_samples=200)
    mean, std, x = prediction.mean[:, 0], prediction.std[:, 0], grid[:, 0]
    with style.figure(path, figsize=(7, 3.4)) as axes:
        axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.25, linewidth=0)
        axes.plot(x, mean, color=BLUE)
        axes.plot(x, torch.sin(1.5 * x), color=GREY, linestyle="--", linewidth=1)
        axes.plot(names["x"], names["y"], "o", color=BLACK, markersize=2.5)
        axes.text(-2.95, 1.75, "prediction ± 2σ", color=BLUE)
        axes.text(-2.35, 0.95, "sin 1.5x", color=GREY)
        axes.text(1.1, 1.3, "60 points", color=BLACK)
        axes.set(xlim=(-3, 3), ylim=(-2, 2), xlabel="x", ylabel="y")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "start" / "first.png")
    draw(names_of_the_snippet(), parser.parse_args().picture)

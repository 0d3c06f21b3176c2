"""Plots, each from numbers that are already in a JSON file: drawing never trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, no display needed
import matplotlib.pyplot as plt

from vprop.plots import style
from vprop.plots.style import BLACK, BLUE, GREY, ORANGE, save

__all__ = ["BLUE", "GREY", "ORANGE", "calibration", "plt", "regression_band", "save"]


@style.pictures()
def regression_band(result: dict[str, Any], path: Path) -> Path:
    """Mean, epistemic and total two-sigma bands of a one-dimensional regression."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    grid, mean, bands = result["grid"], result["mean"], []
    for key, alpha, label in [
        ("total_std", 0.18, "±2σ of a new observation"),
        ("epistemic_std", 0.35, "±2σ of the function (epistemic)"),
    ]:
        low = [m - 2 * s for m, s in zip(mean, result[key], strict=True)]
        high = [m + 2 * s for m, s in zip(mean, result[key], strict=True)]
        bands.append(axes.fill_between(grid, low, high, color=BLUE, alpha=alpha, linewidth=0, label=label))
    axes.plot(grid, mean, color=BLUE, label="mean")
    axes.plot(grid, result["truth"], color=GREY, linestyle="--", linewidth=1, label="truth")
    axes.plot(result["x"], result["y"], "o", color=BLACK, markersize=3, label="_data")
    axes.set(
        xlim=(grid[0], grid[-1]),
        ylim=(-3, 3),
        xlabel="x",
        ylabel="y",
        title=f"{result['networks']} ReLU networks trained by Vario: error bars",
    )
    axes.legend(handles=bands, loc="lower left", ncols=2)
    style.name_lines(axes)
    return save(figure, path)


@style.pictures()
def calibration(result: dict[str, Any], path: Path) -> Path:
    """A reliability diagram for each method, and the scores below it."""
    methods = result["methods"]
    figure, panels = plt.subplots(1, len(methods), figsize=(7, 3.6), sharey=True, layout="constrained")
    for axes, (name, scores), color in zip(panels, methods.items(), (ORANGE, BLUE), strict=True):
        diagram = scores["reliability"]
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
        axes.vlines(diagram["confidence"], diagram["confidence"], diagram["accuracy"], color=color, alpha=0.5)
        sizes = [20 + 400 * share for share in diagram["share"]]
        axes.scatter(diagram["confidence"], diagram["accuracy"], s=sizes, color=color, alpha=0.8, linewidths=0)
        axes.set(xlim=(0, 1.05), ylim=(0, 1.05), xlabel="confidence", title=name)
        text = (
            f"accuracy {scores['accuracy']:.3f}\nlog-loss {scores['log_loss']:.3f}\n"
            f"calibration error {scores['expected_calibration_error']:.3f}"
        )
        axes.text(0.95, 0.06, text, transform=axes.transAxes, ha="right", fontsize=9)
    panels[0].set_ylabel("accuracy")
    figure.suptitle(
        f"Digits: how often is a prediction right? ({result['test']} test images, {result['splits']} splits)",
        x=0.01,
        ha="left",
    )
    return save(figure, path)

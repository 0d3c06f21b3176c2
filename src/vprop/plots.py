"""Pictures of what :mod:`vprop.metrics` measures, with matplotlib: ``pip install "vprop[plots]"``.

Each function draws into the ``axes`` it is given, or into new ones, and returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vprop import metrics


def reliability(curve: metrics.CalibrationCurve, *, axes: Any = None, label: str | None = None) -> Any:
    """Frequency against confidence, with an error bar for each bin; the diagonal is perfect calibration.

    The area of a point is its share of the examples. Bins that are too small to say much, though merged, are hollow.

    >>> import matplotlib, torch
    >>> matplotlib.use("Agg")
    >>> probs, labels = torch.rand(200), torch.arange(200) % 2
    >>> axes = reliability(metrics.calibration_curve(probs, labels))
    >>> axes.get_xlabel(), axes.get_ylabel()
    ('confidence', 'frequency')
    """
    axes = _axes(axes)
    color = _next_colour(axes)
    _diagonal(axes)
    total = sum(curve.examples)
    columns = zip(curve.confidence, curve.accuracy, curve.low, curve.high, curve.examples, curve.small, strict=True)
    for i, (confidence, accuracy, low, high, count, small) in enumerate(columns):
        axes.vlines(confidence, low, high, color=color, linewidth=1.2)
        face = "none" if small else color
        axes.scatter(
            confidence,
            accuracy,
            s=15 + 250 * count / total,
            facecolors=face,
            edgecolors=color,
            alpha=0.8,
            label=label if i == 0 else None,
        )
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="confidence", ylabel="frequency")
    _legend(axes, label)
    return axes


def risk_coverage(curves: metrics.RiskCoverage | Mapping[str, metrics.RiskCoverage], *, axes: Any = None) -> Any:
    """Risk against coverage, one line for each uncertainty by name, with its area (AURC) in the legend.

    >>> import matplotlib, torch
    >>> matplotlib.use("Agg")
    >>> axes = risk_coverage({"entropy": metrics.risk_coverage(torch.rand(50), torch.rand(50))})
    >>> axes.get_legend().get_texts()[0].get_text().startswith("entropy (AURC ")
    True
    """
    axes = _axes(axes)
    for name, curve in _by_name(curves, metrics.RiskCoverage).items():
        label = f"{name} (AURC {curve.area:.4f})" if name else f"AURC {curve.area:.4f}"
        axes.plot(curve.coverage.cpu(), curve.risk.cpu(), color=_next_colour(axes), label=label)
    axes.set(xlim=(0, 1), xlabel="coverage: share of predictions made", ylabel="risk: mean loss of these")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return axes


def outliers(scores: Mapping[str, tuple[Tensor, Tensor]], *, axes: Any = None, tpr: float = 0.95) -> Any:
    """ROC curves of scores by name, each a pair ``(scores_in, scores_out)``, with the threshold that finds ``tpr``.

    >>> import matplotlib, torch
    >>> matplotlib.use("Agg")
    >>> axes = outliers({"entropy": (torch.zeros(3), torch.ones(3))})
    >>> axes.get_legend().get_texts()[0].get_text()
    'entropy (AUROC 1.000, AUPR 1.000, FPR 0.000)'
    """
    axes = _axes(axes)
    _diagonal(axes)
    for name, (known, unknown) in scores.items():
        curve, color = metrics.outlier_curve(known, unknown), _next_colour(axes)
        false_rate = metrics.fpr_at_tpr(known, unknown, tpr)
        numbers = (
            f"AUROC {metrics.auroc(known, unknown):.3f}, AUPR {metrics.aupr(known, unknown):.3f}, FPR {false_rate:.3f}"
        )
        axes.plot(
            curve.false_positive_rate.cpu(), curve.true_positive_rate.cpu(), color=color, label=f"{name} ({numbers})"
        )
        axes.plot(false_rate, tpr, "o", color=color, markersize=4, label="_nolegend_")
    axes.axhline(tpr, color="#aaaaaa", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="known inputs called unknown", ylabel="unknown inputs found")
    axes.legend(fontsize=8, loc="lower right")
    return axes


def _axes(axes: Any) -> Any:
    if axes is not None:
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install matplotlib") from error
    return plt.subplots(layout="constrained")[1]


def _by_name(curves: Any, kind: type) -> Mapping[str, Any]:
    return {"": curves} if isinstance(curves, kind) else curves


def _next_colour(axes: Any) -> str:
    """The next colour of the axes' own cycle."""
    (line,) = axes.plot([], [])
    line.remove()
    return line.get_color()


def _diagonal(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], color="#555555", linestyle="--", linewidth=1, zorder=0, label="_nolegend_")


def _legend(axes: Any, label: str | None) -> None:
    if label is not None:
        axes.legend(fontsize=8, loc="upper left")

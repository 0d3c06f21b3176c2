"""Pictures hold the numbers that they are made of."""

from __future__ import annotations

import builtins

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from vprop import metrics, plots


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def probabilities(n=300):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(n, generator=generator)
    return probs, (torch.rand(n, generator=generator) < probs).long()


def test_reliability(axes):
    curve = metrics.calibration_curve(*probabilities(), bins=5)
    assert plots.reliability(curve, axes=axes, label="model") is axes
    points = [
        path.get_offsets()[0] for path in axes.collections if hasattr(path, "get_sizes") and len(path.get_sizes())
    ]
    assert [float(p[0]) for p in points] == pytest.approx(curve.confidence)
    assert [float(p[1]) for p in points] == pytest.approx(curve.accuracy)
    bars = [path.get_segments()[0] for path in axes.collections if hasattr(path, "get_segments")]
    assert [float(bar[0][1]) for bar in bars] == pytest.approx(curve.low)
    assert [float(bar[1][1]) for bar in bars] == pytest.approx(curve.high)


def test_small_bins_are_hollow(axes):
    plots.reliability(metrics.calibration_curve(*probabilities(5)), axes=axes)
    (point,) = [path for path in axes.collections if hasattr(path, "get_sizes") and len(path.get_sizes())]
    assert len(point.get_facecolor()) == 0


def test_risk_coverage(axes):
    curve = metrics.risk_coverage(torch.rand(30), torch.rand(30))
    plots.risk_coverage({"a": curve, "b": curve}, axes=axes)
    assert axes.lines[0].get_ydata() == pytest.approx(curve.risk.tolist())
    assert axes.lines[0].get_color() != axes.lines[1].get_color()
    assert plots.risk_coverage(curve).get_legend().get_texts()[0].get_text() == f"AURC {curve.area:.4f}"


def test_outliers(axes):
    known, unknown = torch.rand(40), torch.rand(30) + 0.5
    plots.outliers({"entropy": (known, unknown)}, axes=axes)
    curve = metrics.outlier_curve(known, unknown)
    line = next(line for line in axes.lines if line.get_label().startswith("entropy"))
    assert line.get_ydata() == pytest.approx(curve.true_positive_rate.tolist())
    assert f"AUROC {metrics.auroc(known, unknown):.3f}" in line.get_label()


def test_without_matplotlib(monkeypatch):
    original = builtins.__import__

    def no_matplotlib(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match="Drawing needs matplotlib: pip install matplotlib"):
        plots.risk_coverage(metrics.risk_coverage(torch.rand(3), torch.rand(3)))

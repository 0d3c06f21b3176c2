"""Reliability with error bars: Wilson's interval by its definition, bins that are merged, coverage of the bars."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest

from vprop.metrics import calibration_curve, reliability, wilson_interval


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("hits", "count"), [(0, 1), (1, 1), (3, 10), (10, 10), (499, 1000)])
def test_wilson_is_scipys(hits, count, level):
    expected = binomtest(hits, count).proportion_ci(level, "wilson")
    assert wilson_interval(hits, count, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("arguments", [(2, 1), (-1, 3), (0, 0), (0.5, 2)])
def test_hits_that_are_none(arguments):
    with pytest.raises(ValueError, match=r"Invalid hits: is .*, must be an integer from 0 to count, and count >= 1"):
        wilson_interval(*arguments)


def probabilities(n, seed=0):
    """Calibrated by construction: the label is drawn from the probabilities."""
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, 4, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def test_with_full_bins_it_is_the_diagram():
    probs, labels = probabilities(5000)
    curve, diagram = calibration_curve(probs, labels, bins=5), reliability(probs, labels, bins=5)
    assert curve.confidence == pytest.approx(diagram.confidence)
    assert curve.accuracy == pytest.approx(diagram.accuracy)
    assert [c / 5000 for c in curve.examples] == pytest.approx(diagram.share)
    assert not any(curve.small)


def test_small_bins_are_merged_and_nothing_is_lost():
    probs, labels = probabilities(90)
    curve = calibration_curve(probs, labels, bins=50, least=20)
    assert min(curve.examples) >= 20
    assert sum(curve.examples) == 90
    confidence, predicted = probs.max(-1)
    mean = sum(c * n for c, n in zip(curve.confidence, curve.examples, strict=True)) / 90
    assert mean == pytest.approx(float(confidence.mean()))
    right = sum(a * n for a, n in zip(curve.accuracy, curve.examples, strict=True))
    assert right == pytest.approx(float((predicted == labels).sum()))
    assert curve.confidence == sorted(curve.confidence)


def test_too_few_examples_are_shown_as_such():
    probs, labels = probabilities(7)
    curve = calibration_curve(probs, labels)
    assert (curve.examples, curve.small) == ([7], [True])
    assert curve.low[0] < curve.accuracy[0] < curve.high[0] or curve.accuracy[0] in (0, 1)


def test_binary_labels():
    curve = calibration_curve(torch.full((40,), 0.25), torch.tensor([1] * 10 + [0] * 30))
    assert (curve.confidence, curve.accuracy, curve.examples) == ([0.25], [0.25], [40])
    with pytest.raises(ValueError, match="Draw one for each label"):
        calibration_curve(torch.full((4, 3), 0.5), torch.ones(4, 3), task="multilabel")


def test_error_bars_cover_as_often_as_they_say():
    """Bars at 90 % over 200 calibrated data sets; Wilson's is approximate, and confidences in a bin differ a little.

    About 1600 bars: three binomial standard errors are 0.023, false alarm 0.3 %; the interval's own error adds 0.02.
    """
    inside = total = 0
    for seed in range(200):
        curve = calibration_curve(*probabilities(800, seed), bins=10, least=30, level=0.9)
        inside += sum(low <= c <= high for c, low, high in zip(curve.confidence, curve.low, curve.high, strict=True))
        total += len(curve.examples)
    assert inside / total == pytest.approx(0.9, abs=0.043)


@pytest.mark.parametrize("least", [0, 1.5, "20"])
def test_least_examples(least):
    with pytest.raises(ValueError, match=r"Invalid least=.*: must be an integer >= 1. 20 is the default."):
        calibration_curve(*probabilities(10), least=least)

"""AUPR and FPR at a TPR: against scikit-learn, against their definitions, with ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_curve

from vprop.metrics import aupr, auroc, fpr_at_tpr, outlier_curve

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=20)


def labelled(known, unknown):
    return torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))]), torch.cat([known, unknown])


def scores(values, seed=0):
    """Known and unknown inputs, unknown ones higher, on a grid: the fewer values, the more ties."""
    generator = torch.Generator().manual_seed(seed)
    known, unknown = torch.randn(211, generator=generator), torch.randn(83, generator=generator) + 1
    return (known * values).round() / values, (unknown * values).round() / values


@pytest.mark.parametrize("values", [1, 4, 10**5])
def test_aupr_is_scikit_learns_average_precision(values):
    known, unknown = scores(values)
    assert aupr(known, unknown) == pytest.approx(average_precision_score(*labelled(known, unknown)), rel=1e-12)


@given(SCORES, SCORES)
def test_aupr_is_the_mean_precision_at_the_unknown_inputs(known, unknown):
    precisions = []
    for score in unknown:
        found, mistaken = sum(s >= score for s in unknown), sum(s >= score for s in known)
        precisions.append(found / (found + mistaken))
    expected = sum(precisions) / len(precisions)
    assert aupr(torch.tensor(known), torch.tensor(unknown)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tpr", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("values", [1, 4, 10**5])
def test_fpr_is_that_of_scikit_learns_curve(values, tpr):
    known, unknown = scores(values)
    false_rate, true_rate, _ = roc_curve(*labelled(known, unknown), drop_intermediate=False)
    assert fpr_at_tpr(known, unknown, tpr) == pytest.approx(false_rate[true_rate >= tpr].min(), rel=1e-12)


def test_exactly_95_of_100_is_enough():
    """0.95·20 is 19.000000000000004 in some orders of arithmetic; 19 found of 20 are 95 %."""
    unknown = torch.arange(20.0)
    assert fpr_at_tpr(torch.tensor([0.5, 1.5]), unknown, 0.95) == 0.5
    assert fpr_at_tpr(torch.tensor([0.5, 1.5]), unknown, 0.951) == 1.0


@pytest.mark.parametrize("values", [1, 4, 10**5])
def test_the_curve_has_the_areas(values):
    known, unknown = scores(values)
    curve = outlier_curve(known, unknown)
    area = torch.trapezoid(curve.true_positive_rate, curve.false_positive_rate)
    assert float(area) == pytest.approx(auroc(known, unknown), rel=1e-12)
    assert curve.true_positive_rate[-1] == curve.false_positive_rate[-1] == 1
    assert float(curve.precision[-1]) == pytest.approx(83 / 294)


def test_perfect_reversed_and_uninformative_scores():
    low, high = torch.zeros(30), torch.ones(10)
    assert (aupr(low, high), fpr_at_tpr(low, high)) == (1.0, 0.0)
    assert (aupr(high, low), fpr_at_tpr(high, low)) == (30 / 40, 1.0)
    assert (aupr(low, low[:10]), fpr_at_tpr(low, low[:10])) == (10 / 40, 1.0)


def test_any_increasing_scale_and_any_shape_give_the_same():
    known, unknown = scores(10**5)
    reshaped = known[:210].reshape(2, 105)
    for score in (aupr, fpr_at_tpr):
        assert score(reshaped, unknown) == score(known[:210].double().exp(), unknown.double().exp())


def test_nan():
    bad = torch.tensor([0.0, math.nan])
    assert math.isnan(aupr(bad, torch.ones(2)))
    assert math.isnan(fpr_at_tpr(torch.ones(2), bad))
    with pytest.raises(ValueError, match="Invalid scores: there are NaN among them, must be numbers"):
        outlier_curve(bad, torch.ones(2))


@pytest.mark.parametrize("score", [aupr, fpr_at_tpr, outlier_curve])
def test_no_scores(score):
    with pytest.raises(ValueError, match=r"Invalid scores_out: has shape \(0,\), must be at least one example"):
        score(torch.ones(2), torch.ones(0))


@pytest.mark.parametrize("tpr", [0, 1.1, "0.95", math.nan])
def test_a_rate_that_is_none(tpr):
    with pytest.raises(ValueError, match=r"Invalid tpr=.*: must be a number in \(0, 1\]. 0.95 is the default."):
        fpr_at_tpr(torch.ones(2), torch.ones(2), tpr)

"""Risk against coverage: the definition, brute force over the orders of ties, closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vprop.metrics import aurc, risk_coverage


def by_definition(losses):
    return [sum(losses[: i + 1]) / (i + 1) for i in range(len(losses))]


def test_without_ties_it_is_the_definition():
    generator = torch.Generator().manual_seed(0)
    uncertainty, loss = torch.rand(50, generator=generator), torch.rand(50, generator=generator)
    curve = risk_coverage(uncertainty, loss)
    ordered = loss.double()[uncertainty.argsort()].tolist()
    assert curve.risk.tolist() == pytest.approx(by_definition(ordered), rel=1e-12)
    assert curve.coverage.tolist() == pytest.approx([(i + 1) / 50 for i in range(50)])
    assert aurc(uncertainty, loss) == pytest.approx(sum(by_definition(ordered)) / 50)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6))
def test_with_ties_it_is_the_mean_over_all_their_orders(examples):
    orders = [o for o in itertools.permutations(examples) if list(o) == sorted(o, key=lambda example: example[0])]
    curves = [by_definition([loss for _, loss in order]) for order in orders]
    expected = [sum(column) / len(curves) for column in zip(*curves, strict=True)]
    uncertainty, loss = (torch.tensor(column, dtype=torch.float64) for column in zip(*examples, strict=True))
    assert risk_coverage(uncertainty, loss).risk.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_perfect_order_has_the_closed_form():
    """k errors of n, all at the end: 1/n Σ_{i=1}^k i/(n−k+i)."""
    n, k = 40, 7
    loss = torch.cat([torch.zeros(n - k), torch.ones(k)])
    expected = sum(i / (n - k + i) for i in range(1, k + 1)) / n
    assert aurc(torch.arange(n), loss) == pytest.approx(expected)
    assert aurc(torch.arange(n), loss) < loss.mean() < aurc(-torch.arange(n), loss)
    assert aurc(torch.zeros(n), loss) == pytest.approx(k / n)


def test_risk_at_a_coverage():
    curve = risk_coverage(torch.arange(10), torch.cat([torch.zeros(9), torch.ones(1)]))
    assert [curve.risk_at(c) for c in (0.1, 0.9, 1, 1.0)] == pytest.approx([0, 0, 0.1, 0.1])
    assert curve.risk_at(0.91) == pytest.approx(0.1)  # nine of ten are less than that
    with pytest.raises(ValueError, match=r"Invalid coverage=0: must be a number in \(0, 1\]. 1 accepts everything."):
        curve.risk_at(0)


def test_right_and_wrong_may_be_booleans():
    wrong = torch.tensor([True, False])
    assert risk_coverage(torch.tensor([0.9, 0.1]), wrong).risk.tolist() == [0.0, 0.5]


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Invalid uncertainty: has shape \(2,\), must be that of loss, \(3,\)."):
        risk_coverage(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="Invalid uncertainty or loss: has NaN, must be numbers"):
        aurc(torch.tensor([math.nan]), torch.ones(1))
    with pytest.raises(ValueError, match=r"Invalid loss: has shape \(0,\), must be at least one example"):
        aurc(torch.ones(1), torch.ones(0))

"""Scores of predictive samples: definitions, exact integrals, and identities that hold for any sample."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vprop.metrics import coverage, crps_gaussian, crps_samples, sample_coverage

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = torch.randn(30, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(8, generator=GENERATOR, dtype=torch.float64)


def quantiles(count):
    """Standard normal quantiles at (k−½)/count: a sample without luck."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


def naive_crps(samples, y):
    """E|X−y| − ½E|X−X'| over pairs of different samples."""
    count = len(samples)
    pairs = sum(abs(a - b) for i, a in enumerate(samples) for j, b in enumerate(samples) if i != j)
    return sum(abs(x - y) for x in samples) / count - pairs / (2 * count * (count - 1))


def crps_of_the_histogram(samples, y):
    """∫ (F(x) − 1{x ≥ y})² dx for the step function F of the samples, exactly: the integrand is constant in pieces."""
    edges = sorted([*samples, y])
    return sum((b - a) * (sum(x <= a for x in samples) / len(samples) - (a >= y)) ** 2 for a, b in pairwise(edges))


# -- crps ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(-50, 50))
def test_crps_from_its_definition(samples, y):
    value = crps_samples(torch.tensor(samples, dtype=torch.float64)[:, None], torch.tensor([y], dtype=torch.float64))
    assert value == pytest.approx(naive_crps(samples, y), abs=1e-11)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(-50, 50))
def test_crps_is_the_integral_for_the_histogram_corrected_for_the_number_of_samples(samples, y):
    """The fair estimate takes off another 1/(S−1) of the spread that the histogram has."""
    ordered = torch.tensor(samples, dtype=torch.float64)
    spread = float((ordered[:, None] - ordered).abs().mean()) / 2
    value = crps_samples(ordered[:, None], torch.tensor([y], dtype=torch.float64))
    assert value == pytest.approx(crps_of_the_histogram(samples, y) - spread / (len(samples) - 1), abs=1e-11)


def test_crps_is_unbiased_in_the_number_of_samples():
    """The mean over all subsets of one sample less is the value of the whole; the histogram's score would grow."""
    rest = [crps_samples(torch.cat([SAMPLES[:k], SAMPLES[k + 1 :]]), Y) for k in range(len(SAMPLES))]
    assert sum(rest) / len(rest) == pytest.approx(crps_samples(SAMPLES, Y), rel=1e-12)


def test_crps_of_gaussian_samples_approaches_the_closed_form():
    """Quantiles in place of random samples, so the error is that of a sum for an integral."""
    samples = 1 + 2 * quantiles(4001)[:, None].expand(-1, 8)
    expected = crps_gaussian(torch.ones(8, dtype=torch.float64), 4.0, Y)
    assert crps_samples(samples, Y) == pytest.approx(expected, abs=1e-3)


def test_crps_against_torchmetrics():
    """Theirs is the score of the histogram."""
    minimum = "its CRPS is compared from the version on that was read for this test"
    pytest.importorskip("torchmetrics", minversion="1.9", reason=minimum)
    from torchmetrics.functional.regression import continuous_ranked_probability_score

    spread = float((SAMPLES[:, None] - SAMPLES).abs().mean()) / 2
    theirs = float(continuous_ranked_probability_score(SAMPLES.T, Y))
    assert crps_samples(SAMPLES, Y) == pytest.approx(theirs - spread / 29, rel=1e-12)


def test_crps_keeps_its_digits_far_from_zero():
    """An offset of 2⁴⁰ is exact for multiples of 2⁻¹⁰, and does not change the score."""
    samples, y = (SAMPLES * 1024).round() / 1024, (Y * 1024).round() / 1024
    assert crps_samples(samples + 2.0**40, y + 2.0**40) == pytest.approx(crps_samples(samples, y), rel=1e-12)


def test_crps_of_several_outputs_is_the_mean():
    value = crps_samples(SAMPLES.view(30, 4, 2), Y.view(4, 2))
    assert value == pytest.approx(crps_samples(SAMPLES, Y), rel=1e-12)
    each = [crps_samples(SAMPLES[:, i], Y[i]) for i in range(8)]
    assert value == pytest.approx(sum(each) / 8, rel=1e-12)


# -- coverage ------------------------------------------------------------------------------------------------


COUNTS_AND_LEVELS = [
    *[(19, 0.9), (39, 0.9), (39, 0.95), (9, 0.8), (3, 0.5), (199, 0.99)],  # the ends are samples
    *[(32, 0.9), (20, 0.9), (100, 0.95), (64, 0.683), (7, 0.123)],  # the ends are between samples
    *[(2, 0.01), (2, 0.3), (4, 0.1), (3, 1e-12)],  # fewer are wanted than lie between the two innermost samples
]


@pytest.mark.parametrize(("count", "level"), COUNTS_AND_LEVELS)
def test_coverage_is_exact_for_an_observation_like_the_samples(count, level):
    """Any of count+1 numbers may be the observation: of these cases exactly ``level`` are covered."""
    numbers = torch.randn(count + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    others = torch.stack([torch.cat([numbers[:k], numbers[k + 1 :]]) for k in range(count + 1)], -1)
    assert sample_coverage(others, numbers, level) == pytest.approx(level, abs=1e-12)


@pytest.mark.parametrize(("count", "level"), [(32, 0.9), (20, 0.9), (10, 0.5)])
@pytest.mark.parametrize("shape", ["normal", "exponential", "bimodal"])
def test_coverage_of_perfect_samples_is_the_level(shape, count, level):
    """Within 4 standard errors of 40,000 independent observations: a false alarm in 16,000."""
    uniform = torch.rand(count + 1, 40_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    numbers = {
        "normal": torch.special.ndtri(uniform),
        "exponential": -uniform.log(),
        "bimodal": torch.special.ndtri((2 * uniform) % 1) + 100 * (uniform > 0.5),
    }[shape]
    standard_error = math.sqrt(level * (1 - level) / 40_000)
    assert abs(sample_coverage(numbers[1:], numbers[0], level) - level) < 4 * standard_error


def test_between_two_intervals_an_observation_counts_in_part():
    """S = 5, level 0.5: [0, 10] holds 4/6 and [1, 3] holds 2/6, so each is half of it, whatever lies between."""
    samples = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0])[torch.tensor([3, 0, 4, 1, 2])]
    inside = [-0.01, 0.0, 0.99, 1.0, 3.0, 3.01, 10.0, 10.01]
    values = [sample_coverage(samples, torch.tensor(y), level=0.5) for y in inside]
    assert values == pytest.approx([0, 0.5, 0.5, 1, 1, 0.5, 0.5, 0], abs=1e-12)


def test_the_ends_are_inside():
    samples = torch.arange(19.0)[:, None].expand(19, 4)
    assert sample_coverage(samples, torch.tensor([-0.01, 0.0, 18.0, 18.01])) == 0.5


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_coverage_of_gaussian_samples_approaches_the_closed_form(level):
    y = 1.3 * quantiles(500)
    samples = quantiles(4001)[:, None].expand(-1, 500)
    expected = coverage(torch.zeros(500), 1.0, y, level)
    assert expected < level - 0.03
    assert sample_coverage(samples, y, level) == pytest.approx(expected, abs=2 / 500)


def test_coverage_of_more_numbers_than_torch_quantile_takes():
    """torch.quantile refuses more than 16 million elements."""
    samples = torch.arange(20.0)[:, None].expand(20, 900_000)
    assert sample_coverage(samples, torch.full((900_000,), 5.0)) == 1


# -- both ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [crps_samples, sample_coverage])
def test_the_order_of_samples_and_of_observations_does_not_matter(score):
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    assert score(SAMPLES[order], Y) == pytest.approx(score(SAMPLES, Y), rel=1e-12)
    assert score(SAMPLES.flip(1), Y.flip(0)) == pytest.approx(score(SAMPLES, Y), rel=1e-12)


@pytest.mark.parametrize("score", [crps_samples, sample_coverage])
def test_integers_are_numbers_too(score):
    samples, y = (10 * SAMPLES).round(), (10 * Y).round()
    assert score(samples.long(), y.long()) == score(samples, y)


@pytest.mark.parametrize("score", [crps_samples, sample_coverage])
def test_nan_gives_nan(score):
    samples, y = SAMPLES.clone(), Y.clone()
    samples[3, 3] = math.nan
    assert math.isnan(score(samples, Y))
    y[2] = math.nan
    assert math.isnan(score(SAMPLES, y))

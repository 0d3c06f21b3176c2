"""Errors and scores of Gaussian predictions: against torch, quadrature and exact quantiles."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from vprop import Prediction
from vprop.metrics import coverage, crps_gaussian, gaussian_nll, rmse

GENERATOR = torch.Generator().manual_seed(0)
MEAN, Y = torch.randn(2, 12, generator=GENERATOR, dtype=torch.float64)
VARIANCE = torch.rand(12, generator=GENERATOR, dtype=torch.float64) + 0.1
GAUSSIAN_SCORES = [gaussian_nll, crps_gaussian, coverage]


def crps_by_quadrature(cdf, y, low, high):
    """The definition, ∫ (F(x) − 1{x ≥ y})² dx, split where the integrand jumps."""
    left = quad(lambda x: cdf(x) ** 2, low, y, epsabs=1e-13, epsrel=1e-13)[0]
    return left + quad(lambda x: (1 - cdf(x)) ** 2, y, high, epsabs=1e-13, epsrel=1e-13)[0]


# -- values --------------------------------------------------------------------------------------------------


def test_rmse():
    assert rmse(MEAN, Y) == pytest.approx(float(torch.nn.functional.mse_loss(MEAN, Y).sqrt()), rel=1e-14)
    assert rmse(Y, Y) == 0
    assert rmse(Y + 3, Y) == pytest.approx(3)


def test_nll_is_the_log_density():
    density = torch.distributions.Normal(MEAN, VARIANCE.sqrt()).log_prob(Y)
    assert gaussian_nll(MEAN, VARIANCE, Y) == pytest.approx(-float(density.mean()), rel=1e-13)


@pytest.mark.parametrize(("mean", "std", "y"), [(0, 1, 0), (0, 1, 2.5), (1, 0.3, -0.2), (-2, 7, 3), (0.4, 2, 0.5)])
def test_crps_is_the_integral_that_defines_it(mean, std, y):
    expected = crps_by_quadrature(norm(mean, std).cdf, y, mean - 40 * std, mean + 40 * std)
    mean, y = (torch.tensor([number], dtype=torch.float64) for number in (mean, y))
    value = crps_gaussian(mean, float(std) ** 2, y)
    assert value == pytest.approx(expected, rel=1e-10)


def test_crps_is_a_mean_over_observations():
    each = [crps_gaussian(MEAN[i], VARIANCE[i], Y[i]) for i in range(12)]
    assert crps_gaussian(MEAN, VARIANCE, Y) == pytest.approx(sum(each) / 12, rel=1e-13)


def test_crps_has_the_units_of_y_and_the_symmetry_of_a_gaussian():
    value = crps_gaussian(MEAN, VARIANCE, Y)
    assert crps_gaussian(10 * MEAN, 100 * VARIANCE, 10 * Y) == pytest.approx(10 * value, rel=1e-12)
    assert crps_gaussian(-MEAN, VARIANCE, -Y) == pytest.approx(value, rel=1e-12)
    assert crps_gaussian(MEAN + 5, VARIANCE, Y + 5) == pytest.approx(value, rel=1e-12)


def test_without_variance_crps_is_the_absolute_error():
    assert crps_gaussian(MEAN, 0.0, Y) == pytest.approx(float((MEAN - Y).abs().mean()), rel=1e-14)
    assert crps_gaussian(MEAN, 0.0, MEAN) == 0
    assert crps_gaussian(MEAN, 1e-24, Y) == pytest.approx(crps_gaussian(MEAN, 0.0, Y), rel=1e-10)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.95, 0.99])
def test_coverage_of_exact_quantiles(level):
    """Of 1,000 equally likely quantiles of N(μ, σ²), level·1,000 lie inside, to the last one."""
    quantiles = torch.special.ndtri((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    assert coverage(torch.full((1000,), 3.0), 4.0, 3 + 2 * quantiles, level) == pytest.approx(level, abs=1e-12)


def test_coverage_tells_small_from_large_error_bars():
    quantiles = torch.special.ndtri((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    zeros = torch.zeros(1000)
    assert coverage(zeros, 0.25, quantiles) == pytest.approx(2 * norm.cdf(norm.ppf(0.95) / 2) - 1, abs=2e-3)
    assert coverage(zeros, 4.0, quantiles) == pytest.approx(2 * norm.cdf(norm.ppf(0.95) * 2) - 1, abs=2e-3)


def test_the_ends_of_the_interval_are_inside():
    assert coverage(torch.zeros(2), 0.0, torch.tensor([0.0, 1e-9])) == 0.5


def test_coverage_defaults_to_ninety_percent():
    at = torch.tensor([1.644, 1.646], dtype=torch.float64)
    assert coverage(torch.zeros(2), 1.0, at) == 0.5
    assert coverage(torch.zeros(2), 1.0, at, level=0.9) == 0.5


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", GAUSSIAN_SCORES)
def test_one_variance_for_all(score):
    expected = score(MEAN, torch.full((12,), 0.7, dtype=torch.float64), Y)
    assert score(MEAN, 0.7, Y) == score(MEAN, torch.tensor(0.7, dtype=torch.float64), Y) == expected
    assert score(MEAN.view(3, 4), 0.7, Y.view(3, 4)) == pytest.approx(expected, rel=1e-13)
    assert score(MEAN, torch.tensor([[0.7]], dtype=torch.float64), Y) == expected
    assert score(MEAN, 1, Y) == score(MEAN, 1.0, Y)


@pytest.mark.parametrize("score", GAUSSIAN_SCORES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_gives_nan(score, which):
    arguments = [MEAN.clone(), VARIANCE.clone(), Y.clone()]
    arguments[which][5] = math.nan
    assert math.isnan(score(*arguments))


def test_nan_gives_nan_for_rmse():
    assert math.isnan(rmse(MEAN, torch.full_like(MEAN, math.nan)))


def test_float32_is_computed_in_double_precision():
    """The square of 10³⁰ is beyond float32."""
    far, zero = torch.tensor([1e30]), torch.tensor([0.0])
    assert rmse(far, zero) == pytest.approx(1e30)
    assert gaussian_nll(far, 1.0, zero) == pytest.approx(5e59)
    assert crps_gaussian(far, 1.0, zero) == pytest.approx(1e30)


def test_a_prediction_goes_in_as_it_is():
    prediction = Prediction(torch.randn(50, 12, 1, generator=torch.Generator().manual_seed(1)), "gaussian", 0.5)
    y = Y[:, None].float().requires_grad_()
    for score in GAUSSIAN_SCORES:
        assert type(score(prediction.mean, prediction.variance, y)) is float
    assert type(rmse(prediction.mean, y)) is float

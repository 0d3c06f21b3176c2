"""Expectations over one Gaussian logit, against a series that shares nothing with the quadrature, and the ELBO."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import integrate, special

from tests.reference import conjugate_elbo
from vprop.functional import logistic

MEANS = np.concatenate([np.linspace(-60, 60, 121), [-5000.0, -500.0, -1e-3, 1e-8, 0.3, 500.0, 5000.0]])
STDS = [0.0, 1e-6, 1e-3, 0.1, 0.5, 1.0, 1.1999, 1.2, 1.2001, 1.5, 2.0, 5.0, 10.0, 30.0, 100.0, 1000.0, 1e5]


# -- the reference ---------------------------------------------------------------------------------------------------


def alternating_weights(terms):
    """Coefficients a with 1/(1+u) = Σ aₖuᵏ on [0, 1] to within 5.8^−terms (Cohen, Villegas, Zagier: algorithm 1)."""
    chebyshev = [1, 3]
    while len(chebyshev) <= terms:
        chebyshev.append(6 * chebyshev[-1] - chebyshev[-2])
    d = chebyshev[terms]
    b, c, weights = Fraction(-1), Fraction(-d), []
    for k in range(terms):
        c = b - c
        weights.append(float(c / d))
        b *= Fraction((k + terms) * (k - terms)) / ((k + Fraction(1, 2)) * (k + 1))
    return np.array(weights)


def series(mean, std, terms=24):
    """E[softplus], E[σ], E[σ'], E[σ''] from log(1+e^−|z|) = Σ aₖ₋₁/k·e^(−k|z|), each term in closed form by erfcx.

    With t = |m|/s, E[e^(−k|z|)] on the far side of 0 is ½e^(−t²/2)·erfcx((ks+t)/√2), on the near side the same
    with −t, where for a negative argument erfcx(x) = 2e^(x²) − erfcx(−x).
    """
    k, weights = np.arange(1, terms + 1), alternating_weights(terms)
    m, s = mean[:, None], np.maximum(std, 1e-150)[:, None]
    t = np.minimum(np.abs(m) / s, 1e150)
    front, near_argument = 0.5 * np.exp(-t * t / 2), (k * s - t) / np.sqrt(2)
    far = front * special.erfcx((k * s + t) / np.sqrt(2))
    plain = np.exp(np.minimum(k * (k * s * s / 2 - np.abs(m)), 0))
    mirrored = front * special.erfcx(np.abs(near_argument))
    near = np.where(near_argument < 0, plain - mirrored, mirrored)
    side = np.where(mean < 0, 1, -1)
    ratio, s = (m / s)[:, 0], s[:, 0]
    ramp = mean * special.ndtr(ratio) + s * np.exp(-(np.minimum(np.abs(ratio), 1e150) ** 2) / 2) / np.sqrt(2 * np.pi)
    return (
        ramp + (near + far) @ (weights / k),
        special.ndtr(ratio) + side * ((near - far) @ weights),
        (near + far) @ (weights * k),
        side * ((near - far) @ (weights * k**2)),
    )


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-3.0, 0.7), (2.0, 5.0), (-40.0, 12.0), (1.0, 100.0)])
def test_the_reference_agrees_with_adaptive_quadrature(mean, std):
    """So that the two do not err together."""

    def integral(function):
        width = 14 * std  # below the mean minus this the density is 1e-43
        edges = sorted({mean - width, *np.clip([-40.0, 0.0, 40.0], mean - width, mean + width), mean + width})
        density = lambda z: math.exp(-0.5 * ((z - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))  # noqa: E731
        parts = [
            integrate.quad(lambda z: function(z) * density(z), a, b, epsabs=1e-13, epsrel=1e-13, limit=400)[0]
            for a, b in itertools.pairwise(edges)
        ]
        return sum(parts)

    softplus, sigmoid, slope, _ = series(np.array([mean]), np.array([std]))
    np.testing.assert_allclose(softplus, integral(lambda z: np.logaddexp(0, z)), rtol=1e-12)
    np.testing.assert_allclose(sigmoid, integral(special.expit), rtol=1e-12)
    np.testing.assert_allclose(slope, integral(lambda z: special.expit(z) * special.expit(-z)), rtol=1e-12)


# -- expectations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", STDS)
def test_expectations_and_their_gradients(std):
    """Values to 1e-12 of max(1, value); ∂/∂m and ∂/∂s to 1e-11: a hundred times finer than asked for."""
    softplus, sigmoid, slope, bend = series(MEANS, np.full_like(MEANS, std))
    mean = torch.tensor(MEANS, requires_grad=True)
    spread = torch.full_like(mean, std, requires_grad=True)

    value = logistic.expected_softplus(mean, spread)
    np.testing.assert_allclose(value.detach(), softplus, rtol=1e-12, atol=1e-12)
    by_mean, by_std = torch.autograd.grad(value.sum(), (mean, spread))
    np.testing.assert_allclose(by_mean, sigmoid, rtol=0, atol=1e-11)
    np.testing.assert_allclose(by_std, std * slope, rtol=0, atol=1e-11)

    value = logistic.expected_sigmoid(mean, spread)
    np.testing.assert_allclose(value.detach(), sigmoid, rtol=0, atol=1e-12)
    by_mean, by_std = torch.autograd.grad(value.sum(), (mean, spread))
    np.testing.assert_allclose(by_mean, slope, rtol=0, atol=1e-11)
    np.testing.assert_allclose(by_std, std * bend, rtol=0, atol=1e-11)

    value = logistic.expected_slope(mean, spread)
    np.testing.assert_allclose(value.detach(), slope, rtol=0, atol=1e-11)
    (by_mean,) = torch.autograd.grad(value.sum(), mean)
    np.testing.assert_allclose(by_mean, bend, rtol=0, atol=1e-11)


@pytest.mark.parametrize("std", STDS)
def test_small_probabilities_keep_their_digits(std):
    _, sigmoid, _, _ = series(MEANS, np.full_like(MEANS, std))
    value = logistic.expected_sigmoid(*tensors(MEANS, np.array(std))).numpy()
    normal = sigmoid > 1e-290
    np.testing.assert_allclose(value[normal], sigmoid[normal], rtol=1e-9)
    assert np.all(value >= 0)


@pytest.mark.parametrize(("mean", "std"), [(-900.0, 3.0), (-5000.0, 100.0), (-4999.0, 100.0), (-3e5, 1000.0)])
def test_the_log_of_probabilities_that_underflow(mean, std):
    """E[σ(z)] = e^c·∫ exp(log σ(z) + log N(z) − c) dz, with c the largest value of the exponent."""

    def exponent(z):
        return -np.logaddexp(0, -z) - 0.5 * ((z - mean) / std) ** 2

    grid = np.linspace(mean, 12 * std, 400_001)
    peak, largest = grid[np.argmax(exponent(grid))], np.max(exponent(grid))
    around = np.linspace(peak - 12 * std, peak + 12 * std, 4_000_001)
    scaled = np.exp(exponent(around) - largest).sum() * (around[1] - around[0]) / (std * math.sqrt(2 * math.pi))
    value = logistic.log_expected_sigmoid(*tensors(np.array(mean), np.array(std)))
    assert float(value) == pytest.approx(largest + math.log(scaled), abs=1e-8)


def test_gradients_by_finite_differences():
    mean = torch.tensor([-2.0, 0.0, 0.5, 3.0, 1.0, -7.0], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([0.3, 1.0, 1.5, 4.0, 100.0, 9.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(logistic.expected_softplus, (mean, std))
    assert torch.autograd.gradcheck(logistic.expected_sigmoid, (mean, std))
    assert torch.autograd.gradgradcheck(logistic.expected_softplus, (mean, std))
    assert torch.autograd.gradgradcheck(logistic.expected_sigmoid, (mean, std))


def test_shapes_and_dtypes():
    mean, std = torch.randn(3, 1, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 2.0])
    value = logistic.expected_softplus(mean, std)
    assert value.shape == (3, 2)
    assert value.dtype == torch.float64
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(logistic.expected_softplus(mean[i, 0], std[j]), value[i, j])
    assert logistic.expected_sigmoid(torch.zeros(0), torch.zeros(0)).shape == (0,)
    assert torch.isnan(logistic.expected_softplus(torch.tensor([math.nan, 0.0]), torch.tensor([1.0, math.nan]))).all()


def test_the_rules_outlive_inference_mode():
    logistic._trapezoid.cache_clear()
    logistic._both_half_lines.cache_clear()
    with torch.inference_mode():
        logistic.expected_sigmoid(torch.zeros(2), torch.tensor([1.0, 2.0]))
    mean = torch.zeros(2, requires_grad=True)
    logistic.expected_sigmoid(mean, torch.tensor([1.0, 2.0])).sum().backward()
    assert torch.isfinite(mean.grad).all()


# -- logistic regression ---------------------------------------------------------------------------------------------


def make_problem(rows=40, columns=3, scale=1.0, seed=0):
    random = np.random.RandomState(seed)
    X = scale * random.randn(rows, columns)
    y = (random.rand(rows) < special.expit(X @ random.randn(columns))).astype(float)
    mean, factor = random.randn(columns), np.tril(random.randn(columns, columns)) + 2 * np.eye(columns)
    return X, y, mean, factor @ factor.T


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


def test_logit_moments():
    X, _, mean, covariance = make_problem()
    for spread, full in ((np.diag(covariance).copy(), np.diag(np.diag(covariance))), (covariance, covariance)):
        mean_logit, std_logit = logistic.logit_moments(*tensors(X, mean, spread))
        np.testing.assert_allclose(mean_logit, X @ mean, rtol=1e-12)
        np.testing.assert_allclose(std_logit, np.sqrt(np.diag(X @ full @ X.T)), rtol=1e-12)
    nearly_zero = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-15]], dtype=torch.float64)
    _, std_logit = logistic.logit_moments(torch.tensor([[1.0, -1.0]]), torch.zeros(2), nearly_zero)
    assert float(std_logit) == 0.0  # −1e-15 before the root


def test_a_row_of_zeros_has_a_gradient():
    X = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    variance = torch.ones(2, requires_grad=True)
    logistic.elbo(X, torch.tensor([1, 0]), torch.zeros(2), variance, 1.0).backward()
    assert torch.isfinite(variance.grad).all()


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_elbo_is_the_average_over_samples(structure):
    """Within 4 standard errors of 200,000 samples: a false alarm once in 16,000, and the seed is fixed."""
    X, y, mean, covariance = make_problem()
    spread = np.diag(covariance).copy() if structure == "diagonal" else covariance
    full = np.diag(spread) if structure == "diagonal" else covariance
    precision, prior_mean = 0.7, 0.3
    random = np.random.RandomState(1)
    weights = mean + random.randn(200_000, 3) @ np.linalg.cholesky(full).T
    logits = weights @ X.T
    log_likelihood = (y * logits - np.logaddexp(0, logits)).sum(1)
    log_prior = -0.5 * precision * ((weights - prior_mean) ** 2).sum(1) + 1.5 * np.log(precision / (2 * np.pi))
    distance = np.linalg.solve(np.linalg.cholesky(full), (weights - mean).T)
    log_q = -0.5 * (distance**2).sum(0) - 0.5 * np.linalg.slogdet(2 * np.pi * full)[1]
    samples = log_likelihood + log_prior - log_q
    value = float(logistic.elbo(*tensors(X, y, mean, spread), precision, prior_mean))
    assert abs(value - samples.mean()) < 4 * samples.std() / math.sqrt(len(samples))


def test_elbo_of_small_logits_is_that_of_linear_regression():
    """log σ(±z) = −log 2 ± z/2 − z²/8 + O(z⁴): a Gaussian likelihood with noise variance 4 and targets ±2."""
    X, y, mean, covariance = make_problem(scale=1e-4)
    variance = np.diag(covariance).copy()
    value = float(logistic.elbo(*tensors(X, y, mean, variance), 2.0, 0.5))
    gaussian = conjugate_elbo(mean, variance, X, 4 * y - 2, 4.0, 2.0, prior_mean=0.5)
    constant = len(y) * (0.5 * math.log(8 * math.pi) + 0.5 - math.log(2))
    assert value == pytest.approx(gaussian + constant, abs=1e-11)


def test_the_kl_is_that_of_torch():
    _, _, mean, covariance = tensors(*make_problem())
    precision, prior_mean = torch.tensor([0.5, 1.0, 4.0]).double(), torch.tensor([0.1, 0.0, -1.0]).double()
    q = torch.distributions.MultivariateNormal(mean, covariance)
    prior = torch.distributions.MultivariateNormal(prior_mean, (1 / precision).diag())
    value = logistic.gaussian_kl(mean, covariance.diagonal(), torch.logdet(covariance), precision, prior_mean)
    torch.testing.assert_close(value, torch.distributions.kl_divergence(q, prior))


def test_predictive_log_loss():
    X, y, mean, covariance = make_problem()
    std = np.sqrt(np.diag(X @ covariance @ X.T))
    _, probability, _, _ = series((2 * y - 1) * (X @ mean), std)
    value = logistic.predictive_log_loss(*tensors(X, y, mean, covariance))
    assert float(value) == pytest.approx(-np.log(probability).mean(), rel=1e-11)
    far = logistic.predictive_log_loss(torch.ones(1, 1), torch.tensor([0]), torch.tensor([2000.0]), torch.ones(1))
    assert float(far) == pytest.approx(1999.5, abs=1e-9)


@pytest.mark.parametrize("function", [logistic.elbo, logistic.predictive_log_loss])
def test_labels_must_be_0_or_1(function):
    extra = [1.0] if function is logistic.elbo else []
    with pytest.raises(ValueError, match=r"Invalid y: has values \[-1\.0, 1\.0\], must be 0 or 1\. .*\(y \+ 1\) / 2"):
        function(torch.ones(2, 1), torch.tensor([-1.0, 1.0]), torch.zeros(1), torch.ones(1), *extra)

"""Linear regression with a Gaussian prior, where posterior, mean-field optimum and ELBO are known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.reference import conjugate_elbo, conjugate_regression_posterior, mean_field_optimum
from vprop import Objective, Vprop

NOISE_VARIANCE, PRIOR_PRECISION = 0.25, 2.0


def negative_log_likelihood(output, y):
    """The true mean negative log-likelihood, constants included."""
    return 0.5 * ((y - output) ** 2 / NOISE_VARIANCE + math.log(2 * math.pi * NOISE_VARIANCE)).mean()


def make_problem(rows=200, columns=4, seed=0, orthogonal=False):
    random = np.random.RandomState(seed)
    features = random.randn(rows, columns)
    if orthogonal:
        features = np.linalg.qr(features)[0] * np.sqrt(rows)
    targets = features @ random.randn(columns) + math.sqrt(NOISE_VARIANCE) * random.randn(rows)
    return features, targets


def make_model(columns=4):
    model = nn.Linear(columns, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


class Regressions(nn.Module):
    """Regressions that have nothing to do with each other, next to each other: one run trains them all."""

    def __init__(self, count, columns=4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, columns, dtype=torch.float64))

    def forward(self, x):
        """From (rows, regressions, columns) to (rows, regressions)."""
        return (x * self.weight).sum(-1)


def of_each_regression(output, y):
    """Likelihoods of regressions multiply."""
    return output.shape[1] * negative_log_likelihood(output, y)


def fit(problems, *, steps, batch=None, lr, beta):
    """Train, one regression for each of the problems; returns the model, the optimizer and the h of each weight,
    averaged over the last half of the steps.
    """
    x, y = (torch.tensor(np.stack(parts, axis=1)) for parts in zip(*problems, strict=True))
    model, random = Regressions(len(problems), x.shape[2]), np.random.RandomState(0)
    arguments = {"mc_samples": 2, "antithetic": True, "centered": True, "betas": (0, beta)}
    optimizer = Vprop(model.parameters(), lr=lr, num_data=len(x), prior_precision=PRIOR_PRECISION, **arguments)
    average = 0.0
    for step in range(steps):
        rows = slice(None) if batch is None else random.permutation(len(x))[:batch]
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.step(Objective(model, of_each_regression, x[rows], y[rows]))
        if step >= steps // 2:
            average = average + optimizer.state[model.weight]["hess"].numpy() / (steps - steps // 2)
    return model, optimizer, average


@pytest.mark.parametrize("batch", [None, 32])
def test_centered_vprop_reaches_the_posterior(batch):
    """Correlated features, full batch and mini-batches.

    Mean: within 0.1 posterior standard deviations (full batch) or 0.35 (mini-batches of 32, whose gradient noise a
    decaying step size averages out only so far). Curvature: centring is exact up to λ for a diagonal Hessian;
    with correlations its fixed point solves h(h+δ) = Σₖ H²ⱼₖ (h+δ)ⱼ/(h+δ)ₖ, which is solved here by iteration.
    Eight runs at once, each with its own noise: all of them reach the mean, and h is averaged over them.
    """
    features, targets = make_problem()
    exact_mean, _ = conjugate_regression_posterior(features, targets, NOISE_VARIANCE, PRIOR_PRECISION)
    _, exact_variance = mean_field_optimum(features, targets, NOISE_VARIANCE, PRIOR_PRECISION)
    model, _, hess = fit([(features, targets)] * 8, steps=600, batch=batch, lr=0.1, beta=0.99)
    hess = hess.mean(0)
    distance = np.abs(model.weight.detach().numpy() - exact_mean) / np.sqrt(exact_variance)
    assert distance.max() < (0.1 if batch is None else 0.35)
    delta, full = PRIOR_PRECISION / len(targets), features.T @ features / len(targets) / NOISE_VARIANCE
    fixed_point = np.diag(full).copy()
    for _ in range(200):
        fixed_point = 0.5 * fixed_point + 0.5 * (full**2 @ (1 / (fixed_point + delta)))
    if batch is None:
        np.testing.assert_allclose(hess, fixed_point, rtol=0.1)
    variance = 1 / (len(targets) * (hess + delta))
    assert np.all(np.abs(np.log(variance / exact_variance)) < np.log(1.25))


def test_the_variance_on_a_diagonal_problem_is_the_exact_one():
    """Orthogonal features: s(s+λ) = H², so s = (−λ + √(λ²+4H²))/2, and h averaged over the run is s/N."""
    features, targets = make_problem(orthogonal=True)
    _, _, hess = fit([(features, targets)] * 8, steps=600, lr=0.1, beta=0.99)
    total = len(targets) / NOISE_VARIANCE
    expected = (-PRIOR_PRECISION + math.sqrt(PRIOR_PRECISION**2 + 4 * total**2)) / 2 / len(targets)
    np.testing.assert_allclose(hess.mean(0), expected, rtol=0.1)


def test_predictive_intervals_cover_as_they_say():
    """90% intervals over 40 data sets of 100 test points: 4000 outcomes, correlated within a data set.

    The intervals are those of the mean-field posterior at its optimum. Nearly orthogonal features make it close to
    the true posterior, so coverage is nominal; the standard error, clustered by data set, is about 0.6%, and the
    bound 3 of them.
    """
    problems, test_x, test_y = [], [], []
    for seed in range(40):
        problems.append(make_problem(rows=120, seed=seed))
        random, truth = np.random.RandomState(1000 + seed), np.random.RandomState(seed)
        truth.randn(120, 4)
        test_x.append(random.randn(100, 4))
        test_y.append(test_x[-1] @ truth.randn(4) + math.sqrt(NOISE_VARIANCE) * random.randn(100))
    model, optimizer, _ = fit(problems, steps=300, lr=0.2, beta=0.98)
    posterior = optimizer.posterior(model, likelihood="gaussian", noise_variance=NOISE_VARIANCE)
    prediction = posterior.predict(torch.tensor(np.stack(test_x, axis=1)), num_samples=64)
    half_width = 1.6448536 * prediction.variance.sqrt()
    inside = (torch.tensor(np.stack(test_y, axis=1)) - prediction.mean).abs() < half_width
    covered = inside.double().mean(0).numpy()
    standard_error = np.std(covered, ddof=1) / math.sqrt(len(covered))
    assert standard_error < 0.01
    assert abs(np.mean(covered) - 0.9) < 3 * standard_error


@pytest.mark.parametrize(
    ("num_data", "temperature", "prior_precision"),
    [(200, 1.0, 2.0), (1000, 1.0, 2.0), (200, 4.0, 2.0), (200, 1.0, 9.0)],
)
def test_elbo_is_the_closed_form(num_data, temperature, prior_precision):
    """Within 4 standard errors of 400 samples; num_data, temperature and prior_precision each enter rightly."""
    features, targets = make_problem()
    model = make_model()
    nn.init.constant_(model.weight, 0.3)
    optimizer = Vprop(
        model.parameters(),
        num_data=num_data,
        temperature=temperature,
        prior_precision=prior_precision,
        hess_init=0.5,
    )
    posterior = optimizer.posterior(model)
    objective = Objective(model, negative_log_likelihood, torch.tensor(features), torch.tensor(targets)[:, None])
    estimate = posterior.elbo_estimate(objective, num_samples=400)
    expected = conjugate_elbo(
        posterior.mean["weight"].numpy()[0],
        posterior.variance["weight"].numpy()[0],
        features,
        targets,
        NOISE_VARIANCE,
        prior_precision,
        num_data=num_data,
        temperature=temperature,
    )
    assert estimate.standard_error < 0.02 * abs(expected)
    assert abs(estimate.value - expected) < 4 * estimate.standard_error
    assert float(posterior.elbo(objective, num_samples=400)) == estimate.value


def test_elbo_over_a_loader_is_that_of_the_whole():
    """Batches of unequal size, as (x, y) pairs and as objectives."""
    features, targets = make_problem(rows=50)
    model = make_model()
    posterior = Vprop(model.parameters(), num_data=50).posterior(model)
    x, y = torch.tensor(features), torch.tensor(targets)[:, None]
    whole = posterior.elbo(Objective(model, negative_log_likelihood, x, y), num_samples=8)
    pairs = list(zip(x.split(15), y.split(15), strict=True))
    torch.testing.assert_close(posterior.elbo(pairs, num_samples=8, loss_fn=negative_log_likelihood), whole)
    torch.testing.assert_close(posterior.elbo(iter(pairs), num_samples=8, loss_fn=negative_log_likelihood), whole)
    objectives = [Objective(model, negative_log_likelihood, *pair) for pair in pairs]
    torch.testing.assert_close(posterior.elbo(objectives, num_samples=8), whole)
    with pytest.raises(ValueError, match=r"elbo\(loader\) needs loss_fn"):
        posterior.elbo(pairs)
    with pytest.raises(ValueError, match="the objective has no examples"):
        posterior.elbo([], loss_fn=negative_log_likelihood)


def test_elbo_never_exceeds_the_log_evidence():
    """And the mean-field optimum has the highest one."""
    features, targets = make_problem()
    mean, variance = mean_field_optimum(features, targets, NOISE_VARIANCE, PRIOR_PRECISION)
    best = conjugate_elbo(mean, variance, features, targets, NOISE_VARIANCE, PRIOR_PRECISION)
    covariance = NOISE_VARIANCE * np.eye(200) + features @ features.T / PRIOR_PRECISION
    evidence = -0.5 * (
        targets @ np.linalg.solve(covariance, targets) + np.linalg.slogdet(covariance)[1] + 200 * np.log(2 * np.pi)
    )
    model, optimizer, _ = fit([(features, targets)], steps=500, lr=0.1, beta=0.99)
    x, y = torch.tensor(features)[:, None], torch.tensor(targets)[:, None]
    objective = Objective(model, negative_log_likelihood, x, y)
    estimate = optimizer.posterior(model).elbo_estimate(objective, num_samples=200)
    assert best < evidence
    assert best - 0.5 < estimate.value + 4 * estimate.standard_error
    assert estimate.value - 4 * estimate.standard_error < best


def test_groups_with_different_sample_sizes_have_no_elbo():
    model = nn.Linear(4, 1).double()
    groups = [{"params": [model.weight], "num_data": 10}, {"params": [model.bias]}]
    posterior = Vprop(groups, num_data=20).posterior(model)
    with pytest.raises(ValueError, match="different num_data or temperature"):
        posterior.elbo(Objective(model, negative_log_likelihood, torch.ones(3, 4).double(), torch.ones(3, 1)))

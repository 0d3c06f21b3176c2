"""Noise that is learned beside the posterior, on data whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from vprop import VON, Objective, Vprop
from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood

PRIOR_PRECISION, COLUMNS = 2.0, 3


def make_problem(rows, variances, seed=0):
    random = np.random.RandomState(seed)
    features = random.randn(rows, COLUMNS)
    weights = random.randn(COLUMNS, len(variances))
    targets = features @ weights + np.sqrt(variances) * random.randn(rows, len(variances))
    return torch.tensor(features), torch.tensor(targets)


def evidence_maximum(features, target):
    """v of largest evidence p(y|v), by EM: v ← mean of E[(y−xθ)²] under the posterior given v."""
    x, y, v = features.numpy(), target.numpy(), 1.0
    for _ in range(200):
        covariance = np.linalg.inv(x.T @ x / v + PRIOR_PRECISION * np.eye(COLUMNS))
        mean = covariance @ x.T @ y / v
        v = np.mean((y - x @ mean) ** 2) + np.einsum("ni,ij,nj->n", x, covariance, x).mean()
    return v


def assert_recovered(noise, features, targets, truth, tolerance):
    """``tolerance`` to the evidence's maximum, and that to the truth within 4 of its standard errors v·√(2/n).

    The first is about the method and has no statistics but the samples of the weights, whose share of the variance is
    about 3/n; the second, with a false alarm in 16,000 runs for each variance, is about the data.
    """
    best = np.array([evidence_maximum(features, targets[:, j]) for j in range(targets.shape[1])])
    np.testing.assert_allclose(np.atleast_1d(noise), best, rtol=tolerance)
    assert (np.abs(best - truth) < 4 * np.array(truth) * math.sqrt(2 / len(features))).all()


@pytest.mark.parametrize("truth", [[0.25], [0.25, 0.04]], ids=["scalar", "vector"])
def test_the_evidence_is_maximized_in_a_closure_loop(truth):
    """Exact posterior given the noise (VON) and a plain gradient step on log v: type-II maximum likelihood."""
    features, targets = make_problem(400, truth)
    model = nn.Linear(COLUMNS, len(truth), bias=False).double()
    nn.init.zeros_(model.weight)
    likelihood = GaussianLikelihood(1.0, shape=() if len(truth) == 1 else (len(truth),)).double()
    settings = {"num_data": 400, "prior_precision": PRIOR_PRECISION, "betas": (0.0, 0.0), "antithetic": True}
    optimizer = VON(model.parameters(), lr=1.0, mc_samples=2, **settings)
    noise_optimizer = torch.optim.SGD(likelihood.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(noise_optimizer, lambda step: 1 / (1 + 0.1 * step))
    for _ in range(150):
        optimizer.step(Objective(model, likelihood, features, targets))
        noise_optimizer.step()
        noise_optimizer.zero_grad()
        schedule.step()
    assert_recovered(likelihood.current_noise(), features, targets, truth, tolerance=0.003)


def test_one_variance_for_outputs_with_two():
    """A scalar noise for two outputs is the mean of both."""
    features, targets = make_problem(400, [0.25, 0.05])
    likelihood = GaussianLikelihood(1.0).double()
    optimizer = torch.optim.SGD(likelihood.parameters(), lr=0.5)
    output = features @ torch.linalg.lstsq(features, targets).solution
    for _ in range(100):
        optimizer.zero_grad()
        likelihood(output, targets).backward()
        optimizer.step()
    assert likelihood.current_noise() == pytest.approx((targets - output).square().mean().item(), rel=1e-6)


def test_the_evidence_is_maximized_in_an_attached_loop():
    """Vprop and Adam in a training loop that knows of no samples. The weights start at the least-squares solution:
    far from it plain Vprop takes its time, which is not the subject here."""
    truth = [0.25, 0.04]
    features, targets = make_problem(1000, truth)
    model, steps = nn.Linear(COLUMNS, 2, bias=False).double(), 300
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(features, targets).solution.T)
    likelihood = GaussianLikelihood(1.0, shape=(2,)).double()
    settings = {"num_data": 1000, "prior_precision": PRIOR_PRECISION, "betas": (0.0, 0.98)}
    optimizers = [
        Vprop(model.parameters(), lr=0.1, **settings),
        torch.optim.Adam(likelihood.parameters(), lr=0.05),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / steps) for o in optimizers]
    optimizers[0].attach(model)
    for _ in range(steps):
        likelihood(model(features), targets).backward()
        for part in (*optimizers, *schedules):
            part.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_recovered(likelihood.current_noise(), features, targets, truth, tolerance=0.005)


def test_the_mean_alone_gives_too_little_noise():
    """With mc_samples=0 the uncertainty of the weights does not count, and v is the residual variance: smaller by
    the factor 1 − 3/n that a sampled weight adds. The test of the evidence above would notice."""
    features, targets = make_problem(30, [0.25])
    model, likelihood = nn.Linear(COLUMNS, 1, bias=False).double(), GaussianLikelihood(1.0).double()
    settings = {"num_data": 30, "prior_precision": PRIOR_PRECISION, "betas": (0.0, 0.0), "mc_samples": 0}
    optimizer = VON(model.parameters(), lr=1.0, **settings)
    noise_optimizer = torch.optim.SGD(likelihood.parameters(), lr=1.0)
    for _ in range(100):
        optimizer.step(Objective(model, likelihood, features, targets))
        noise_optimizer.step()
        noise_optimizer.zero_grad()
    residual = (targets - model(features)).square().mean().item()
    assert likelihood.current_noise() == pytest.approx(residual, rel=1e-6)
    assert likelihood.current_noise() < 0.95 * evidence_maximum(features, targets[:, 0])


# -- noise that depends on the input -----------------------------------------------------------------------------


def test_a_linear_log_variance_is_recovered_with_its_uncertainty():
    """f = 1 + 2x, log v = −2 + 1.5x, and a model that can say exactly that.

    Estimates: within 5 standard errors from the Fisher information (four of them: a false alarm in 400,000 runs).
    Posterior variances: mean-field ones, 1/(n·F̄ⱼⱼ) at the estimate, where F is 1/v for f and ½ for log v; from about
    800 sampled χ²₁ numbers, so within 5·√(2/800) = 25%.
    """
    random, n = np.random.RandomState(0), 2000
    inputs = random.uniform(-1, 1, (n, 1))
    targets = 1 + 2 * inputs + np.exp(0.5 * (-2 + 1.5 * inputs)) * random.randn(n, 1)
    x, y = torch.tensor(inputs), torch.tensor(targets)
    model = nn.Linear(1, 2).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    likelihood = HeteroscedasticGaussianLikelihood()
    settings = {"num_data": n, "prior_precision": 1e-3, "sampled_fisher": True, "mc_samples": 2, "antithetic": True}
    optimizer = Vprop(model.parameters(), **settings)
    for step in range(400):
        optimizer.param_groups[0] |= {"lr": 0.3 / (1 + 0.05 * step), "betas": (0.0, 1 - 1 / (10 + step))}
        optimizer.step(Objective(model, likelihood, x, y))
    posterior = optimizer.posterior(model, likelihood=likelihood)

    design = torch.cat([torch.ones_like(x), x], 1)
    precision = (-likelihood.split(model(x).detach())[1].log()).exp()
    of_mean, of_noise = design.T @ (precision * design), design.T @ (0.5 * design)
    truth, estimate = torch.tensor([[1.0, 2.0], [-2.0, 1.5]]), torch.stack([model.bias, model.weight[:, 0]], 1).detach()
    errors = torch.stack([torch.linalg.inv(matrix).diagonal().sqrt() for matrix in (of_mean, of_noise)])
    assert ((estimate - truth).abs() < 5 * errors).all()
    variances = torch.stack([posterior.variance["bias"], posterior.variance["weight"][:, 0]], 1)
    expected = 1 / torch.stack([of_mean.diagonal(), of_noise.diagonal()])
    assert ((variances / expected - 1).abs() < 0.25).all()


def test_a_network_finds_where_the_noise_is():
    """log v = −2 + 1.5·sin 2x over x, learned by 20 hidden units from 1,000 examples. The standard error of log v is
    √(2p/n) ≈ 0.13 for p ≈ 8 weights that matter; one noise for all would be off by 1.06. Bound: 0.4 (0.19 with this
    seed)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, generator=generator) * 4 - 2

    def log_variance(x):
        return -2 + 1.5 * torch.sin(2 * x)

    y = torch.sin(x) + (0.5 * log_variance(x)).exp() * torch.randn(1000, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))
    likelihood, steps = HeteroscedasticGaussianLikelihood(), 400
    settings = {"num_data": 1000, "prior_precision": 0.1, "betas": (0.9, 0.98), "sampled_fisher": True}
    optimizer = Vprop(model.parameters(), **settings)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / steps)
        optimizer.step(Objective(model, likelihood, x, y))
    grid = torch.linspace(-1.8, 1.8, 50)[:, None]
    prediction = optimizer.posterior(model, likelihood=likelihood).predict(grid, num_samples=64)
    error = prediction.aleatoric_variance.log() - log_variance(grid)
    assert error.square().mean().sqrt() < 0.4
    assert (prediction.mean - torch.sin(grid)).square().mean().sqrt() < 0.15

"""How the baselines and the library's optimizers are related: identities, not resemblances."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vprop import VON, VONG, Objective
from vprop.baselines import ExtendedKalmanFilter, Newton, RegularizedNaturalGradient

N, LAMBDA, LR, BETA, INIT = 60, 1.7, 0.3, 0.1, 0.4


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, dtype=torch.float64, generator=generator)
    y = (x.sum(1, keepdim=True) + torch.randn(N, 1, dtype=torch.float64, generator=generator) > 0).double()
    return x, y


def two_models():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return model, copy.deepcopy(model)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches():
    x, y = data()
    for step in range(10):
        rows = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:15]
        yield x[rows], y[rows]


def test_vong_without_sampling_is_the_regularized_natural_gradient():
    """The same F̂ = N·ĝĝᵀ, the same prior in every step: VONG adds to it that the gradient is taken at samples."""
    one, other = two_models()
    method = RegularizedNaturalGradient(
        one, num_data=N, prior_precision=LAMBDA, likelihood="bernoulli", lr=LR, step_size=BETA, fisher="gradient",
        hess_init=INIT,
    )  # fmt: skip
    vong = VONG(
        other.parameters(),
        lr=LR,
        num_data=N,
        prior_precision=LAMBDA,
        betas=(0.0, 1 - BETA),
        mc_samples=0,
        hess_init=INIT,
    )
    for x, y in batches():
        method.update(x, y)
        vong.step(Objective(other, F.binary_cross_entropy_with_logits, x, y))
        torch.testing.assert_close(flat(one), flat(other), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(method.covariance, vong.posterior(other).covariance, rtol=1e-8, atol=1e-11)


def test_the_sampled_fisher_averages_to_the_models():
    """One step of VONG with drawn labels, over many seeds, against F̂ of the model; 5 standard errors."""
    one, other = two_models()
    (x, y), draws = data(), 600
    method = RegularizedNaturalGradient(
        one, num_data=N, prior_precision=LAMBDA, likelihood="bernoulli", lr=LR, step_size=1.0, fisher="model"
    )
    method.update(x, y)
    matrices = []
    for seed in range(draws):
        model = copy.deepcopy(other)
        vong = VONG(
            model.parameters(), num_data=N, prior_precision=LAMBDA, betas=(0.0, 0.0), mc_samples=0, seed=seed,
            sampled_fisher=True, lr=LR,
        )  # fmt: skip
        vong.step(Objective(model, F.binary_cross_entropy_with_logits, x, y))
        matrices.append(vong.state[next(model.parameters())]["hess"])
    stacked = torch.stack(matrices)
    error = stacked.std(0) / draws**0.5
    assert ((stacked.mean(0) - method.fisher).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("beta2", [0.0, 0.8])
def test_von_without_sampling_is_online_newton(beta2):
    one, other = two_models()
    newton = Newton(one.parameters(), lr=LR, num_data=N, prior_precision=LAMBDA, betas=(0.0, beta2), hess_init=INIT)
    von = VON(
        other.parameters(), lr=LR, num_data=N, prior_precision=LAMBDA, betas=(0.0, beta2), hess_init=INIT, mc_samples=0
    )
    for x, y in batches():
        for model, optimizer in ((one, newton), (other, von)):
            optimizer.step(Objective(model, F.binary_cross_entropy_with_logits, x, y))
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_von_with_the_last_posterior_as_prior_is_the_kalman_filter(likelihood):
    """For generalised linear models the Hessian is the Fisher, so N = 1, lr = 1, β₂ = 0 is the filter's update."""
    x, y = data()
    one, other = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    for model in (one, other):
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
    ekf = ExtendedKalmanFilter(one, prior_precision=LAMBDA, likelihood=likelihood, noise_variance=0.5)
    loss = F.binary_cross_entropy_with_logits if likelihood == "bernoulli" else F.mse_loss  # (y−f)²: variance ½
    prior = {
        "prior_mean": [p.detach().clone() for p in other.parameters()],
        "prior_precision": LAMBDA * torch.eye(5, dtype=torch.float64),
    }
    for row in range(N):
        ekf.update(x[row : row + 1], y[row : row + 1])
        von = VON(other.parameters(), lr=1.0, num_data=1, betas=(0.0, 0.0), hess_init=0.0, mc_samples=0, **prior)
        von.step(Objective(other, loss, x[row : row + 1], y[row : row + 1]))
        prior = von.posterior(other).as_prior()
    torch.testing.assert_close(flat(other), ekf.mean, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(von.posterior(other).covariance, ekf.covariance, rtol=1e-8, atol=1e-11)

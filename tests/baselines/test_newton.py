"""Newton's method on logistic regression: the MAP, the Laplace approximation, and VON without samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import reference_family as naive
from tests.harness import assert_same_run, make_model, train
from vprop import VON, Objective
from vprop.baselines import Newton

ROWS, COLUMNS = 80, 4
FEATURES = np.random.RandomState(0).randn(ROWS, COLUMNS)
LABELS = (FEATURES @ np.array([1.0, -2.0, 0.5, 0.0]) + np.random.RandomState(1).randn(ROWS) > 0).astype(float)
PRIOR_MEAN = np.array([0.5, 0.0, -0.5, 1.0])
CORRELATED = 0.4 * np.ones((COLUMNS, COLUMNS)) + np.diag(np.linspace(0.5, 2.0, COLUMNS))


def fit(steps, **arguments):
    model = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    means = [torch.tensor(PRIOR_MEAN)[None]]
    optimizer = Newton(model.parameters(), num_data=ROWS, prior_mean=means, **arguments)
    x, y = torch.tensor(FEATURES), torch.tensor(LABELS)[:, None]
    for _ in range(steps):
        optimizer.step(Objective(model, F.binary_cross_entropy_with_logits, x, y))
    return model.weight.detach().numpy()[0], optimizer.posterior(model)


PRIORS = {"number": (2.5, 2.5 * np.eye(COLUMNS)), "matrix": (torch.tensor(CORRELATED), CORRELATED)}


@pytest.mark.parametrize("prior", PRIORS)
def test_the_map_in_a_few_steps(prior):
    """Eight steps from zero: the gradient of the log posterior is gone, and going on changes nothing."""
    argument, precision = PRIORS[prior]
    mean, _ = fit(8, prior_precision=argument)
    gradient = ROWS * naive.logistic_gradient(mean, FEATURES, LABELS) + precision @ (mean - PRIOR_MEAN)
    assert np.abs(gradient).max() < 1e-10
    np.testing.assert_allclose(fit(9, prior_precision=argument)[0], mean, rtol=0, atol=1e-10)
    one_step, _ = fit(1, prior_precision=argument)
    assert np.abs(one_step - mean).max() > 0.1  # it was some way


@pytest.mark.parametrize("prior", PRIORS)
def test_the_posterior_is_the_laplace_approximation(prior):
    """N(MAP, (N·∇²ℓ + Λ)⁻¹), with the Hessian at the MAP."""
    argument, precision = PRIORS[prior]
    mean, posterior = fit(9, prior_precision=argument)
    expected = np.linalg.inv(ROWS * naive.logistic_hessian(mean, FEATURES, LABELS) + precision)
    np.testing.assert_allclose(posterior.covariance.numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(posterior.mean["weight"].numpy()[0], mean, rtol=0, atol=0)


@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.9, 0.5)])
def test_with_averages_it_is_von_at_the_mean(betas):
    """The online Newton method, bit for bit, on a network whose Hessian is indefinite at the start."""
    settings = {"num_data": 50, "lr": 0.1, "betas": betas, "steps": 6}
    online = train(Newton, model=make_model(torch.float64), **settings)
    von = train(VON, model=make_model(torch.float64), mc_samples=0, **settings)
    assert_same_run(online, von)


def test_a_plain_newton_step_has_no_memory():
    """β₂ = 0: where it starts in H does not matter, nor what came before."""
    np.testing.assert_array_equal(fit(3, prior_precision=1.0)[0], fit(3, prior_precision=1.0, hess_init=50.0)[0])


def test_it_draws_nothing():
    """The block of a sample sees the mean; an evaluation draw is from the Laplace approximation."""
    model = make_model(torch.float64)
    optimizer = Newton(model.parameters(), num_data=50)
    before = model[0].weight.detach().clone()
    with optimizer.sampled_params():
        assert torch.equal(model[0].weight, before)
    optimizer.discard_samples()
    with optimizer.sampled_params(train=False):
        assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)

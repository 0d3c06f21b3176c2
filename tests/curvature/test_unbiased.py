"""What each estimator of a diagonal is unbiased for, against exact second derivatives.

On a quadratic every estimate is a polynomial of degree two in the noise, whose expectation a few points give exactly:
no Monte Carlo there. For logistic regression E_q is an integral in one dimension per example (Gauss–Hermite). For a
tanh network it is taken over the same weights as the estimates, so that only the estimator's own randomness is left.

Where there is Monte Carlo, a sample of weights is a row of one parameter, so that one call observes thousands of them.
All such means must lie within 5 standard errors, for each of at most 13 weights: a false alarm in at most one of
130,000 runs of a test. Seeds are fixed.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacrev, vmap

from vprop import MeanField, Objective
from vprop.curvature import (
    AntitheticSpread,
    Evidence,
    HessianDiagonal,
    Hutchinson,
    PerExampleGaussNewton,
    Price,
    SampledFisher,
    SampleSpread,
    SquaredGradient,
)
from vprop.noise import Draw, Stream

ESS = 50.0
INPUTS, HIDDEN = 2, 3


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_mean(values, expected, scale=None):
    """Within 5 standard errors, which are small enough for the test to mean something: a twentieth of the largest."""
    error = values.std(0) / math.sqrt(len(values))
    assert (error < 0.05 * (expected.abs().max() if scale is None else scale)).all()
    assert ((values.mean(0) - expected).abs() < 5 * error).all()


# -- two models of a binary label, as functions of one vector of weights -------------------------------------------


def linear(theta, x):
    return x @ theta


def network(theta, x):
    W1, b1, w2, b2 = theta.split([HIDDEN * INPUTS, HIDDEN, HIDDEN, 1])
    return torch.tanh(x @ W1.view(HIDDEN, INPUTS).T + b1) @ w2 + b2


NETWORK_SIZE = HIDDEN * (INPUTS + 2) + 1
X = randn(12, INPUTS, seed=0) + torch.tensor([0.0, 1.0])
Y = (X[:, 0] - 0.5 * X[:, 1] + randn(12, seed=1) > 0).double()
WHOLE = [slice(None)]
BATCHES = [slice(i, None, 4) for i in range(4)]
each_split = pytest.mark.parametrize("batches", [WHOLE, BATCHES], ids=["whole", "mini-batches"])


def mean_and_std(size):
    return 0.8 * randn(size, seed=2), torch.linspace(0.3, 0.9, size, dtype=torch.float64)


class Replicas(nn.Module):
    """A model once for each row of its parameter; the loss is the sum over rows of the mean loss of each."""

    def __init__(self, model, thetas):
        super().__init__()
        self.model, self.thetas = model, nn.Parameter(thetas)

    def forward(self, x):
        return vmap(self.model, in_dims=(0, None), out_dims=1)(self.thetas, x)

    def objective(self, batch):
        x, y = X[batch], Y[batch]
        labels = y[:, None].expand(-1, len(self.thetas))
        return Objective(self, sum_of_mean_losses, x, labels, likelihood="bernoulli")


def sum_of_mean_losses(logits, labels):
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(0).sum()


def mean_loss(model, batch=WHOLE[0]):
    return lambda theta: F.binary_cross_entropy_with_logits(model(theta, X[batch]), Y[batch])


def estimates(estimator, model, mean, std, noises, batch, *, seed):
    """ĥ of as many independent steps as each of `noises`, one per sample of a step, has rows."""
    folded = None
    for k, noise in enumerate(noises):
        replicas = Replicas(model, mean + std * noise)
        grads = vmap(grad(mean_loss(model, batch)))(replicas.thetas.detach())
        observed = None
        if estimator.needs_objective:
            draw = Draw(seed, 0, 0, k, stream=Stream.LABELS)
            (observed,) = estimator.observe(replicas.objective(batch), {"thetas": replicas.thetas}, draw)
            observed = estimator.curvature_of(observed)
        evidence = Evidence(grads, observed=observed, noise=noise if estimator.needs_noise else None)
        folded = estimator.fold(folded, evidence)
    return estimator.hess(folded, ESS, 1 / std.square())


def expectation_over_q(function, mean, std):
    """Mean over the data of x²·E_q[f(z, y)]; the logit of an example is normal, z ~ N(xᵀμ, Σ x²σ²): by quadrature."""
    points, weights = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(60))
    z = (X @ mean)[:, None] + (X.square() @ std.square()).sqrt()[:, None] * points
    factor = function(z, Y[:, None]) @ weights / math.sqrt(2 * math.pi)
    return (X.square() * factor[:, None]).mean(0)


def bernoulli_variance(z, y):
    return z.sigmoid() * (1 - z.sigmoid())


def squared_residual(z, y):
    return (z.sigmoid() - y).square()


def exact_hessian_diagonal(model, thetas):
    """diag ∇²ℓ of the loss on all data, for each θ."""
    return vmap(hessian(mean_loss(model)))(thetas).diagonal(dim1=-2, dim2=-1)


def mean_squared_slopes(weight):
    """θ ↦ mean over the data of weight(z, y)·(∂z/∂θ)², for each θ."""

    def value(model, thetas):
        logits = vmap(lambda theta: model(theta, X))(thetas)
        slopes = vmap(jacrev(lambda theta: model(theta, X)))(thetas)
        return (weight(logits, Y)[..., None] * slopes.square()).mean(-2)

    return value


exact_fisher_diagonal = mean_squared_slopes(bernoulli_variance)
exact_empirical_fisher_diagonal = mean_squared_slopes(squared_residual)

# name: (estimator, steps, what it is unbiased for at one θ, the f with which that is mean x²f(z, y) if z = xᵀθ)
UNBIASED = {
    "price": (Price(), 40_000, exact_hessian_diagonal, bernoulli_variance),
    "hutchinson": (Hutchinson(), 4_000, exact_hessian_diagonal, bernoulli_variance),
    "hutchinson, 3 probes": (Hutchinson(3), 4_000, exact_hessian_diagonal, bernoulli_variance),
    "hessian": (HessianDiagonal(1000), 300, exact_hessian_diagonal, bernoulli_variance),
    "sampled_fisher": (SampledFisher(), 4_000, exact_fisher_diagonal, bernoulli_variance),
    "gauss_newton": (PerExampleGaussNewton(), 4_000, exact_empirical_fisher_diagonal, squared_residual),
}


@each_split
@pytest.mark.parametrize("samples", [1, 2, -2], ids=["one sample", "two", "a pair"])
@pytest.mark.parametrize("kind", UNBIASED)
def test_logistic_regression_against_quadrature(kind, samples, batches):
    """… over q and over the mini-batches: their estimates have what the whole data would give as their mean."""
    estimator, steps, _, function = UNBIASED[kind]
    mean, std = mean_and_std(INPUTS)
    total = 0.0
    for i, batch in enumerate(batches):
        noises = [randn(steps, INPUTS, seed=10 * i + k + 100) for k in range(abs(samples))]
        if samples < 0:
            noises[1] = -noises[0]
        total = total + estimates(estimator, linear, mean, std, noises, batch, seed=i)
    assert_mean(total / len(batches), expectation_over_q(function, mean, std))


@each_split
@pytest.mark.parametrize("kind", UNBIASED)
def test_a_tanh_network_against_the_exact_value_at_the_same_weights(kind, batches):
    """E[ĥ − exact] = 0. There is negative curvature here, and the Hessian is not the Fisher, nor that the empirical."""
    estimator, steps, exact, _ = UNBIASED[kind]
    mean, std = mean_and_std(NETWORK_SIZE)
    noise = randn({"price": 8_000, "hessian": 10}.get(kind, steps), NETWORK_SIZE, seed=3)
    pair = [noise, -noise]
    runs = [estimates(estimator, network, mean, std, pair, batch, seed=i) for i, batch in enumerate(batches)]
    expected = sum(exact(network, mean + std * noise) for noise in pair) / 2
    difference = sum(runs) / len(runs) - expected
    if kind in ("hessian", "gauss_newton"):  # not random, given θ
        assert difference.abs().max() < 1e-10
    else:
        assert_mean(difference, torch.zeros(()), scale=expected.mean(0).abs().max())


def test_the_three_expectations_are_three():
    """Or the tests above could not tell them apart; in logistic regression the first two are one."""
    mean, std = mean_and_std(NETWORK_SIZE)
    thetas = mean + std * randn(4000, NETWORK_SIZE, seed=3)
    hess, fisher, empirical = (
        exact(network, thetas).mean(0)
        for exact in (exact_hessian_diagonal, exact_fisher_diagonal, exact_empirical_fisher_diagonal)
    )
    for first, second in itertools.combinations([hess, fisher, empirical], 2):
        assert (first - second).abs().max() > 0.1 * first.abs().max()
    assert exact_hessian_diagonal(network, thetas).min() < -0.1
    weights = thetas[:, :INPUTS]
    torch.testing.assert_close(exact_hessian_diagonal(linear, weights), exact_fisher_diagonal(linear, weights))


def test_gauss_newton_is_the_fisher_where_labels_are_the_models():
    """Its mean over all labels of four examples, each set as probable as the model says. No Monte Carlo."""
    theta, _ = mean_and_std(NETWORK_SIZE)
    x, model = X[:4], Replicas(network, theta[None])
    probs, total = network(theta, x).sigmoid(), 0.0
    for bits in itertools.product([0.0, 1.0], repeat=4):
        y = torch.tensor(bits, dtype=torch.float64)
        objective = Objective(model, sum_of_mean_losses, x, y[:, None])
        draw = Draw(0, 0, 0, stream=Stream.LABELS)
        (observed,) = PerExampleGaussNewton().observe(objective, {"thetas": model.thetas}, draw)
        total = total + torch.where(y > 0, probs, 1 - probs).prod() * observed[0]
    slopes = jacrev(lambda t: network(t, x))(theta)
    torch.testing.assert_close(total, ((probs * (1 - probs))[:, None] * slopes.square()).mean(0))


# -- on a quadratic, exactly ---------------------------------------------------------------------------------------

DATA = randn(12, 3, seed=4)
TARGETS = randn(12, seed=5)
MEAN, STD = randn(3, seed=6), torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
# Points with mean 0 and covariance I: the mean over them of any polynomial of degree two is its E over N(0, I).
POINTS = math.sqrt(3) * torch.cat([torch.eye(3), -torch.eye(3)]).double()


def batch_hessian(batch):
    return DATA[batch].T @ DATA[batch] / len(DATA[batch])


def batch_gradient(theta, batch):
    """Of ½ mean (xᵀθ−y)², for each row θ."""
    return (theta @ DATA[batch].T - TARGETS[batch]) @ DATA[batch] / len(DATA[batch])


def quadratic_expectation(estimator, draws, batches):
    """E[ĥ] over the noise and the mini-batches; `draws` holds the noise of each sample, a row per case."""
    total = 0.0
    for batch in batches:
        folded = None
        for noise in draws:
            folded = estimator.fold(folded, Evidence(batch_gradient(MEAN + STD * noise, batch), noise=noise))
        total = total + estimator.hess(folded, ESS, 1 / STD.square()).mean(0)
    return total / len(batches)


PAIRS = list(torch.stack([torch.stack(pair) for pair in itertools.product(POINTS, POINTS)]).unbind(1))
DRAWS = {"one sample": [POINTS], "two": PAIRS, "a pair": [POINTS, -POINTS]}


@each_split
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_price_is_exact_in_expectation(draws, batches):
    """The gradient at the mean, and its differences between mini-batches, average out."""
    expected = batch_hessian(slice(None)).diagonal()
    torch.testing.assert_close(quadratic_expectation(Price(), draws, batches), expected)


@each_split
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_the_squared_gradient_has_a_bias(draws, batches):
    """ess·(ḡ² + Σ H²σ²) with the ḡ and H of the mini-batch: ess·Var ḡ over mini-batches is in it, too."""
    spread = sum(batch_hessian(batch).square() @ STD.square() for batch in batches) / len(batches)
    squares = torch.stack([batch_gradient(MEAN, batch).square() for batch in batches]).mean(0)
    expected = ESS * (squares + spread)
    torch.testing.assert_close(quadratic_expectation(SquaredGradient(), draws, batches), expected)


@each_split
@pytest.mark.parametrize(("estimator", "draws"), [(SampleSpread(), "two"), (AntitheticSpread(), "a pair")])
def test_a_spread_has_that_bias_no_more(estimator, draws, batches):
    """ess·Σ H²σ² with the H of the mini-batch."""
    expected = ESS * sum(batch_hessian(batch).square() @ STD.square() for batch in batches) / len(batches)
    torch.testing.assert_close(quadratic_expectation(estimator, DRAWS[draws], batches), expected)


# -- Hutchinson's noise --------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """Σ over rows of ½θᵀHθ."""

    def __init__(self, hess, count):
        super().__init__()
        self.hess, self.thetas = hess, nn.Parameter(randn(count, len(hess), seed=7))

    def forward(self, x):
        return 0.5 * ((self.thetas @ self.hess) * self.thetas).sum()


def hutchinson_estimates(hess, count, probes, samples):
    estimator, folded = Hutchinson(probes), None
    model = Quadratic(hess, count)
    objective = Objective(model, lambda output, y: output, torch.zeros(1), torch.zeros(1))
    for k in range(samples):
        (observed,) = estimator.observe(objective, {"thetas": model.thetas}, Draw(1, 0, 0, k, stream=Stream.LABELS))
        folded = estimator.fold(folded, Evidence(torch.zeros_like(model.thetas), observed=observed))
    return estimator.hess(folded, ESS)


def test_hutchinson_is_exact_where_the_hessian_is_diagonal():
    diagonal = torch.tensor([2.0, -1.0, 0.0, 0.3], dtype=torch.float64)
    values = hutchinson_estimates(diagonal.diag(), count=50, probes=1, samples=1)
    torch.testing.assert_close(values, diagonal.expand(50, 4), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("probes", "samples"), [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_hutchinsons_variance(probes, samples):
    """Σ of the squares of the row's other entries, over the number of probes of all samples: none is used twice."""
    hess = randn(4, 4, seed=8)
    hess = hess + hess.T
    values = hutchinson_estimates(hess, 20_000, probes, samples)
    assert_mean(values, hess.diagonal())
    expected = (hess.square().sum(1) - hess.diagonal().square()) / (probes * samples)
    assert_mean((values - hess.diagonal()).square(), expected)


# -- through an optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["price", "hutchinson", "sampled_fisher", "gauss_newton"])
def test_what_mean_field_takes_for_the_curvature(curvature):
    """h ← β₂h₀ + (1−β₂)ĥ, from which ĥ; h₀ is large enough for h ≥ 0 not to matter, and ess small, for σ = ½."""
    steps, ess, hess_init = 20_000, 0.4, 9.0
    mean, std = 0.8 * randn(INPUTS, seed=2), torch.full((INPUTS,), 0.5, dtype=torch.float64)
    model = Replicas(linear, mean.expand(steps, -1).clone())
    settings = {"num_data": 1, "temperature": 1 / ess, "prior_precision": ess * (4.0 / ess - hess_init)}
    optimizer = MeanField(
        model.parameters(), 0.0, curvature=curvature, hess_init=hess_init, betas=(0.0, 0.5), mc_samples=2, **settings
    )
    torch.testing.assert_close(optimizer.posterior(model).variance["thetas"], std.square().expand(steps, -1))
    optimizer.step(model.objective(slice(None)))
    hess = optimizer.state[model.thetas]["hess"]
    assert hess.min() > 0
    function = squared_residual if curvature == "gauss_newton" else bernoulli_variance
    assert_mean((hess - 0.5 * hess_init) / 0.5, expectation_over_q(function, mean, std))

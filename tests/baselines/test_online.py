"""The extended Kalman filter and online natural gradient: each against numpy, and against the other."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from tests.reference import conjugate_regression_posterior
from vprop.baselines import ExtendedKalmanFilter, OnlineNaturalGradient, RegularizedNaturalGradient

TRUTH = np.array([1.0, -1.0, 0.5, 2.0])


def make_data(count, likelihood, batch=1, seed=0):
    """Inputs (count, batch, 4) and targets (count, batch)."""
    random = np.random.RandomState(seed)
    x = random.randn(count, batch, 4)
    signal = x @ TRUTH
    if likelihood == "gaussian":
        return x, signal + 0.5 * random.randn(count, batch)
    if likelihood == "bernoulli":
        return x, (random.rand(count, batch) < special.expit(signal)).astype(float)
    return x, (np.digitize(signal + random.randn(count, batch), [-1.0, 1.0])).astype(int)


def make_model(kind, outputs=1, seed=0):
    """Reproducible weights, without the global generator."""
    hidden = [] if kind == "linear" else [nn.Linear(4, 5), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(5 if hidden else 4, outputs, bias=bool(hidden))).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def run(method, x, y):
    for inputs, targets in zip(torch.tensor(x), torch.tensor(y), strict=True):
        method.update(inputs, targets)
    return method


# -- the identity (Ollivier, 2018) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "likelihood", "count", "batch"),
    [
        ("linear", "gaussian", 1000, 1),
        ("linear", "bernoulli", 1000, 1),
        ("mlp", "gaussian", 300, 1),
        ("mlp", "bernoulli", 300, 2),
        ("linear", "categorical", 300, 1),
        ("mlp", "categorical", 300, 2),
    ],
)
def test_the_filter_is_natural_gradient_with_steps_1_over_t_plus_1(kind, likelihood, count, batch):
    """The mean after every observation and J = P⁻¹/(t+1) at the end, to 1e-9."""
    x, y = make_data(count, likelihood, batch)
    model = make_model(kind, 3 if likelihood == "categorical" else 1)
    arguments = {"prior_precision": 1.5, "likelihood": likelihood, "noise_variance": 0.25}
    kalman = ExtendedKalmanFilter(copy.deepcopy(model), **arguments)
    natural = OnlineNaturalGradient(copy.deepcopy(model), **arguments)
    torch.testing.assert_close(kalman.covariance, natural.covariance)
    for inputs, targets in zip(torch.tensor(x), torch.tensor(y), strict=True):
        kalman.update(inputs, targets)
        natural.update(inputs, targets)
        torch.testing.assert_close(kalman.mean, natural.mean, rtol=0, atol=1e-9)
    assert kalman.observations == natural.observations == count
    torch.testing.assert_close(kalman.covariance, natural.covariance, rtol=0, atol=1e-9)
    precision = torch.linalg.inv(kalman.covariance)
    torch.testing.assert_close(natural.fisher, precision / (count + 1), rtol=0, atol=1e-9)
    assert (
        float((kalman.mean - torch.cat([p.detach().flatten() for p in model.parameters()])).abs().max()) > 0.1
    )  # it moved


# -- the filter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_a_linear_gaussian_filter_is_the_conjugate_posterior(batch):
    x, y = make_data(60, "gaussian", batch)
    model = make_model("linear")
    prior_mean = model[0].weight.detach().numpy()[0].copy()
    kalman = run(ExtendedKalmanFilter(model, prior_precision=0.1, likelihood="gaussian", noise_variance=0.25), x, y)
    mean, covariance = conjugate_regression_posterior(x.reshape(-1, 4), y.reshape(-1), 0.25, 0.1, prior_mean)
    np.testing.assert_allclose(kalman.mean, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(kalman.covariance, covariance, rtol=0, atol=1e-10)


def naive_filter(x, y, weights, precision, predict):
    """K = PAᵀ(APAᵀ+R)⁻¹, θ += K(y−ŷ), P −= KAP, with ``predict(θ, x)`` giving ŷ, A and R."""
    theta, covariance = weights.copy(), np.eye(weights.size) / precision
    for inputs, targets in zip(x, y, strict=True):
        expected, slope, noise = predict(theta, inputs[0])
        gain = covariance @ slope.T @ np.linalg.inv(slope @ covariance @ slope.T + noise)
        theta = theta + gain @ (targets - expected)
        covariance = covariance - gain @ slope @ covariance
    return theta, covariance


def test_the_logistic_filter_is_the_textbook_one():
    def predict(theta, inputs):
        p = special.expit(inputs @ theta)
        return np.array([p]), p * (1 - p) * inputs[None], np.array([[p * (1 - p)]])

    x, y = make_data(100, "bernoulli")
    model = make_model("linear")
    weights = model[0].weight.detach().numpy()[0].copy()
    kalman = run(ExtendedKalmanFilter(model, prior_precision=2.0, likelihood="bernoulli"), x, y)
    mean, covariance = naive_filter(x, y, weights, 2.0, predict)
    np.testing.assert_allclose(kalman.mean, mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(kalman.covariance, covariance, rtol=0, atol=1e-11)


def test_the_categorical_filter_is_the_textbook_one_on_all_classes_but_the_last():
    """There R has full rank; the library works on all classes."""

    def predict(theta, inputs):
        p = special.softmax(theta.reshape(3, 4) @ inputs)
        noise = np.diag(p) - np.outer(p, p)
        slope = np.kron(noise, inputs[None])  # ∂p/∂θ = (∂p/∂η)·(∂η/∂θ)
        return p[:2], slope[:2], noise[:2, :2]

    x, y = make_data(100, "categorical")
    model = make_model("linear", outputs=3)
    weights = model[0].weight.detach().numpy().reshape(-1).copy()
    kalman = run(ExtendedKalmanFilter(model, prior_precision=2.0, likelihood="categorical"), x, y)
    mean, covariance = naive_filter(x, np.eye(3)[y[:, 0]][:, :2], weights, 2.0, predict)
    np.testing.assert_allclose(kalman.mean, mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(kalman.covariance, covariance, rtol=0, atol=1e-11)


def test_a_batch_of_a_linear_model_is_its_observations_in_turn():
    x, y = make_data(10, "gaussian", batch=3)
    arguments = {"prior_precision": 1.0, "likelihood": "gaussian", "noise_variance": 0.3}
    jointly = run(ExtendedKalmanFilter(make_model("linear"), **arguments), x, y)
    in_turn = run(ExtendedKalmanFilter(make_model("linear"), **arguments), x.reshape(30, 1, 4), y.reshape(30, 1))
    torch.testing.assert_close(jointly.mean, in_turn.mean, rtol=0, atol=1e-11)
    torch.testing.assert_close(jointly.covariance, in_turn.covariance, rtol=0, atol=1e-11)


def test_the_covariance_stays_positive_definite():
    """A nearly flat prior and very exact observations, where P − KAP loses all its digits."""
    x, y = make_data(300, "gaussian")
    arguments = {"prior_precision": 1e-8, "likelihood": "gaussian", "noise_variance": 1e-6}
    kalman = run(ExtendedKalmanFilter(make_model("linear"), **arguments), x, y)
    assert torch.equal(kalman.covariance, kalman.covariance.T)
    assert float(torch.linalg.eigvalsh(kalman.covariance)[0]) > 0


def test_confident_predictions_do_no_harm():
    """p(1−p) underflows: a wrong label moves the mean by P·x, and nothing becomes NaN."""
    model = make_model("linear")
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1000.0, 0.0, 0.0, 0.0]]))
    kalman = ExtendedKalmanFilter(model, prior_precision=0.5, likelihood="bernoulli")
    kalman.update(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0.0]))
    torch.testing.assert_close(kalman.mean, torch.tensor([998.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(kalman.covariance, 2 * torch.eye(4, dtype=torch.float64))


# -- natural gradient ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [0.05, lambda t: 1 / (t + 2)])
@pytest.mark.parametrize("kind", ["model", "gradient"])
def test_online_natural_gradient_is_its_equations(step_size, kind):
    x, y = make_data(50, "bernoulli", batch=2)
    model = make_model("linear")
    theta = model[0].weight.detach().numpy()[0].copy()
    method = run(
        OnlineNaturalGradient(model, prior_precision=3.0, likelihood="bernoulli", step_size=step_size, fisher=kind),
        x,
        y,
    )
    fisher = 3.0 * np.eye(4)
    for t in range(1, 51):
        p = special.expit(x[t - 1] @ theta)
        gradient = x[t - 1].T @ (p - y[t - 1])
        estimate = x[t - 1].T @ np.diag(p * (1 - p)) @ x[t - 1] if kind == "model" else np.outer(gradient, gradient)
        gamma = step_size(t) if callable(step_size) else step_size
        fisher = (1 - gamma) * fisher + gamma * estimate
        theta = theta - gamma * np.linalg.solve(fisher, gradient)
    np.testing.assert_allclose(method.mean, theta, rtol=0, atol=1e-11)
    np.testing.assert_allclose(method.fisher, fisher, rtol=0, atol=1e-11)
    np.testing.assert_allclose(method.covariance, gamma * np.linalg.inv(fisher), rtol=1e-9)


@pytest.mark.parametrize("prior_mean", [0.1, np.float64(0.1), np.full(4, 0.1)], ids=["number", "NumPy's", "array"])
def test_a_prior_mean_keeps_its_digits(prior_mean):
    facts = {"num_data": 10, "prior_precision": 1.0, "likelihood": "bernoulli"}
    method = RegularizedNaturalGradient(make_model("linear"), prior_mean=prior_mean, **facts)
    assert bool((method.prior_mean == 0.1).all())


@pytest.mark.parametrize("kind", ["model", "gradient"])
def test_regularized_natural_gradient_is_its_equations(kind):
    """F ← (1−β)F + βF̂, θ ← θ − α(F+δI)⁻¹(ĝ + δ(θ−m₀)): VONG without sampling for F̂ = N·ĝĝᵀ."""
    x, y = make_data(60, "bernoulli", batch=8)
    total, precision, lr, beta, hess_init = 480, 2.0, 0.3, 0.1, 0.5
    prior_mean = np.array([0.1, 0.2, 0.3, 0.4])
    model = make_model("linear")
    theta, fisher, delta = model[0].weight.detach().numpy()[0].copy(), hess_init * np.eye(4), precision / total
    method = run(
        RegularizedNaturalGradient(
            model,
            num_data=total,
            prior_precision=precision,
            prior_mean=torch.tensor(prior_mean),
            likelihood="bernoulli",
            lr=lr,
            step_size=beta,
            fisher=kind,
            hess_init=hess_init,
        ),
        x,
        y,
    )
    for inputs, targets in zip(x, y, strict=True):
        p = special.expit(inputs @ theta)
        gradient = inputs.T @ (p - targets) / 8
        estimate = inputs.T @ np.diag(p * (1 - p)) @ inputs / 8
        if kind == "gradient":
            estimate = total * np.outer(gradient, gradient)
        fisher = (1 - beta) * fisher + beta * estimate
        damped = fisher + delta * np.eye(4)
        theta = theta - lr * np.linalg.solve(damped, gradient + delta * (theta - prior_mean))
    np.testing.assert_allclose(method.mean, theta, rtol=0, atol=1e-11)
    np.testing.assert_allclose(method.fisher, fisher, rtol=0, atol=1e-11)
    np.testing.assert_allclose(method.covariance, np.linalg.inv(total * damped), rtol=1e-9)


def test_regularized_natural_gradient_ends_at_the_posterior_of_linear_regression():
    """Full batches and the model's Fisher: the mean and the covariance are those of the conjugate posterior."""
    x, y = make_data(1, "gaussian", batch=50)
    method = RegularizedNaturalGradient(
        make_model("linear"),
        num_data=50,
        prior_precision=2.0,
        likelihood="gaussian",
        noise_variance=0.25,
        lr=1.0,
        step_size=1.0,
        fisher="model",
    )
    for _ in range(2):
        run(method, x, y)
    mean, covariance = conjugate_regression_posterior(x[0], y[0], 0.25, 2.0)
    np.testing.assert_allclose(method.mean, mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(method.covariance, covariance, rtol=0, atol=1e-11)


# -- models and data -------------------------------------------------------------------------------------------------


def test_the_state_is_float64_and_the_model_gets_it_in_its_own_dtype():
    x, y = make_data(20, "bernoulli")
    exact = run(ExtendedKalmanFilter(make_model("mlp"), prior_precision=1.0, likelihood="bernoulli"), x, y)
    model = make_model("mlp").bfloat16()
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.clone()
    kalman = run(ExtendedKalmanFilter(model, prior_precision=1.0, likelihood="bernoulli"), x.astype(np.float32), y)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert kalman.mean.dtype == kalman.covariance.dtype == torch.float64
    assert len(kalman.mean) == sum(p.numel() for p in trainable) == len(exact.mean) - 5
    assert torch.equal(torch.cat([p.detach().flatten() for p in trainable]), kalman.mean.bfloat16())
    assert torch.equal(model[0].bias, frozen)
    assert repr(kalman) == "ExtendedKalmanFilter(26 weights, bernoulli, observations=20)"


def test_dropout_and_batchnorm_are_in_evaluation_mode():
    """And neither the model's mode and buffers nor the global random state are touched."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)).train()
    running, state = model[1].running_mean.clone(), torch.get_rng_state()
    x, y = make_data(3, "bernoulli")
    first, second = (
        run(ExtendedKalmanFilter(copy.deepcopy(model), prior_precision=1.0, likelihood="bernoulli"), x, y)
        for _ in range(2)
    )
    assert torch.equal(first.mean, second.mean)
    run(ExtendedKalmanFilter(model, prior_precision=1.0, likelihood="bernoulli"), x, y)
    assert model.training
    assert torch.equal(model[1].running_mean, running)
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_of_several_parts():
    """A tuple is the positional, a dict the keyword arguments of the model; integers stay integers."""

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 1)

        def forward(self, index, scale):
            return scale * self.table(index)

    index, scale, y = torch.tensor([1]), torch.tensor([[2.0]]), torch.tensor([[1.0]])
    means = []
    for x in ((index, scale), {"index": index, "scale": scale}):
        model = Lookup()
        nn.init.zeros_(model.table.weight)
        method = ExtendedKalmanFilter(model, prior_precision=1.0, likelihood="gaussian")
        method.update(x, y)
        means.append(method.mean)
    expected = torch.tensor([0.0, 0.4, 0.0], dtype=torch.float64)  # 1·2/(2·2 + 1)
    torch.testing.assert_close(means[0], expected)
    torch.testing.assert_close(means[1], expected)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_targets_with_and_without_a_last_dimension(shape):
    x, y = make_data(1, "bernoulli", batch=3)
    method = OnlineNaturalGradient(make_model("linear"), prior_precision=1.0, likelihood="bernoulli")
    method.update(torch.tensor(x[0]), torch.tensor(y[0]).reshape(shape))
    other = OnlineNaturalGradient(make_model("linear"), prior_precision=1.0, likelihood="bernoulli")
    other.update(torch.tensor(x[0]), torch.tensor(y[0]).reshape(3).bool())
    assert torch.equal(method.mean, other.mean)


# -- errors ----------------------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ({"prior_precision": 0.0}, r"Invalid prior_precision=0\.0: must be a finite number > 0\. "),
    ({"prior_precision": "1"}, r"Invalid prior_precision='1': must be a finite number > 0\. "),
    ({"noise_variance": -1.0}, r"Invalid noise_variance=-1\.0: must be a finite number > 0\. "),
    ({"likelihood": "poisson"}, r"Invalid likelihood='poisson': must be one of "),
    ({"likelihood": "heteroscedastic"}, r"Invalid likelihood='heteroscedastic': must be 'gaussian', 'bern"),
    ({"likelihood": None}, r"Invalid likelihood=None: must be 'gaussian', 'bernoulli' or 'categorical'\. "),
    ({"max_parameters": 3}, r"Invalid model: has 4 trainable weights, must have 1 to max_parameters=3\. "),
]
BAD_STEPS = [
    ({"step_size": 0.0}, r"Invalid step_size=0\.0: must be a number in \(0, 1\], or a function of t"),
    ({"step_size": lambda t: 2.0}, r"Invalid step_size=2\.0: must be a number in \(0, 1\]"),
    ({"fisher": "exact"}, r"Invalid fisher='exact': must be 'model' or 'gradient'\. "),
]
BAD_REGULARIZED = [
    ({"num_data": 0}, r"Invalid num_data=0: must be a finite number > 0\. .*len\(train_set\)"),
    ({"lr": math.nan}, r"Invalid lr=nan: must be a finite number > 0\. "),
    ({"hess_init": -1}, r"Invalid hess_init=-1: must be a finite number > 0\. "),
    ({"prior_mean": torch.zeros(3)}, r"Invalid prior_mean: has shape \(3,\), must be a number or have shape \(4,\)\. "),
]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [(ExtendedKalmanFilter, *bad) for bad in BAD_ARGUMENTS]
    + [(OnlineNaturalGradient, *bad) for bad in BAD_ARGUMENTS + BAD_STEPS]
    + [(RegularizedNaturalGradient, *bad) for bad in BAD_ARGUMENTS + BAD_STEPS + BAD_REGULARIZED],
)
def test_bad_arguments(method, changes, message):
    arguments = {"prior_precision": 1.0, "likelihood": "gaussian"}
    if method is RegularizedNaturalGradient:
        arguments["num_data"] = 10
    with pytest.raises(ValueError, match=message):
        method(make_model("linear"), **(arguments | changes))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "message"),
    [
        ("gaussian", 1, torch.zeros(3), r"Invalid y: has shape \(3,\), must be .* output, \(2, 1\)\. "),
        ("gaussian", 2, torch.zeros(2), r"Invalid y: has shape \(2,\), must be .* output, \(2, 2\)\. "),
        ("bernoulli", 1, torch.tensor([-1.0, 1.0]), r"Invalid y: has values \[-1\.0, 1\.0\], must be 0 or 1\. "),
        ("categorical", 1, torch.tensor([0, 0]), r"needs a model with outputs of shape .* have shape \(2, 1\)"),
        ("categorical", 3, torch.tensor([0, 3]), r"Invalid y: is torch\.int64 of shape \(2,\), must be .* 0 to 2 "),
        ("categorical", 3, torch.eye(3)[:2], r"Invalid y: is torch\.float32 of shape \(2, 3\), .* not one-hot"),
    ],
)
def test_bad_targets(likelihood, outputs, y, message):
    method = ExtendedKalmanFilter(make_model("linear", outputs), prior_precision=1.0, likelihood=likelihood)
    with pytest.raises(ValueError, match=message):
        method.update(torch.ones(2, 4), y)
    assert method.observations == 0


@pytest.mark.parametrize("method", [ExtendedKalmanFilter, OnlineNaturalGradient])
def test_a_bad_observation_leaves_the_state_alone(method):
    model = make_model("linear")
    method = method(model, prior_precision=1.0, likelihood="gaussian")
    mean, covariance, weights = method.mean.clone(), method.covariance.clone(), model[0].weight.clone()
    with pytest.raises(RuntimeError, match="NaN"):
        method.update(torch.full((1, 4), math.nan), torch.zeros(1))
    with pytest.raises(RuntimeError, match="NaN or infinite, and was not made"):
        method.update(torch.ones(1, 4), torch.tensor([math.inf]))
    assert torch.equal(method.mean, mean)
    assert torch.equal(method.covariance, covariance)
    assert torch.equal(model[0].weight, weights)
    assert method.observations == 0


def test_a_singular_fisher_matrix_is_an_error():
    method = OnlineNaturalGradient(
        make_model("linear"), prior_precision=1.0, likelihood="gaussian", step_size=1.0, fisher="gradient"
    )
    with pytest.raises(RuntimeError, match=r"not positive definite.*Use smaller steps"):
        method.update(torch.ones(1, 4), torch.zeros(1))


def test_a_batch_without_examples_changes_nothing():
    ekf = ExtendedKalmanFilter(nn.Linear(2, 3), prior_precision=2.0, likelihood="categorical")
    before = ekf.mean
    ekf.update(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(ekf.mean, before)
    assert torch.equal(ekf.covariance, torch.eye(9, dtype=torch.float64) / 2)

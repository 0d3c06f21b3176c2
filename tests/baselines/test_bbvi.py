"""Black-box variational inference: where it goes, that nothing it is given can break it, and what it keeps."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness import make_model, train
from tests.reference import mean_field_optimum
from vprop import Objective, Vprop
from vprop.baselines import BBVI

METHODS = ["sgd", "rmsprop", "adam"]
NOISE_VARIANCE, PRIOR_PRECISION, ROWS, COLUMNS = 0.25, 2.0, 60, 3


def half_squared_error(output, y):
    return 0.5 * (y - output).square().mean() / NOISE_VARIANCE


@pytest.mark.parametrize("method", METHODS)
def test_it_approaches_the_mean_field_optimum(method):
    """Linear regression, from a σ that is a quarter of the best one, with steps that fall to zero.

    An antithetic pair's mean gradient is exact, so μ arrives. E[ĝε] is an average over some hundred pairs, which
    leaves about 3 % of error in each σ: 10 % are three standard errors (the seed is fixed).
    """
    random = np.random.RandomState(0)
    features = random.randn(ROWS, COLUMNS)
    features[:, 1] += 0.5 * features[:, 0]
    targets = features @ random.randn(COLUMNS) + math.sqrt(NOISE_VARIANCE) * random.randn(ROWS)
    mean, variance = mean_field_optimum(features, targets, NOISE_VARIANCE, PRIOR_PRECISION)
    model = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    lr, lr_std = {"sgd": (0.1, 0.02), "rmsprop": (0.03, 0.002), "adam": (0.05, 0.005)}[method]
    pairs = {"mc_samples": 8, "antithetic": True, "hess_init": 64.0}
    optimizer = BBVI(model.parameters(), num_data=ROWS, prior_precision=PRIOR_PRECISION, method=method, **pairs)
    assert (optimizer.posterior(model).variance["weight"].sqrt().numpy()[0] < 0.3 * np.sqrt(variance)).all()
    x, y, steps = torch.tensor(features), torch.tensor(targets)[:, None], 200
    for step in range(steps):
        optimizer.param_groups[0].update(lr=lr * (1 - step / steps), lr_std=lr_std * (1 - step / steps))
        optimizer.step(Objective(model, half_squared_error, x, y))
    posterior = optimizer.posterior(model)
    np.testing.assert_allclose(posterior.mean["weight"].numpy()[0], mean, rtol=0, atol=1e-3)
    np.testing.assert_allclose(posterior.variance["weight"].sqrt().numpy()[0], np.sqrt(variance), rtol=0.1)


def run_on(gradients, **arguments):
    """Weights that start at 1, and σ after each step, of float32 runs on given gradients.

    A gradient may be a number, times (1, −1, 0.001, 0) for the four weights, or a function of the sampled weights.
    """
    weight = nn.Parameter(torch.ones(4))
    optimizer = BBVI([weight], **({"num_data": 100} | arguments))
    stds = [optimizer.posterior(nn.ParameterList([weight])).variance["0"].sqrt()]
    for gradient in gradients:
        with optimizer.sampled_params():
            if callable(gradient):
                weight.grad = gradient(weight.detach())
            else:
                weight.grad = gradient * torch.tensor([1.0, -1.0, 1e-3, 0.0])
        optimizer.step()
        stds.append(optimizer.state[weight]["std"].clone())
    return weight.detach(), torch.stack(stds)


def assert_safe(weight, stds):
    assert torch.isfinite(weight).all()
    assert torch.isfinite(stds).all()
    assert (stds > 0).all()
    ratios = stds[1:] / stds[:-1]
    assert ((ratios > 0.499) & (ratios < 2.001)).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lr", [1e-30, 1.0, 1e3, 1e10])
def test_absurd_steps(method, lr):
    """σ is between half and twice what it was, so that a hundred steps of any size leave it a positive number."""
    assert_safe(*run_on([1.0, -3.0] * 50, lr=1e-3, lr_std=lr, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("hess_init", "prior_precision"), [(1e25, 1.0), (1e12, 0.0), (0.0, 1e-18), (1e-20, 0.0)])
def test_a_tiny_or_huge_start(method, hess_init, prior_precision):
    """σ between 1e-14 and 1e9 on the loss ½Σ(θ−1)²: nothing overflows, so nothing is left out with a warning."""
    start = {"hess_init": hess_init, "prior_precision": prior_precision}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight, stds = run_on([lambda theta: theta - 1] * 60, lr=0.1, lr_std=0.5, method=method, **start)
    assert_safe(weight, stds)
    assert stds[0].max() < 1e-6 or stds[0].min() > 1e6  # it was a start worth the name


def test_from_a_tiny_sigma_it_doubles_step_by_step():
    """1/(ess·σ) is huge there: the bound is what keeps the first step from going to infinity."""
    _, stds = run_on([lambda theta: theta - 1] * 60, lr=0.01, lr_std=0.01, hess_init=1e25)
    torch.testing.assert_close(stds[1:30], 2 * stds[:29])
    assert (stds[-1] > 0.01).all()
    assert (stds[-1] < 1).all()


@pytest.mark.parametrize("method", ["rmsprop", "adam"])
def test_a_gradient_whose_square_overflows(method):
    """1e20 is a float32 number and its square is not: it must not leave NaN, or a weight that stands still, behind."""
    settings = {"lr": 1e-3, "lr_std": 0.01, "method": method}
    with pytest.warns(RuntimeWarning, match="left out"):
        weight, stds = run_on([1.0, 1e20, 1.0, 1.0], **settings)
    assert_safe(weight, stds)
    with pytest.warns(RuntimeWarning, match="left out"):
        later, _ = run_on([1.0, 1e20] + [1.0] * 20, **settings)
    assert (later - weight)[0] < -1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_step_to_infinity_is_left_out(method):
    """As in every other optimizer here: a finite gradient and a finite rate can make a step beyond float32."""
    with pytest.warns(RuntimeWarning, match="left out"):
        weight, stds = run_on([1e6, 1.0], lr=3e38, lr_std=1e-3, method=method)
    assert_safe(weight, stds)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_bad_gradients_are_left_out_with_a_warning(method, bad):
    """Also in the very first step; the element goes on later."""
    for gradients in ([bad, 1.0, 1.0], [1.0, bad, 1.0]):
        with pytest.warns(RuntimeWarning, match=r"\d gradient elements were NaN or infinite"):
            weight, stds = run_on(gradients, lr=0.01, method=method)
        assert_safe(weight, stds)
        first = gradients.index(bad)
        assert torch.equal(stds[first + 1], stds[first])
        assert (weight[:2] != 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "numbers"), list(zip(METHODS, [2, 4, 6], strict=True)))
def test_numbers_kept_per_weight(method, numbers, dtype):
    """2, 4 and 6 with the mean, which for coarse weights lies in the state; all in the precision of the arithmetic."""
    model, optimizer = train(BBVI, model=make_model(dtype), num_data=50, method=method, lr=1e-3, steps=3)
    for p in model.parameters():
        kept = {key: value for key, value in optimizer.state[p].items() if key != "step"}
        if dtype != torch.bfloat16:
            kept["mean"] = p
        assert len(kept) == numbers
        assert all(value.shape == p.shape for value in kept.values())
        assert {value.dtype for value in kept.values()} == {torch.float32 if dtype == torch.bfloat16 else dtype}
    model, optimizer = train(Vprop, model=make_model(dtype), num_data=50, steps=1)
    assert len([key for key in optimizer.state[model[0].weight] if key not in ("step", "mean")]) + 1 == 2


def test_samples_have_the_standard_deviation_of_the_state():
    """θ = μ + σε with the ε that the gradient in σ is multiplied with: one step on a linear loss, written out."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    optimizer = BBVI([weight], 0.1, num_data=20, prior_precision=3.0, hess_init=0.5)
    std = 1 / math.sqrt(20 * 0.5 + 3)
    with optimizer.sampled_params():
        eps = (weight.detach() - torch.tensor([1.0, 2.0, 3.0])) / std
    weight.grad = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    gradient = weight.grad * eps + 3 / 20 * std - 1 / (20 * std)
    optimizer.step()
    expected = (std - 0.1 * gradient).clamp(std / 2, 2 * std)
    torch.testing.assert_close(optimizer.state[weight]["std"], expected)

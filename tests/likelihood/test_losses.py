"""The losses against torch.distributions, their scale, their shapes and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood, split_heteroscedastic

VARIANCES = {"scalar": torch.tensor(0.3).double(), "vector": torch.tensor([0.1, 0.5, 2.0]).double()}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joint_log_density(mean, variance, y):
    """log p of each example, all of its dimensions together."""
    return Independent(Normal(mean, variance.sqrt()), mean.dim() - 1).log_prob(y)


@pytest.mark.parametrize("shape", [(7, 3), (5, 2, 3)])
@pytest.mark.parametrize("kind", VARIANCES)
def test_gaussian_is_the_mean_negative_log_density(kind, shape):
    output, y, variance = randn(*shape), randn(*shape, seed=1), VARIANCES[kind]
    loss = GaussianLikelihood(variance)(output, y)
    torch.testing.assert_close(loss, -joint_log_density(output, variance.expand(shape), y).mean())


def test_outputs_without_a_dimension_of_their_own():
    output, y = randn(7), randn(7, seed=1)
    torch.testing.assert_close(GaussianLikelihood(0.3)(output, y), GaussianLikelihood(0.3)(output[:, None], y[:, None]))


@pytest.mark.parametrize("shape", [(7, 6), (5, 2, 6)])
def test_heteroscedastic_is_the_mean_negative_log_density(shape):
    output, likelihood = randn(*shape), HeteroscedasticGaussianLikelihood()
    mean, variance = likelihood.split(output)
    y = randn(*mean.shape, seed=1)
    torch.testing.assert_close(mean, output[..., :3])
    torch.testing.assert_close(variance, output[..., 3:].exp())
    torch.testing.assert_close(likelihood(output, y), -joint_log_density(mean, variance, y).mean())


def test_equal_noise_for_all_is_the_gaussian_one():
    output, y = randn(7, 3), randn(7, 3, seed=1)
    with_noise = torch.cat([output, VARIANCES["vector"].log().expand(7, 3)], dim=1)
    expected = GaussianLikelihood(VARIANCES["vector"])(output, y)
    torch.testing.assert_close(HeteroscedasticGaussianLikelihood()(with_noise, y), expected)


@pytest.mark.parametrize("likelihood", [GaussianLikelihood(0.3), HeteroscedasticGaussianLikelihood()])
def test_a_mean_over_examples_and_a_sum_over_dimensions(likelihood):
    """Every example twice is the same loss; every dimension twice is twice the loss."""
    f, s, y = randn(7, 2), randn(7, 2, seed=2), randn(7, 2, seed=1)

    def loss(repeats):
        means = f.repeat(*repeats)
        gaussian = isinstance(likelihood, GaussianLikelihood)
        return likelihood(means if gaussian else torch.cat([means, s.repeat(*repeats)], 1), y.repeat(*repeats))

    torch.testing.assert_close(loss((2, 1)), loss((1, 1)))
    torch.testing.assert_close(loss((1, 2)), 2 * loss((1, 1)))


@pytest.mark.parametrize("kind", VARIANCES)
def test_gradients_against_finite_differences(kind):
    likelihood, y = GaussianLikelihood(VARIANCES[kind]), randn(4, 3, seed=1)
    output = randn(4, 3).requires_grad_()

    def loss(output, log_variance):
        return torch.func.functional_call(likelihood, {"log_noise_variance": log_variance}, (output, y))

    assert torch.autograd.gradcheck(loss, (output, likelihood.log_noise_variance))
    assert torch.autograd.gradgradcheck(loss, (output, likelihood.log_noise_variance))
    both = randn(4, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda both: HeteroscedasticGaussianLikelihood()(both, y), (both,))
    assert torch.autograd.gradgradcheck(lambda both: HeteroscedasticGaussianLikelihood()(both, y), (both,))


def test_noise_variance_is_differentiable_and_its_copy_is_not():
    likelihood = GaussianLikelihood(0.25, shape=(2,))
    likelihood.noise_variance.sum().backward()
    torch.testing.assert_close(likelihood.log_noise_variance.grad, torch.full((2,), 0.25))
    assert not likelihood.current_noise().requires_grad
    assert GaussianLikelihood(0.5).current_noise() == 0.5


def test_what_is_learned():
    assert [name for name, _ in GaussianLikelihood().named_parameters()] == ["log_noise_variance"]
    fixed = GaussianLikelihood(0.25, learnable=False)
    assert list(fixed.parameters()) == []
    assert list(fixed.state_dict()) == ["log_noise_variance"]
    assert list(HeteroscedasticGaussianLikelihood().parameters()) == []
    assert GaussianLikelihood(1.0, shape=3).noise_variance.shape == (3,)
    assert GaussianLikelihood(2).noise_variance.dtype == torch.get_default_dtype()
    assert repr(GaussianLikelihood(0.25)) == "GaussianLikelihood(noise_variance=0.25, learnable=True)"
    text = "GaussianLikelihood(noise_variance=[0.25, 0.25], learnable=False)"
    assert repr(GaussianLikelihood(0.25, shape=(2,), learnable=False)) == text


def test_the_initial_variance_is_copied():
    start = torch.tensor([0.1, 0.2])
    likelihood = GaussianLikelihood(start)
    start.zero_()
    torch.testing.assert_close(likelihood.noise_variance.detach(), torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_computed_in_float32(dtype):
    """Beyond float16's 65,504: a residual of 300 is 90,000 squared."""
    output, y = torch.full((4, 1), 300.0, dtype=dtype), torch.zeros(4, 1, dtype=dtype)
    loss = GaussianLikelihood(1.0)(output, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.item(), 0.5 * (9e4 + math.log(2 * math.pi)), rtol=1e-6, atol=0)
    both = torch.cat([output, torch.zeros_like(output)], 1)
    assert HeteroscedasticGaussianLikelihood()(both, y).item() == loss.item()
    rounded = GaussianLikelihood(0.01).to(dtype)  # with the rest of a model
    exact = GaussianLikelihood(rounded.log_noise_variance.detach().float().exp())
    assert rounded(output, y).item() == pytest.approx(exact(output, y).item(), rel=1e-6)
    assert rounded.noise_variance.item() == pytest.approx(exact.noise_variance.item(), rel=1e-6)


# -- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_variance", [-1e30, -400.0, -31.0, 31.0, 400.0, 1e30])
def test_extreme_log_variances_are_finite_and_find_their_way_back(log_variance):
    """Value and slope are those at ±30; a slope of 0 would leave log v where it is for ever."""
    limit = math.copysign(30.0, log_variance)
    slopes = []
    for value in (log_variance, limit):
        output = torch.tensor([[1.0, value]]).requires_grad_()
        loss = HeteroscedasticGaussianLikelihood()(output, torch.tensor([[3.0]]))
        slopes.append((loss.item(), *torch.autograd.grad(loss, output)[0][0].tolist()))
    assert slopes[0] == slopes[1]
    assert all(math.isfinite(value) for value in slopes[0])
    assert slopes[0][2] * limit > 0
    likelihood = GaussianLikelihood(1.0)
    nn.init.constant_(likelihood.log_noise_variance, log_variance)
    likelihood(torch.tensor([[1.0]]), torch.tensor([[3.0]])).backward()
    assert likelihood.log_noise_variance.grad.item() == slopes[0][2]
    assert likelihood.current_noise() == pytest.approx(math.exp(limit))


def test_inside_the_limits_nothing_is_changed():
    log_variance = torch.linspace(-30, 30, 1001)
    assert torch.equal(split_heteroscedastic(torch.stack([log_variance] * 2, -1))[1][:, 0], log_variance)


# -- errors ------------------------------------------------------------------------------------------------------


def test_targets_that_would_be_broadcast():
    message = r"Invalid y: has shape \(5,\), must have \(5, 1\) for an output of shape \(5, 1\)\. Use y\.unsqueeze"
    with pytest.raises(ValueError, match=message):
        GaussianLikelihood()(torch.ones(5, 1), torch.ones(5))
    with pytest.raises(ValueError, match=r"has shape \(5, 1\), must have \(5,\)"):
        GaussianLikelihood()(torch.ones(5), torch.ones(5, 1))
    with pytest.raises(ValueError, match=r"has shape \(5,\), must have \(5, 1\) for an output of shape \(5, 2\)"):
        HeteroscedasticGaussianLikelihood()(torch.ones(5, 2), torch.ones(5))
    with pytest.raises(ValueError, match=r"Invalid output: has shape \(\), must have the examples as its first dim"):
        GaussianLikelihood()(torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize("output", [torch.ones(5, 2), torch.ones(5, 1), torch.ones(3)])
def test_noise_that_does_not_fit_the_output(output):
    with pytest.raises(ValueError, match=r"Invalid output: has shape .* must be \(examples, …, 3\) because there is"):
        GaussianLikelihood(shape=(3,))(output, output)


@pytest.mark.parametrize("shape", [(5, 3), (), (5, 0)])
def test_outputs_that_cannot_be_split(shape):
    with pytest.raises(ValueError, match=r"Invalid output: has shape .* must have an even last dimension: d means"):
        HeteroscedasticGaussianLikelihood()(torch.ones(shape), torch.ones(5))


@pytest.mark.parametrize("value", [math.inf, 1e-20, torch.tensor([1.0, 1e20])])
def test_variances_that_are_too_small_or_too_large(value):
    with pytest.raises(ValueError, match=r"Invalid noise_variance=.*: must be between 1e-13 and 1e13\. Rescale"):
        GaussianLikelihood(value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, torch.tensor([1.0, 0.0])])
def test_what_is_no_variance(value):
    with pytest.raises(ValueError, match=r"Invalid noise_variance=.*: must be > 0\. It is the variance, not its log"):
        GaussianLikelihood(value)


def test_bad_shapes():
    for shape in [(2, 3), (0,), (-1,)]:
        with pytest.raises(ValueError, match=r"Invalid shape=.*: must be \(\) or \(d,\) with d >= 1"):
            GaussianLikelihood(shape=shape)
    for noise in (torch.ones(2), torch.ones(2, 2)):
        with pytest.raises(ValueError, match=r"Invalid noise_variance of shape \(2.*must be a number or have shape="):
            GaussianLikelihood(noise, shape=(3,))

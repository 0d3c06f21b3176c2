"""Mean and variance of each parameter by itself: those of the posterior, for every optimizer, at any time."""

from __future__ import annotations

import pytest
import torch

from tests.harness import backward, make_batch, make_model, train
from tests.table import cases
from vprop import VONG, Vprop


def assert_those_of_the_posterior(optimizer, model):
    posterior, marginals = optimizer.posterior(model), optimizer.marginals()
    assert [marginal.parameter for marginal in marginals] == list(model.parameters())
    for marginal, name in zip(marginals, posterior.mean, strict=True):
        torch.testing.assert_close(marginal.mean, posterior.mean[name])
        torch.testing.assert_close(marginal.variance, posterior.variance[name], check_dtype=False)


@pytest.mark.parametrize("case", cases())
def test_they_are_those_of_the_posterior(case):
    model = make_model()
    optimizer = case(model.parameters())
    assert_those_of_the_posterior(optimizer, model)
    assert {marginal.steps for marginal in optimizer.marginals()} == {0}
    assert not optimizer.state, "asking has made state"
    train(case, steps=2, model=model, optimizer=optimizer)
    assert_those_of_the_posterior(optimizer, model)
    assert {marginal.steps for marginal in optimizer.marginals()} == {2}
    for marginal in optimizer.marginals():
        assert marginal.hess is None or marginal.hess.shape == marginal.parameter.shape


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_a_parameter_that_has_made_no_step_is_there_as_it_started(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=100)
    with optimizer.sampled_params():
        model[0](make_batch()[0]).square().mean().backward()  # the last layer gets no gradient
    optimizer.step()
    assert_those_of_the_posterior(optimizer, model)
    assert [marginal.steps for marginal in optimizer.marginals()] == [1, 1, 0, 0]


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_a_sample_in_the_weights_is_neither_seen_nor_disturbed(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=100)
    mean = [p.detach().clone() for p in model.parameters()]
    optimizer.attach(model)
    model(make_batch()[0])
    sample = [p.detach().clone() for p in model.parameters()]
    marginals = optimizer.marginals()
    for p, drawn, before, marginal in zip(model.parameters(), sample, mean, marginals, strict=True):
        assert torch.equal(p, drawn)
        assert not torch.equal(p, before)
        torch.testing.assert_close(marginal.mean, before)


def test_they_are_a_snapshot():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    train(Vprop, steps=1, model=model, optimizer=optimizer)
    marginals = optimizer.marginals()
    before = [(m.mean.clone(), m.variance.clone(), m.hess.clone()) for m in marginals]
    train(Vprop, steps=1, model=model, optimizer=optimizer)
    for marginal, (mean, variance, hess) in zip(marginals, before, strict=True):
        assert torch.equal(marginal.mean, mean)
        assert torch.equal(marginal.variance, variance)
        assert torch.equal(marginal.hess, hess)
        assert not torch.equal(marginal.parameter, mean)


def test_coarse_weights_have_a_float32_mean():
    model, optimizer = train(Vprop, steps=3, model=make_model(torch.bfloat16), num_data=100)
    assert {marginal.mean.dtype for marginal in optimizer.marginals()} == {torch.float32}
    assert_those_of_the_posterior(optimizer, model)


def test_frozen_parameters_have_none():
    model = make_model().requires_grad_(False)
    model[2].requires_grad_(True)
    optimizer = Vprop(model.parameters(), num_data=100)
    assert [marginal.parameter for marginal in optimizer.marginals()] == list(model[2].parameters())


def test_asking_inside_a_sample_is_an_error():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match=r"marginals\(\) inside an active sample"):
        optimizer.marginals()
    backward(model, [make_batch()])

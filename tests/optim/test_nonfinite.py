"""NaN and infinity in a gradient: left out, reported, and never silently in the posterior."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.table import cases
from vprop import Vprop


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", cases(any_loop=True, has_hess=True))
def test_bad_elements_are_left_out_with_a_warning_and_training_goes_on(case, bad):
    model = nn.Linear(3, 1, bias=False)
    optimizer = case(model.parameters(), lr=0.1)

    def closure(poison):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        if poison:
            model.weight.grad[0, 1] = bad
        return loss

    optimizer.step(lambda: closure(False))
    mean, hess = model.weight.detach().clone(), optimizer.state[model.weight]["hess"].clone()
    with pytest.warns(RuntimeWarning, match=r"1 gradient elements were NaN or infinite and were left out.*lower lr"):
        optimizer.step(lambda: closure(True))
    assert optimizer.state[model.weight]["hess"][0, 1] == hess[0, 1]
    torch.testing.assert_close(model.weight[0, 1], mean[0, 1], rtol=1e-6, atol=1e-6)
    assert (model.weight[0, 0] - mean[0, 0]).abs() > 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: closure(False))
        posterior = optimizer.posterior(model)
    assert torch.isfinite(posterior.mean["weight"]).all()
    assert (posterior.variance["weight"] > 0).all()


def test_overflow_of_the_squared_gradient_counts_as_infinite():
    w = nn.Parameter(torch.ones(2))
    optimizer = Vprop([w], num_data=1000, mc_samples=0, lr=0.1)
    w.grad = torch.tensor([1e30, 1.0])
    with pytest.warns(RuntimeWarning, match="1 gradient elements"):
        optimizer.step()
    assert w[0] == 1.0
    assert torch.isfinite(optimizer.state[w]["hess"]).all()


def test_a_step_to_infinity_is_left_out():
    """A finite gradient and a finite curvature can still make a step beyond float32."""
    w = nn.Parameter(torch.ones(2))
    optimizer = Vprop([w], num_data=1, mc_samples=0, lr=1e32, prior_precision=0.0, hess_init=1e-20)
    w.grad = torch.tensor([1e-5, 0.0])
    with pytest.warns(RuntimeWarning, match="1 gradient elements"):
        optimizer.step()
    assert w.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fused", [None, False])
def test_without_prior_and_gradient_the_curvature_stays(fused):
    """The step of SGD's kind divides by nothing, but the next sample needs a precision."""
    w = nn.Parameter(torch.ones(2))
    options = {"preconditioner": "identity", "batch_size": 1, "init_steps": 0, "fused": fused}
    optimizer = Vprop([w], num_data=10, prior_precision=0.0, lr=0.1, **options)
    with optimizer.sampled_params():
        w.grad = torch.tensor([1.0, 0.0])
    with pytest.warns(RuntimeWarning, match="1 gradient elements"):
        optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["hess"], torch.ones(2))
    with optimizer.sampled_params():
        assert torch.isfinite(w).all()


def test_a_posterior_that_is_not_finite_is_an_error():
    model = nn.Linear(2, 1)
    optimizer = Vprop(model.parameters(), num_data=10)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"The posterior of 'bias' is not finite.*earlier checkpoint"):
        optimizer.posterior(model)

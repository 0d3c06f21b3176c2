"""attach(draw_ahead=True): a step leaves the next sample in the weights, and nobody who asks properly notices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_same_run, attached_step, make_batch, make_model
from tests.table import cases
from vprop import Vprop
from vprop.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="built without compiled kernels")


def train(case, *, ahead, steps=5, between=lambda model, optimizer, step: None, **arguments):
    model = make_model()
    optimizer = case(model.parameters(), **arguments)
    handle = optimizer.attach(model, draw_ahead=ahead)
    for step in range(steps):
        attached_step(optimizer, model, [make_batch(seed=step)])
        between(model, optimizer, step)
    handle.remove()
    return model, optimizer


@pytest.fixture
def ahead():
    """A model, its mean, and an optimizer that has left a sample in the weights."""
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    optimizer.attach(model, draw_ahead=True)
    attached_step(optimizer, model, [make_batch()])
    mean = optimizer.posterior(model).mean  # which takes the sample out again
    attached_step(optimizer, model, [make_batch()])
    twin = copy.deepcopy(mean)
    assert not is_mean(model, twin)
    return model, optimizer


def is_mean(model, mean):
    return all(torch.allclose(p, mean[name], rtol=1e-5, atol=1e-6) for name, p in model.named_parameters())


@pytest.mark.parametrize("case", cases(at_most_samples=1, any_loop=True, has_hess=True))
def test_the_same_run(case):
    assert_same_run(train(case, ahead=False), train(case, ahead=True), rtol=1e-6, atol=1e-7)


def test_it_saves_a_pass(monkeypatch):
    calls, write = [], cpu.perturb
    monkeypatch.setattr(cpu, "perturb", lambda *arguments: (calls.append(arguments), write(*arguments)))
    train(Vprop, ahead=True, num_data=100)
    assert len(calls) == 2  # the first sample in, the last one out


def evaluate(model, optimizer, step):
    model.eval()(make_batch()[0])
    model.train()


def look(model, optimizer, step):
    optimizer.posterior(model)
    optimizer.diagnose()


def save(model, optimizer, step):
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def sample(model, optimizer, step):
    with optimizer.sampled_params(train=False):
        model(make_batch()[0])


def anneal(model, optimizer, step):
    optimizer.param_groups[0]["temperature"] = 1.0 - 0.1 * step


def schedule(model, optimizer, step):
    optimizer.param_groups[0]["lr"] *= 0.9


def discard(model, optimizer, step):
    optimizer.discard_samples()


def reseed(model, optimizer, step):
    optimizer.param_groups[0]["seed"] = step


BETWEEN = [evaluate, look, save, sample, anneal, schedule, discard, reseed]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.99)])
def test_the_same_run_with_something_in_between(between, betas):
    arguments = {"num_data": 100, "betas": betas, "between": between}
    assert_same_run(train(Vprop, ahead=False, **arguments), train(Vprop, ahead=True, **arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ask", ["state_dict", "evaluation", "posterior", "discard_samples"])
def test_whoever_asks_gets_the_mean(ahead, ask):
    model, optimizer = ahead
    sampled = {name: p.detach().clone() for name, p in model.named_parameters()}
    if ask == "state_dict":
        model.state_dict()
    elif ask == "evaluation":
        model.eval()(make_batch()[0])
    elif ask == "posterior":
        optimizer.posterior(model)
    else:
        optimizer.discard_samples()
    assert not is_mean(model, sampled)
    assert is_mean(model, optimizer.posterior(model).mean)


def test_a_copy_with_the_sample_in_it_is_refused(ahead):
    model, optimizer = ahead
    with pytest.raises(RuntimeError, match="discard_samples"):
        copy.deepcopy((model, optimizer))
    optimizer.discard_samples()
    copy.deepcopy((model, optimizer))


def test_a_closure_uses_the_sample_that_is_there():
    runs = []
    for ahead in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100)
        handle = optimizer.attach(model, draw_ahead=ahead)
        for step in range(4):
            x, y = make_batch(seed=step)

            def closure(x=x, y=y, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=1e-6, atol=1e-7)


def test_a_step_without_a_forward_is_still_an_error(ahead):
    model, optimizer = ahead
    mean = copy.deepcopy(optimizer.posterior(model).mean)
    attached_step(optimizer, model, [make_batch()])
    with pytest.raises(RuntimeError, match="step\\(\\) without a sample"):
        optimizer.step()
    assert is_mean(model, optimizer.posterior(model).mean)
    assert mean.keys() == dict(model.named_parameters()).keys()


def test_an_automatic_prior_sees_the_mean():
    arguments = {"num_data": 100, "prior_precision": "auto"}
    assert_same_run(
        train(Vprop, ahead=False, steps=30, **arguments),
        train(Vprop, ahead=True, steps=30, **arguments),
        rtol=1e-5,
        atol=1e-6,
    )

"""Attached models that torch.jit or torch.export take down: the mean, or an error that says how to detach."""

from __future__ import annotations

import pytest
import torch

from tests.harness import backward, make_batch, make_model
from vprop import Vprop

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
X, Y = make_batch()


def trace(model):
    return torch.jit.trace(model, X)


def export(model):
    return torch.export.export(model, (X,), strict=False).module()


@pytest.fixture
def attached():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    return model, optimizer, optimizer.attach(model)


def test_a_model_is_scripted_once_it_is_detached(attached):
    model, _, handle = attached
    with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot .* attached .* handle\.remove\(\)"):
        torch.jit.script(model)
    handle.remove()
    assert torch.equal(torch.jit.script(model)(X), model(X))


@pytest.mark.parametrize("capture", [trace, export])
def test_in_evaluation_mode_it_is_the_mean(attached, capture):
    model, _, _ = attached
    assert torch.equal(capture(model.eval())(X), model(X))


@pytest.mark.parametrize("capture", [trace, export])
@pytest.mark.parametrize("training", [True, False])
def test_a_sample_is_not_taken_down_and_the_step_goes_on(attached, capture, training):
    (model, optimizer, _), other = attached, make_model()
    control = Vprop(other.parameters(), num_data=100)
    control.attach(other)
    losses = [torch.nn.functional.cross_entropy(m(X), Y) for m in (model, other)]
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace and torch\.export .* handle\.remove\(\)"):
        capture(model.train(training))
    for loss, step in zip(losses, (optimizer, control), strict=True):
        loss.backward()
        step.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_refusal_before_the_first_sample_changes_nothing(attached):
    model, optimizer, _ = attached
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"torch\.export"):
        export(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    backward(model, [(X, Y)])
    optimizer.step()

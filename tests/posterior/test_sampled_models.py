"""The model under sampled weights: the draws of predict, one after the other, without a trace in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness import make_batch, make_model, train
from vprop import VONG, Vprop


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_the_draws_are_those_of_predict(constructor):
    model, optimizer = train(constructor, steps=2, num_data=100)
    posterior, (x, _) = optimizer.posterior(model), make_batch()
    with torch.no_grad():
        outputs = torch.stack([sampled(x) for sampled in posterior.sampled_models(4, seed=3)])
    assert torch.equal(outputs, posterior.predict(x, 4, seed=3).samples)
    assert len({tuple(output.flatten().tolist()) for output in outputs}) == 4


def test_the_default_is_that_of_predict():
    model, optimizer = train(Vprop, steps=2, num_data=100)
    posterior, (x, _) = optimizer.posterior(model), make_batch()
    outputs = torch.stack([sampled(x).detach() for sampled in posterior.sampled_models()])
    assert torch.equal(outputs, posterior.predict(x).samples)


def network_with_everything():
    """Weights with a posterior, a frozen layer, running statistics and a counter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    model[3].requires_grad_(False)
    return model


def test_they_are_in_evaluation_mode_and_the_model_stays_as_it_is():
    model, (x, _) = network_with_everything(), make_batch()
    posterior = Vprop(model.parameters(), num_data=100).posterior(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for sampled in posterior.sampled_models(2):
        assert torch.equal(sampled(x), sampled(x)), "dropout is off"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_another_precision_is_that_of_all_of_the_model():
    model, (x, _) = network_with_everything(), make_batch()
    posterior = Vprop(model.parameters(), num_data=100).posterior(model)
    pairs = zip(posterior.sampled_models(3, dtype=torch.float64), posterior.sampled_models(3), strict=True)
    for wide, own in pairs:
        output = wide(x.double())
        assert output.dtype == torch.float64
        torch.testing.assert_close(output, own(x), check_dtype=False, rtol=1e-4, atol=1e-5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, r"Invalid num_samples=0: must be an integer >= 1"),
        ({"seed": -1}, r"Invalid seed=-1: must be an integer in"),
        (
            {"dtype": torch.int64},
            r"Invalid dtype=torch\.int64: must be None or a floating-point torch\.dtype\. None is",
        ),
        ({"dtype": "float64"}, r"Invalid dtype='float64': must be None or a floating-point torch\.dtype"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_draw(arguments, message):
    model = make_model()
    posterior = Vprop(model.parameters(), num_data=100).posterior(model)
    with pytest.raises(ValueError, match=message):
        posterior.sampled_models(**arguments)

"""Monte Carlo dropout: what varies, what does not, and what is put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.harness import make_batch
from vprop.baselines import MCDropout


def make_model(dropout=nn.Dropout):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), dropout(0.5), nn.Linear(16, 3))
        model(3 * torch.randn(50, 4))  # statistics that are not those of the batches below
    return model


def test_predictions_vary_and_the_seed_repeats_them():
    model, (x, _) = make_model(), make_batch()
    predictor = MCDropout(model, likelihood="categorical")
    prediction = predictor.predict(x, num_samples=8, seed=3)
    assert prediction.samples.shape == (8, 12, 3)
    assert len({float(sample[0, 0]) for sample in prediction.samples}) == 8
    assert torch.equal(predictor.predict(x, num_samples=8, seed=3).samples, prediction.samples)
    assert not torch.equal(predictor.predict(x, num_samples=8, seed=4).samples, prediction.samples)
    torch.testing.assert_close(prediction.probs, prediction.samples.softmax(-1).mean(0))


def test_it_is_the_model_under_masks():
    """Between dropout and the output there is only a linear layer, so that the mean over masks is known.

    2000 masks, 36 outputs, 5 standard errors: a false alarm in 50,000 runs.
    """
    model, (x, _) = make_model()[3:], make_batch()
    x = x.repeat(1, 4)
    samples = MCDropout(model).predict(x, num_samples=2000).samples
    with torch.no_grad():
        expected = model.eval()(x)
    error = samples.std(0) / 2000**0.5
    assert ((samples.mean(0) - expected).abs() < 5 * error).all()


def test_the_callers_random_state_is_not_touched(monkeypatch):
    """On no device: torch.manual_seed would seed them all, also those that nobody asked about."""
    predictor, seeded = MCDropout(make_model()), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    predictor.predict(make_batch()[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d])
@pytest.mark.parametrize("training", [True, False])
def test_only_dropout_is_in_training_mode(dropout, training):
    """BatchNorm uses its running statistics and leaves them alone; every module's mode is put back."""
    model, (x, _) = make_model(dropout), make_batch()
    model.train(training)
    model[1].eval()  # a mode of its own
    modes, seen = [module.training for module in model.modules()], {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, *_, name=name: seen.update({name: module.training}))
    before = copy.deepcopy(model.state_dict())
    MCDropout(model).predict(x, num_samples=2)
    assert seen == {"0": False, "1": False, "2": False, "3": True, "4": False}
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_everything_is_put_back_after_an_error():
    model = make_model().train()
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        MCDropout(model).predict(torch.ones(2, 5))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_predictions_carry_no_graph():
    assert not MCDropout(make_model()).predict(make_batch()[0]).samples.requires_grad


def test_regression_and_several_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 1), nn.Dropout(0.2)

        def forward(self, left, right):
            return self.linear(self.dropout(left - right))

    predictor, (x, _) = MCDropout(Pair(), likelihood="gaussian", noise_variance=0.3), make_batch()
    as_tuple, as_dict = predictor.predict((x, 2 * x)), predictor.predict({"left": x, "right": 2 * x})
    assert torch.equal(as_tuple.samples, as_dict.samples)
    torch.testing.assert_close(as_tuple.variance, as_tuple.samples.var(0) + 0.3)


def test_errors():
    with pytest.raises(ValueError, match=r"MCDropout needs a model with dropout layers \(nn\.Dropout"):
        MCDropout(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    with pytest.raises(ValueError, match="Invalid likelihood='poisson'"):
        MCDropout(make_model(), likelihood="poisson").predict(make_batch()[0])
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match=rf"Invalid num_samples={bad}: must be an integer >= 1"):
            MCDropout(make_model()).predict(make_batch()[0], num_samples=bad)


def test_a_transformers_layers_drop_too():
    """In evaluation mode torch runs them in one piece, without the dropout layers inside."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
        x = torch.randn(3, 5, 8)
    samples = MCDropout(layer).predict(x, num_samples=4).samples
    assert len({float(sample[0, 0, 0]) for sample in samples}) == 4

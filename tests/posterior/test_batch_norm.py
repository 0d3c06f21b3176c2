"""Statistics of BatchNorm under each draw of the weights, beside writing the weights into a copy of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vprop import Mixture, Objective, Vario, calibration
from vprop.posterior import set_batch_norm


class TwoUses(nn.Module):
    """Dropout, a norm of each kind that counts, one that is used twice and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm, self.unused = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.images = nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = self.images(x.view(-1, 2, 1, 3)).flatten(1)
        return self.last(self.dropout(self.norm(2 * x + 1)))


def rows(count=24, seed=1):
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(make=TwoUses, seed=0, likelihood="categorical"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        optimizer = Vario(model.parameters(), num_data=50, batch_size=24)
        labels = torch.randint(0, 3, (24,))
        for _ in range(3):
            optimizer.step(Objective(model, nn.functional.cross_entropy, rows(), labels))
    return model, optimizer.posterior(model, likelihood=likelihood)


@torch.no_grad()
def expected(posterior, weights, batches, x, norms=(nn.BatchNorm1d, nn.BatchNorm2d)):
    """What the outputs should be, from nothing but torch: weights in a copy, means of the batches' statistics."""
    model = copy.deepcopy(posterior.model).eval()
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])
    for name, layer in model.named_modules():
        if isinstance(layer, norms) and name != "unused":
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
    for batch in batches:
        model(batch)
    return model.eval()(x)


def drawn(posterior, count, seed=0):
    return [posterior._draw(seed, sample) for sample in range(count)]


def test_each_draw_has_the_statistics_of_its_own_weights():
    model, posterior = trained()
    x, data = rows(7, seed=2), rows(60, seed=3)
    batches = data.split(20)
    reference = torch.stack([expected(posterior, weights, batches, x) for weights in drawn(posterior, 3, seed=5)])
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    buffers = {name: buffer.clone() for name, buffer in posterior.buffers.items()}

    found = posterior.predict(x, 3, seed=5, batch_norm=iter(batches)).samples
    assert torch.equal(found, reference)
    assert not torch.allclose(found, posterior.predict(x, 3, seed=5).samples, rtol=0.1)
    loader = DataLoader(TensorDataset(data, torch.arange(60)), batch_size=20)
    assert torch.equal(posterior.predict(x, 3, seed=5, batch_norm=loader).samples, reference)
    with torch.no_grad():
        outputs = [sampled(x) for sampled in posterior.sampled_models(3, seed=5, batch_norm=loader)]
    assert torch.equal(torch.stack(outputs), reference)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, buffers[name]) for name, value in posterior.buffers.items())
    assert [module.training for module in model.modules()] == modes
    assert {layer.momentum for layer in (model.norm, model.unused, model.images[0])} == {0.1}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_all_batches_of_a_prediction_meet_the_same_statistics_which_are_estimated_once():
    _, posterior = trained()
    x, data, reads = rows(9, seed=2), rows(20, seed=3), []

    class Loader:
        def __iter__(self):
            reads.append(1)
            return iter([data])

    whole = posterior.predict(x, 4, batch_norm=data.numpy()).samples
    cut = posterior.predict(x, 4, batch_size=2, batch_norm=Loader()).samples
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
    assert len(reads) == 4


def test_a_mixture_estimates_them_in_the_model_of_each_member():
    members = [trained(seed=seed)[1] for seed in (0, 1)]
    x, data = rows(5, seed=2), rows(20, seed=3)
    mixture = Mixture(members)
    parts = [
        [expected(member, member._draw(0, sample), [data], x) for sample in samples]
        for member, samples in mixture._shared_out(4, 0)
    ]
    assert [len(part) for part in parts] == [2, 2]
    assert torch.equal(mixture.predict(x, 4, batch_norm=iter([data])).samples, torch.stack([*parts[0], *parts[1]]))


def test_at_the_mean_they_are_written_into_the_model():
    model, posterior = trained()
    x, batches = rows(5, seed=2), rows(60, seed=3).split(20)
    reference = expected(posterior, posterior.mean, batches, x)
    model.unused.running_mean.fill_(3.0)
    set_batch_norm(model, iter(batches))
    assert torch.equal(model.eval()(x), reference)
    assert bool((model.unused.running_mean == 3).all()), "its inputs are not known"
    assert not any(module._forward_pre_hooks for module in model.modules())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"batch_norm=: the model .* cannot be called with .* of shape \(20, 2\)"):
        set_batch_norm(model, iter([batches[0], batches[1][:, :2]]))
    with pytest.raises(TypeError, match=r"set_batch_norm\(model, data\): got Tensor"):
        set_batch_norm(batches[0], batches[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_precision_is_also_that_of_the_statistics():
    model, posterior = trained()
    x, data = rows(5, seed=2), rows(20, seed=3)
    reference = posterior.predict(x, 2, batch_norm=data).samples
    for number, sampled in enumerate(posterior.sampled_models(2, dtype=torch.float32, batch_norm=data)):
        output = sampled(x.float())
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), reference[number], rtol=1e-3, atol=1e-3)
    assert model.norm.running_mean.dtype == torch.float64


def test_a_synchronized_layer_waits_for_no_other_process(monkeypatch):
    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3))

    _, posterior = trained(make)
    x, data = rows(5, seed=2), rows(20, seed=3)
    reference = [expected(posterior, w, [data], x, nn.SyncBatchNorm) for w in drawn(posterior, 2)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # it would refuse a CPU
    assert torch.equal(posterior.predict(x, 2, batch_norm=data).samples, torch.stack(reference))


def test_calibration_sees_the_predictions_that_will_be_made():
    _, posterior = trained()
    x, data = rows(40, seed=2), rows(20, seed=3)
    probs = posterior.predict(x, 3, batch_norm=data).probs
    y = (probs.argmax(-1) + (torch.arange(40) % 4 == 0)) % 3  # one of four is wrong
    sets = calibration.conformal_sets(posterior, x, y, num_samples=3, batch_norm=iter([data]))
    fitted = calibration.ConformalSets.fit(probs, y)
    assert sets.threshold == pytest.approx(fitted.threshold, abs=1e-12)
    assert torch.equal(sets.predict(x), fitted.of(probs))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    fit = calibration.fit_temperature(posterior, loader, num_samples=3, batch_norm=iter([data]))
    assert fit.before == pytest.approx(float(nn.functional.nll_loss(probs.log(), y)), rel=1e-9)
    variance = calibration.fit_variance_scale(posterior, x, y, num_samples=3, batch_norm=iter([data]))
    assert variance.before == pytest.approx(fit.before, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_norm": rows(), "method": "linearized"}, "method='linearized' draws no weights"),
        ({"batch_norm": rows(), "vmap": True}, "vmap=True runs all draws at once"),
        ({"batch_norm": iter([])}, "got no batches"),
        ({"batch_norm": torch.zeros(0, 4)}, "got no batches"),
        ({"batch_norm": rows(1)}, "torch says: Expected more than 1 value per channel"),
        ({"batch_norm": "images"}, r"batch_norm=: got str \('images'\), must be a tensor"),
        ({"batch_norm": iter([(1, 2, 3)])}, "batch_norm=: got a batch of 3 things"),
    ],
)
def test_what_cannot_be_is_refused_in_words(arguments, message):
    _, posterior = trained()
    with pytest.raises((ValueError, TypeError), match=message):
        posterior.predict(rows(), 2, **arguments)


def test_models_without_running_statistics_and_last_layers_are_refused():
    _, posterior = trained(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)))
    for ask in (posterior.predict, lambda x, **how: posterior.sampled_models(**how)):
        with pytest.raises(ValueError, match="Sequential has no BatchNorm layer with running statistics"):
            ask(rows(), batch_norm=rows())
    with pytest.raises(ValueError, match="the last layer's posterior draws no weights of the layers before"):
        trained()[1].last_layer().predict(rows(), batch_norm=rows())

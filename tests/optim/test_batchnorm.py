"""BatchNorm: training forwards update its running statistics under the sampled weights, evaluation never does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vprop import Vprop


def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        x = torch.randn(256, 6)
    return model, x, (x[:, 0] + x[:, 1] > 0).long()


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_running_statistics_describe_what_predictions_see(mc_samples):
    """After training they match the batch statistics averaged over fresh samples of the weights.

    The averages over momentum 0.1 and over 200 samples are both noisy: the mean may be off by 0.3 of the layer's
    standard deviation, the variance by a factor of 1.5.
    """
    model, x, y = make()
    optimizer = Vprop(model.parameters(), lr=0.1, num_data=256, mc_samples=mc_samples)
    for _ in range(150):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert int(model[1].num_batches_tracked) == 150 * mc_samples
    posterior = optimizer.posterior(model)
    outputs = [x @ w["0.weight"].T + w["0.bias"] for w in (posterior.sample(seed=seed) for seed in range(200))]
    mean = torch.stack([out.mean(0) for out in outputs]).mean(0)
    variance = torch.stack([out.var(0) for out in outputs]).mean(0)
    assert ((model[1].running_mean - mean).abs() < 0.3 * variance.sqrt()).all()
    assert ((model[1].running_var / variance).log().abs() < torch.log(torch.tensor(1.5))).all()
    with torch.no_grad():
        accuracy = (model.eval()(x).argmax(1) == y).float().mean()
    assert accuracy > 0.9
    assert (posterior.predict(x, likelihood="categorical").probs.argmax(1) == y).float().mean() > 0.9


def test_prediction_and_elbo_leave_the_statistics_and_the_modes_alone():
    model, x, y = make()
    model.train()
    model[1].eval()
    optimizer = Vprop(model.parameters(), num_data=256)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    posterior = optimizer.posterior(model)
    posterior.predict(x)
    posterior.elbo([(x, y)], loss_fn=F.cross_entropy)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert [module.training for module in model] == [True, False, True, True]


def test_a_snapshot_keeps_its_statistics():
    model, x, _ = make()
    optimizer = Vprop(model.parameters(), num_data=256)
    posterior = optimizer.posterior(model)
    before = posterior.predict(x).samples
    model.train()(x + 5)
    assert torch.equal(posterior.predict(x).samples, before)

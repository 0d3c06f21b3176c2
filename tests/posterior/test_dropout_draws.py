"""Draws of the weights with dropout masks: whose masks they are, what they do, and what they leave alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.posterior.test_batch_norm import rows, trained
from vprop import Mixture, Vprop, calibration
from vprop.posterior.predictive.masks import Masks


def network(p=0.5):
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 3))


class Seeded(Masks):
    """Masks from a generator that is seeded as torch's own is."""

    def _generator(self, device):
        return self._generators.setdefault(device, torch.Generator(device).manual_seed(self._numbers[0]))


# -- the masks are torch's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.3), (5, 7)),
        (nn.Dropout(0.3, inplace=True), (5, 7)),
        (nn.Dropout(1.0), (5, 7)),
        (nn.Dropout1d(0.3), (6, 4)),
        (nn.Dropout1d(0.3), (5, 6, 4)),
        (nn.Dropout2d(0.3), (5, 6, 2, 3)),
        (nn.Dropout3d(0.3), (6, 2, 3, 2)),
        (nn.Dropout3d(0.3), (5, 6, 2, 3, 2)),
        (nn.AlphaDropout(0.3), (5, 7)),
        (nn.AlphaDropout(0.3, inplace=True), (5, 7)),
        (nn.FeatureAlphaDropout(0.3), (5, 6, 4)),
    ],
)
def test_a_layer_does_what_torch_does_with_the_same_random_numbers(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = x.clone()
    with Seeded(11):
        found = [layer(given.clone()), layer(given.clone())]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        assert all(torch.equal(one, layer(x.clone())) for one in found)
    with Masks(11):
        assert torch.equal(layer.eval()(x), x)
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, -1.0)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True, "scale": 0.7},
        {"attn_mask": torch.arange(5)[:, None] > torch.arange(5)},  # the first may look at none
        {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5), "enable_gqa": True},
    ],
)
def test_attention_does_what_torch_does(how):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64, generator=generator)
    if "enable_gqa" in how:
        key, value = key[:, :2], value[:, :2]
    with Seeded(11):
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, **how)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        expected = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, **how)
    torch.testing.assert_close(found, expected)


# -- draws -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_prediction_is_the_model_under_draws_and_masks():
    """The same seed gives the same; masks are those of the draw; weights are those without dropout."""
    model, posterior = trained(network)
    x, state = rows(9, seed=2), torch.get_rng_state()
    found = posterior.predict(x, 4, seed=5, dropout=True).samples
    assert torch.equal(torch.stack([m(x) for m in posterior.sampled_models(4, seed=5, dropout=True)]), found)
    for sample, output in enumerate(found):
        weights = posterior._draw(5, sample)
        hidden = (x @ weights["0.weight"].T + weights["0.bias"]).relu()
        mask = Masks(5, sample, 0).like(hidden, hidden.shape, 0.5)
        expected = (2 * mask * hidden) @ weights["3.weight"].T + weights["3.bias"]
        torch.testing.assert_close(output, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


@torch.no_grad()
def test_every_batch_and_every_call_has_masks_of_its_own():
    _, posterior = trained(network)
    x = rows(1, seed=2).expand(8, 4)
    parts = posterior.predict(x, 3, dropout=True, batch_size=2).samples
    assert len(parts[0].unique(dim=0)) == 8
    for sampled, expected in zip(posterior.sampled_models(3, dropout=True), parts, strict=True):
        assert torch.equal(torch.cat([sampled(part) for part in x.split(2)]), expected)


@torch.no_grad()
def test_the_mean_over_masks_and_weights_is_known_where_the_model_is_linear():
    """E[f] = f at the mean, and Var[f] = Σᵢ xᵢ²((σᵢ² + μᵢ²)/(1−p) − μᵢ²), as masks do not depend on weights.

    4000 draws: 5 standard errors, which for the variance of nearly normal outputs is √(2/4000) of it.
    """
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(12, 1, bias=False)).double()
    model[1].weight.copy_(torch.linspace(-1, 2, 12))
    posterior = Vprop(model.parameters(), num_data=20).posterior(model)
    x = rows(6, seed=2).repeat(1, 3)
    samples = posterior.predict(x, 4000, dropout=True).samples[..., 0]
    mean, variance = posterior.mean["1.weight"][0], posterior.variance["1.weight"][0]
    expected = x.square() @ ((variance + mean.square()) / 0.75 - mean.square())
    assert ((samples.mean(0) - x @ mean).abs() < 5 * (expected / 4000).sqrt()).all()
    torch.testing.assert_close(samples.var(0), expected, rtol=5 * (2 / 4000) ** 0.5, atol=0)


def test_threads_get_what_one_alone_gets():
    model, posterior = trained(network)
    x, found = rows(50, seed=2), {}
    alone = [posterior.predict(x, 20, seed=seed, dropout=True).samples for seed in range(4)]
    plain = posterior.predict(x, 20).samples

    def ask(number):
        if number == 4:  # without masks, meanwhile
            found[number] = [posterior.predict(x, 20).samples for _ in range(5)]
        else:
            found[number] = [posterior.predict(x, 20, seed=number, dropout=True).samples for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate([*alone, plain]):
        assert all(torch.equal(one, expected) for one in found[number])
    assert all(module.training for module in model.modules())


@torch.no_grad()
def test_members_of_a_mixture_have_masks_of_their_own():
    _, posterior = trained(network)
    x = rows(5, seed=2)
    mixture = Mixture([posterior, posterior])
    both = mixture.predict(x, 4, dropout=True).samples
    assert torch.equal(both, posterior.predict(x, 4, dropout=True).samples), "draw i has masks i, whoever makes it"


@torch.no_grad()
def test_statistics_of_batch_norm_are_those_under_masks():
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))

    model, posterior = trained(make)
    x, batches = rows(5, seed=2), rows(40, seed=3).split(20)
    found = posterior.predict(x, 2, dropout=True, batch_norm=iter(batches)).samples
    drawn = posterior.sampled_models(2, dropout=True, batch_norm=iter(batches))
    for sample, (sampled, output) in enumerate(zip(drawn, found, strict=True)):
        assert torch.equal(sampled(x), output)
        own = copy.deepcopy(model).eval()
        own.load_state_dict(posterior._draw(0, sample), strict=False)
        masks = Masks(0, sample, 1)
        first = [own[0](batch) for batch in batches]
        hidden = [2 * masks.like(h, h.shape, 0.5) * h for h in first]
        own[2].running_mean = torch.stack([h.mean(0) for h in hidden]).mean(0)
        own[2].running_var = torch.stack([h.var(0) for h in hidden]).mean(0)
        own[1] = nn.Identity()
        h = own[0](x)
        torch.testing.assert_close(output, own[2:](2 * Masks(0, sample, 0).like(h, h.shape, 0.5) * h))


@torch.no_grad()
def test_a_transformer_of_torch_drops_as_well():
    """Its fast path for evaluation, which drops nothing, is not taken. Attention's own dropout stays off."""

    def make():
        return nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 4, 0.5, batch_first=True),
            nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    _, posterior = trained(make)
    x, state = rows(1, seed=2).expand(20, 4), torch.get_rng_state()
    assert len(posterior.predict(x, 1, dropout=True).samples[0].unique(dim=0)) > 5
    assert torch.equal(torch.get_rng_state(), state)


def test_calibration_sees_the_predictions_that_will_be_made():
    _, posterior = trained(network)
    x = rows(40, seed=2)
    batches = x.split(16)
    probs = posterior.predict(iter(batches), 3, dropout=True).probs
    y = (probs.argmax(-1) + (torch.arange(40) % 4 == 0)) % 3  # one of four is wrong
    loader = list(zip(batches, y.split(16), strict=True))
    fit = calibration.fit_temperature(posterior, loader, num_samples=3, dropout=True)
    assert fit.before == pytest.approx(float(F.nll_loss(probs.log(), y)), rel=1e-9)
    variance = calibration.fit_variance_scale(posterior, loader, num_samples=3, dropout=True)
    assert variance.before == pytest.approx(fit.before, rel=1e-9)
    sets = calibration.conformal_sets(posterior, loader, num_samples=3, dropout=True)
    fitted = calibration.ConformalSets.fit(probs, y)
    assert sets.threshold == pytest.approx(fitted.threshold, abs=1e-12)
    assert torch.equal(sets.predict(x), fitted.of(posterior.predict(x, 3, dropout=True).probs))


# -- refused ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_in_words():
    _, posterior = trained(network)
    for arguments, message in (
        ({"method": "linearized"}, "dropout=True: method='linearized' draws no weights"),
        ({"vmap": True}, "dropout=True: vmap=True runs all draws at once"),
        ({"dropout": "yes"}, "Invalid dropout='yes': must be True or False"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            posterior.predict(rows(), 2, **({"dropout": True} | arguments))
    with pytest.raises(RuntimeError, match=r"the model .* cannot be called with .* of shape \(24, 2\)"):
        posterior.predict(rows()[:, :2], 2, dropout=True)
    with pytest.raises(ValueError, match="dropout=True: the last layer's posterior runs the layers before once"):
        posterior.last_layer().predict(rows(), dropout=True)
    _, plain = trained(lambda: network(0.0))
    for ask in (plain.predict, lambda x, **how: plain.sampled_models(**how)):
        with pytest.raises(
            ValueError, match=r"Sequential has no dropout layer \(nn.Dropout, nn.Dropout1d, …\) with p > 0"
        ):
            ask(rows(), dropout=True)

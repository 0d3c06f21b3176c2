"""The networks of the deep comparison, and what draws weights for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import vprop
from vprop.lab.deep import draws
from vprop.lab.deep.gpt import CharacterGPT, adapt, next_character_loss
from vprop.lab.deep.laplace import features, linearized
from vprop.lab.deep.networks import FilterResponseNorm, ThresholdedLinear, resnet20
from vprop.lab.deep.swag import SWAG
from vprop.lab.deep.training import cosine_then_constant
from vprop.posterior.predictive.batch_norm import set_batch_norm
from vprop.posterior.predictive.dropout import dropout_layers


def images(count=3, size=8):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_filter_response_norm_is_its_formula():
    norm = FilterResponseNorm(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1))
        norm.bias.copy_(torch.tensor([0.0, -1.0, 1.0]).view(1, 3, 1, 1))
    x = images().double()
    nu = x.square().flatten(2).mean(-1)[:, :, None, None]
    expected = norm.weight.double() * x / (nu + 1e-6).sqrt() + norm.bias.double()
    torch.testing.assert_close(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_the_threshold_is_learned():
    layer = ThresholdedLinear(3)
    with torch.no_grad():
        layer.threshold.copy_(torch.tensor([-1.0, 0.0, 1.0]).view(1, 3, 1, 1))
    y = layer(images())
    assert torch.equal(y.amin((0, 2, 3)), torch.tensor([-1.0, 0.0, 1.0]))


def test_with_filter_response_norm_an_image_does_not_see_the_others():
    model = resnet20(3, norm="frn", width=4, blocks=1)
    assert not list(model.buffers())
    x = images()
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize("norm", ["batch", "frn"])
def test_the_order_in_memory_changes_nothing(norm):
    models = [resnet20(3, norm=norm, width=4, blocks=1, channels_last=last) for last in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(models[0](images()), models[1](images()), rtol=1e-4, atol=1e-5)


def gpt(**options):
    torch.manual_seed(0)
    return CharacterGPT(11, 12, layers=2, width=16, heads=2, **options)


def test_the_gpt_is_of_the_usual_size():
    with torch.device("meta"):
        weights = sum(p.numel() for p in CharacterGPT(65, 256).parameters())
    assert weights == 6 * 12 * 384**2 + (65 + 65 + 256) * 384 + 13 * 384


def test_no_character_sees_those_behind_it():
    model, x = gpt(), torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[:, 7:] = (x[:, 7:] + 1) % 11
    before, after = model(x), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_dropout_is_off_in_evaluation():
    model, x = gpt(dropout=0.5), torch.zeros(1, 12, dtype=torch.long)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    model.blocks[0].attention.of_weights.train()
    assert not torch.equal(model(x), model(x))


@torch.no_grad()
def test_masks_of_draws_are_those_of_mc_dropout():
    """Each layer by itself, attention's weights among them: the outputs vary as much, and torch's state is its own.

    Of 400 masks each; 30 % is 6 of the standard errors that a variance of normal numbers would have.
    """
    model = gpt(dropout=0.5)
    posterior = vprop.Vprop(model.parameters(), num_data=10**12, prior_precision=1e12).posterior(model)
    x = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(1)).expand(400, 12)
    shares = {layer: layer.p for layer in dropout_layers(model)}
    assert len(shares) == 1 + 3 * len(model.blocks)
    for active in shares:
        for layer in shares:
            layer.p = 0.5 if layer is active else 0.0
        expected = next(draws.dropout(model, 1))(x).var(0)
        state = torch.get_rng_state()
        found = posterior.predict(x, 1, dropout=True).samples[0].var(0)
        assert torch.equal(torch.get_rng_state(), state)
        assert float(expected.sum()) > 0
        assert float(found.sum() / expected.sum()) == pytest.approx(1, abs=0.3)


def test_adapters_start_at_the_network_and_are_all_that_is_trained():
    model, x = gpt(), torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(1))
    before = model(x)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapt(model, 3)
    torch.testing.assert_close(model(x), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2
    assert all(name.split(".")[-1] in ("lora_a", "lora_b") for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    for _ in range(2):  # B, which is zero, keeps A where it is in the first
        optimizer.zero_grad()
        next_character_loss(model(x), x).backward()
        optimizer.step()
    assert all(bool(p.grad.abs().sum() > 0) for p in trained.values())
    after = {name.replace(".base", ""): p for name, p in model.named_parameters()}
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    wide = model.blocks[0].wide
    h = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    expected = h @ (wide.base.weight + 2 * wide.lora_b @ wide.lora_a).T
    torch.testing.assert_close(wide(h), expected, rtol=1e-4, atol=1e-5)


def test_swag_has_the_covariance_of_its_paper():
    """Each element of the sample covariance within 5 of its standard errors: false alarm in 1 of 300,000 runs."""
    model = nn.Linear(2, 1)
    visited = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    swag = SWAG(model.double(), rank=3)
    for row in visited:
        nn.utils.vector_to_parameters(row.clone(), model.parameters())
        swag.collect()
    torch.testing.assert_close(swag.mean, visited.mean(0))
    torch.testing.assert_close(swag.variance, visited.var(0, correction=0))
    columns = torch.stack([visited[i] - visited[: i + 1].mean(0) for i in (3, 4, 5)], dim=1)
    expected = visited.var(0, correction=0).diag() / 2 + columns @ columns.T / (2 * (3 - 1))
    generator, count = torch.Generator().manual_seed(0), 4000
    draws = []
    for _ in range(count):
        swag.write_sample(generator)
        draws.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    found = torch.stack(draws).T.cov()
    scale = expected.diag()
    error = ((scale[:, None] * scale + expected.square()) / count).sqrt()
    assert bool(((found - expected).abs() < 5 * error).all())
    swag.write_mean()
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), visited.mean(0))


def test_swag_needs_two_weights():
    swag = SWAG(nn.Linear(2, 1))
    swag.collect()
    with pytest.raises(ValueError, match="collected 1 weights, needs at least 2"):
        swag.write_mean()


def test_statistics_of_batch_norm_are_means_over_the_batches():
    model = nn.Sequential(nn.BatchNorm2d(3))
    batches = [images(4) * scale + scale for scale in (1.0, 2.0, 3.0)]
    set_batch_norm(model, iter(batches))
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    variances = torch.stack([batch.var((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(model[0].running_mean, means)
    torch.testing.assert_close(model[0].running_var, variances)
    assert model.training
    assert model[0].momentum == 0.1


def test_a_schedule_that_stays():
    rates = cosine_then_constant(0.1, 0.02, 200)
    assert len(rates) == 200
    assert float(rates.max()) == pytest.approx(0.1)
    assert int(rates.argmax()) == 9
    assert torch.all(rates[149:] == 0.02)
    assert torch.all(rates[10:150].diff() < 0)


@torch.no_grad()
def test_a_linearized_network_is_the_first_order_expansion():
    torch.manual_seed(0)
    model = resnet20(3, width=4, blocks=1).double().eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    deviation = torch.randn(sum(w.numel() for w in weights.values()), dtype=torch.float64)
    x, step = images().double(), 1e-6

    def moved(by):
        pieces = (by * deviation).split([w.numel() for w in weights.values()])
        at = {name: w + piece.view_as(w) for (name, w), piece in zip(weights.items(), pieces, strict=True)}
        return functional_call(model, at, (x,))

    slope = (moved(step) - moved(-step)) / (2 * step)
    torch.testing.assert_close(linearized(model, deviation)(x), model(x) + slope, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_in_its_last_layer_a_network_is_linear():
    torch.manual_seed(0)
    model = resnet20(3, width=4, blocks=1).eval()
    last, seen = model[-1], features(model[:-1], images(), rows=2)
    deviation = torch.randn(last.weight.numel() + last.bias.numel())
    found = linearized(last, deviation)(seen)
    last.weight += deviation[: last.weight.numel()].view_as(last.weight)
    last.bias += deviation[last.weight.numel() :]
    torch.testing.assert_close(found, model(images()), rtol=1e-4, atol=1e-5)

"""Pruning by |μ|/σ: which weights go, and that what is left is the Gaussian's own conditional."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import vprop
from vprop.posterior import DiagonalPosterior, FullPosterior, GaussianPrior

MEAN = torch.tensor([[1.0, -0.1, 3.0], [0.5, 0.2, -2.0]])
STD = torch.tensor([[1.0, 0.01, 3.0], [0.1, 1.0, 0.5]])  # |μ|/σ = 1, 10, 1 | 5, 0.2, 4


def prior(names):
    return GaussianPrior({n: torch.tensor(0.0) for n in names}, {n: torch.tensor(2.0) for n in names})


@pytest.fixture
def diagonal():
    model = nn.Linear(3, 2)
    mean = {"weight": MEAN.clone(), "bias": torch.tensor([0.01, 0.02])}
    variance = {"weight": STD.square(), "bias": torch.tensor([1.0, 1.0])}
    return DiagonalPosterior(model, mean, variance, prior(mean), ess=10.0, likelihood="categorical")


@pytest.fixture
def full():
    model = nn.Linear(3, 2, bias=False).double()
    root = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    precision = root @ root.T + torch.eye(6, dtype=torch.float64)
    return FullPosterior(model, {"weight": MEAN.double()}, precision, prior(["weight"]), ess=10.0)


def test_the_smallest_go(diagonal):
    pruned = diagonal.prune(1 / 3)
    assert pruned.masks["weight"].tolist() == [[False, True, True], [True, False, True]]  # of two ones the first
    assert pruned.masks["bias"].all()  # biases stay
    assert pruned.mean["weight"].tolist() == torch.where(pruned.masks["weight"], MEAN, 0).tolist()
    assert pruned.sparsity == pytest.approx(1 / 3)
    assert diagonal.prune(threshold=4.5).masks["weight"].tolist() == [[False, True, False], [True, False, False]]
    assert diagonal.prune(0.5, by="magnitude").masks["weight"].tolist() == [[True, False, True], [False, False, True]]
    bias = diagonal.prune(0.5, parameters=["bias"])
    assert bias.masks["weight"].all()
    assert bias.masks["bias"].tolist() == [False, True]
    assert diagonal.prune(0.0).sparsity == 0.0


def test_of_each_parameter(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    mean = {"0.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "1.weight": torch.tensor([[10.0, 20.0], [30.0, 40.0]])}
    posterior = DiagonalPosterior(model, mean, {n: torch.ones(2, 2) for n in mean}, prior(mean), ess=1.0)
    together, each = posterior.prune(0.5), posterior.prune(0.5, scope="parameter")
    assert [int(m.sum()) for m in together.masks.values()] == [0, 4]
    assert [int(m.sum()) for m in each.masks.values()] == [2, 2]
    together.save(tmp_path / "pruned.safetensors")
    loaded = vprop.load_posterior(tmp_path / "pruned.safetensors", model)
    assert together.sparsity == each.sparsity == loaded.sparsity == 0.5  # of all, though one parameter lost nothing


def test_a_diagonal_posterior_keeps_the_others_as_they_are(diagonal):
    pruned = diagonal.prune(0.5)
    kept = pruned.masks["weight"]
    assert torch.equal(pruned.variance["weight"], torch.where(kept, STD.square(), 0))
    draws = torch.stack([pruned.sample(seed)["weight"] for seed in range(2000)])
    assert bool((draws[:, ~kept] == 0).all())
    # Five standard errors of a mean of 2000 draws: one false alarm in about 10⁶.
    assert bool(((draws.mean(0) - pruned.mean["weight"])[kept].abs() < 5 * STD[kept] / math.sqrt(2000)).all())
    weights = pruned.sample(0)
    normal = torch.distributions.Normal(MEAN[kept], STD[kept])
    expected = normal.log_prob(weights["weight"][kept]).sum()
    expected += torch.distributions.Normal(torch.tensor([0.01, 0.02]), 1.0).log_prob(weights["bias"]).sum()
    assert float(pruned.log_prob(weights)) == pytest.approx(float(expected), rel=1e-5)
    assert float(pruned.log_prob({**weights, "weight": MEAN})) == -math.inf
    assert float(pruned.entropy()) == pytest.approx(float(normal.entropy().sum()) + math.log(2 * math.pi * math.e))
    other = torch.distributions.Normal(0.0, 2**-0.5)
    own = torch.distributions.kl_divergence(normal, other).sum()
    bias = torch.distributions.kl_divergence(torch.distributions.Normal(torch.tensor([0.01, 0.02]), 1.0), other).sum()
    assert float(pruned.kl()) == pytest.approx(float(own + bias), rel=1e-5)


def test_a_full_posterior_is_conditioned(full):
    pruned = full.prune(0.5)
    kept = pruned.masks["weight"].flatten()
    scores = MEAN.double().flatten().abs() / full.covariance.diagonal().sqrt()
    assert sorted(scores.argsort()[:3].tolist()) == (~kept).nonzero().flatten().tolist()
    # The textbook's conditional, from the covariance: μₖ + ΣₖₚΣₚₚ⁻¹(0 − μₚ), Σₖₖ − ΣₖₚΣₚₚ⁻¹Σₚₖ.
    mean, covariance = MEAN.double().flatten(), full.covariance
    gain = covariance[kept][:, ~kept] @ torch.linalg.inv(covariance[~kept][:, ~kept])
    expected = mean[kept] - gain @ mean[~kept]
    torch.testing.assert_close(pruned.mean["weight"].flatten()[kept], expected)
    conditional = covariance[kept][:, kept] - gain @ covariance[~kept][:, kept]
    torch.testing.assert_close(pruned.variance["weight"].flatten()[kept], conditional.diagonal())
    torch.testing.assert_close(
        pruned.entropy(), torch.distributions.MultivariateNormal(expected, conditional).entropy()
    )
    # No weights with these zeros have a higher density under the posterior before pruning.
    best = {"weight": pruned.mean["weight"]}
    shifted = {"weight": torch.where(pruned.masks["weight"], best["weight"] + 0.01, 0.0)}
    assert float(full.log_prob(best)) > float(full.log_prob(shifted))
    rows = torch.eye(6, dtype=torch.float64)
    whole = torch.zeros(6, 6, dtype=torch.float64)
    whole[kept[:, None] & kept] = conditional.flatten()
    torch.testing.assert_close(pruned._covariance_times(rows), whole)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_saved_and_loaded(kind, request, tmp_path):
    posterior = request.getfixturevalue(kind)
    pruned = posterior.prune(0.5)
    pruned.save(tmp_path / "pruned.safetensors")
    loaded = vprop.load_posterior(tmp_path / "pruned.safetensors", posterior.model)
    assert isinstance(loaded, vprop.posterior.PrunedPosterior)
    assert torch.equal(loaded.sample(3)["weight"], pruned.sample(3)["weight"])
    assert float(loaded.kl()) == float(pruned.kl())
    assert (loaded.likelihood, loaded.ess, loaded.sparsity) == (pruned.likelihood, 10.0, 0.5)


def test_it_predicts_and_is_asked_like_any_posterior(diagonal):
    pruned = diagonal.prune(0.5)
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
    assert pruned.predict(x, 8).probs.shape == (4, 2)
    assert len(pruned.sensitivity((x, y))) == 4
    assert math.isfinite(float(pruned.elbo(vprop.Objective(diagonal.model, nn.CrossEntropyLoss(), x, y))))
    assert repr(pruned) == "PrunedPosterior(50.0% of 6 weights are zero, ess=10.0)"


def test_a_mixture_adds_no_densities_over_different_weights(diagonal):
    pruned, alike = diagonal.prune(0.5), diagonal.prune(0.5)
    mixture = vprop.Mixture([pruned, diagonal])
    draw = pruned.sample(0)
    asked = {"log_prob": lambda: mixture.log_prob(draw), "entropy": mixture.entropy, "kl": mixture.kl}
    for question, ask in asked.items():
        with pytest.raises(ValueError, match=rf"{question}\(\): members 0 and 1 have other weights at zero"):
            ask()
    assert mixture.predict(torch.ones(4, 3), 8).probs.shape == (4, 2)
    assert float(vprop.Mixture([pruned, alike]).log_prob(draw)) == pytest.approx(float(pruned.log_prob(draw)))


def test_the_model_is_masked_by_torch(diagonal):
    pruned = diagonal.prune(0.5)
    with pytest.raises(ValueError, match="is on the meta device, which holds no numbers"):
        pruned.mask_model(nn.Linear(3, 2, device="meta"))
    model = pruned.mask_model(nn.Linear(3, 2))
    torch.testing.assert_close(model.weight, pruned.mean["weight"])
    with torch.no_grad():
        model.weight_orig += 1  # a step of training
    model(torch.ones(1, 3))
    assert bool((model.weight[~pruned.masks["weight"]] == 0).all())
    own = pruned.mask_model()  # a copy: the posterior's model is as it was
    assert own is not diagonal.model
    assert [name for name, _ in diagonal.model.named_parameters()] == ["weight", "bias"]
    nn.utils.prune.remove(model, "weight")
    assert [name for name, _ in model.named_parameters()] == ["bias", "weight"]


def test_a_masked_model_has_all_of_the_snapshot():
    """Predictions at the mean are those of the snapshot, whatever the model has become since."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].running_mean.fill_(0.5)
    posterior = vprop.Vprop(model.parameters(), num_data=10).posterior(model)
    pruned, x = posterior.last_layer("2").prune(0.5), torch.ones(2, 3)
    with torch.no_grad():
        body = model.eval()[:2](x)
        model[0].weight.zero_()  # training went on
        model[1].running_mean.fill_(7.0)
    expected = body @ pruned.mean["2.weight"].T + pruned.mean["2.bias"]
    for masked in (pruned.mask_model(), pruned.mask_model(copy.deepcopy(model))):
        torch.testing.assert_close(masked.eval()(x), expected)
        assert int(masked[1].num_batches_tracked) == 0


def test_a_calibrated_noise_is_saved(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=generator), 0.1 * torch.randn(40, 1, generator=generator)
    model = nn.Linear(3, 1)
    optimizer = vprop.Vprop(model.parameters(), num_data=10**6)
    for noise in (1.0, torch.tensor([1.0])):
        pruned = optimizer.posterior(model, likelihood="gaussian", noise_variance=noise).prune(0.4)
        calibrated = vprop.calibration.fit_noise_scale(pruned, x, y).posterior
        calibrated.save(tmp_path / "pruned.safetensors")
        loaded = vprop.load_posterior(tmp_path / "pruned.safetensors", model)
        assert float(calibrated.noise_variance) != 1.0
        assert float(loaded.noise_variance) == float(calibrated.noise_variance)
        assert (loaded.scales, loaded.ess, loaded.seed) == (calibrated.scales, calibrated.ess, calibrated.seed)
        torch.testing.assert_close(loaded.predict(x).variance, calibrated.predict(x).variance)


def test_the_message_speaks_of_what_was_given():
    model = nn.Linear(1, 1, bias=False)
    posterior = vprop.Vprop(model.parameters(), num_data=10).posterior(model)
    with pytest.raises(ValueError, match=r"Invalid fraction=0\.6.*must be small enough"):
        posterior.prune(0.6)
    with pytest.raises(ValueError, match=r"Invalid threshold=1000000000\.0.*largest \|μ\|\."):
        posterior.prune(threshold=1e9, by="magnitude")


def test_half_precision():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    pruned = vprop.Vprop(model.parameters(), num_data=10).posterior(model).prune(0.5)
    assert pruned.mean["weight"].dtype == torch.float32
    assert pruned.sample()["weight"].dtype == torch.bfloat16


def test_refusals(diagonal):
    for arguments, message in [
        ({}, "either fraction or threshold"),
        ({"fraction": 0.5, "threshold": 1.0}, "either fraction or threshold"),
        ({"fraction": 1.0}, "Invalid fraction"),
        ({"fraction": math.nan}, "Invalid fraction"),
        ({"threshold": -1.0}, "Invalid threshold"),
        ({"fraction": 0.5, "scope": "layer"}, "Invalid scope"),
        ({"fraction": 0.5, "by": "size"}, "Invalid by"),
        ({"fraction": 0.5, "parameters": ["head"]}, "Invalid parameters"),
        ({"fraction": 0.5, "parameters": []}, "Invalid parameters"),
        ({"threshold": 1e9, "parameters": ["weight", "bias"]}, "Nothing would be kept"),
    ]:
        with pytest.raises(ValueError, match=message):
            diagonal.prune(**arguments)
    pruned = diagonal.prune(0.5)
    with pytest.raises(TypeError, match="pruned already"):
        pruned.prune(0.9)
    with pytest.raises(ValueError, match="infinite precision"):
        pruned.as_prior()
    diagonal.mean["weight"][0, 0] = math.nan
    with pytest.raises(ValueError, match="is NaN or infinite"):
        diagonal.prune(0.5)


def test_pruned_posteriors_are_not_merged(diagonal):
    with pytest.raises(TypeError, match="a PrunedPosterior cannot be merged"):
        vprop.merge([diagonal.prune(0.5), diagonal.prune(0.5)])


def test_a_masked_model_holds_tied_weights_at_zero_wherever_they_are():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    masked = vprop.Vprop(model.parameters(), num_data=10).posterior(model).prune(0.5).mask_model()
    with torch.no_grad():
        next(masked.parameters()).fill_(1.0)  # as training goes on
    masked(torch.ones(1, 2))
    assert len(list(masked.parameters())) == 1
    assert [int((layer.weight == 0).sum()) for layer in masked] == [2, 2]

"""Posteriors and predictions that are told their likelihood by a loss, and noise that depends on the input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vprop
from vprop import VON, Prediction, Vprop
from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood

OUTPUTS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LOG_VARIANCES = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BOTH = torch.cat([OUTPUTS, LOG_VARIANCES], -1)
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def make_model(outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, outputs)


@pytest.mark.parametrize("likelihood", ["heteroscedastic", HeteroscedasticGaussianLikelihood()])
def test_heteroscedastic_predictions(likelihood):
    prediction = Prediction(BOTH, likelihood)
    assert prediction.likelihood == "heteroscedastic"
    assert torch.equal(prediction.samples, BOTH)
    torch.testing.assert_close(prediction.mean, OUTPUTS.mean(0))
    torch.testing.assert_close(prediction.epistemic_variance, OUTPUTS.var(0))
    torch.testing.assert_close(prediction.aleatoric_variance, LOG_VARIANCES.exp().mean(0))
    torch.testing.assert_close(prediction.variance, OUTPUTS.var(0) + LOG_VARIANCES.exp().mean(0))
    single = Prediction(BOTH[:1], likelihood)
    torch.testing.assert_close(single.variance, LOG_VARIANCES[0].exp())
    assert Prediction(BOTH.bfloat16(), likelihood).variance.dtype == torch.float32


def test_the_law_of_total_variance():
    """The variance of the mixture of the samples' normals, counted with 1/K, is exactly the sum of both parts."""
    prediction = Prediction(BOTH, "heteroscedastic")
    second_moment = (OUTPUTS.square() + LOG_VARIANCES.exp()).mean(0)
    total = second_moment - OUTPUTS.mean(0).square()
    count = len(OUTPUTS)
    parts = prediction.epistemic_variance * (count - 1) / count + prediction.aleatoric_variance
    torch.testing.assert_close(parts, total)


def test_equal_noise_for_all_inputs_is_the_gaussian_prediction():
    noise = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    expected = Prediction(OUTPUTS, GaussianLikelihood(noise))
    actual = Prediction(torch.cat([OUTPUTS, noise.log().expand_as(OUTPUTS)], -1), "heteroscedastic")
    for name in ("mean", "epistemic_variance", "aleatoric_variance", "variance"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


def test_predictions_that_cannot_be():
    with pytest.raises(ValueError, match=r"has shape \(6, 4, 3\), must have an even last dimension: d means, then"):
        _ = Prediction(OUTPUTS, "heteroscedastic").mean
    with pytest.raises(AttributeError, match="needs likelihood='categorical' or likelihood='bernoulli'"):
        _ = Prediction(BOTH, "heteroscedastic").probs
    with pytest.raises(AttributeError, match="needs likelihood='gaussian' or likelihood='heteroscedastic'"):
        _ = Prediction(BOTH, "categorical").mean
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with likelihood='heterosced"):
        Prediction(BOTH, "heteroscedastic", 0.3)
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with a GaussianLikelihood"):
        Prediction(OUTPUTS, GaussianLikelihood(0.25), 0.3)


@pytest.mark.parametrize("noise", [0.25, torch.tensor([0.25, 0.5, 1.0])], ids=["scalar", "vector"])
@pytest.mark.parametrize("constructor", [Vprop, VON])
def test_a_posterior_keeps_the_noise_that_it_was_made_with(constructor, noise, tmp_path):
    model, likelihood = make_model(), GaussianLikelihood(noise)
    posterior = constructor(model.parameters(), num_data=50).posterior(model, likelihood=likelihood)
    nn.init.constant_(likelihood.log_noise_variance, 5.0)  # training goes on
    assert posterior.likelihood == "gaussian"
    expected = torch.as_tensor(noise).expand(5, 3)
    torch.testing.assert_close(posterior.predict(X).aleatoric_variance, expected)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", make_model())
    assert loaded.likelihood == "gaussian"
    assert torch.equal(loaded.predict(X).variance, posterior.predict(X).variance)


def test_a_heteroscedastic_posterior(tmp_path):
    model = make_model(outputs=4)
    posterior = Vprop(model.parameters(), num_data=50).posterior(model, likelihood=HeteroscedasticGaussianLikelihood())
    assert posterior.likelihood == "heteroscedastic"
    prediction = posterior.predict(X)
    assert prediction.samples.shape == (32, 5, 4)
    assert prediction.mean.shape == prediction.variance.shape == (5, 2)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", make_model(outputs=4))
    assert torch.equal(loaded.predict(X).variance, prediction.variance)


def test_predict_may_be_told_otherwise():
    model = make_model(outputs=4)
    posterior = Vprop(model.parameters(), num_data=50).posterior(model, likelihood="gaussian", noise_variance=0.5)
    assert posterior.predict(X).aleatoric_variance.unique().item() == 0.5
    assert posterior.predict(X, likelihood=GaussianLikelihood(0.25)).aleatoric_variance.unique().item() == 0.25
    for likelihood in ("heteroscedastic", HeteroscedasticGaussianLikelihood()):
        assert posterior.predict(X, likelihood=likelihood).aleatoric_variance.shape == (5, 2)
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with a GaussianLikelihood"):
        posterior.predict(X, likelihood=GaussianLikelihood(0.25), noise_variance=0.3)


def test_two_noises_are_an_error():
    model = make_model()
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with a GaussianLikelihood"):
        Vprop(model.parameters(), num_data=50).posterior(model, likelihood=GaussianLikelihood(), noise_variance=0.3)
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with likelihood='heterosced"):
        Vprop(model.parameters(), num_data=50).posterior(model, likelihood="heteroscedastic", noise_variance=0.3)


def test_a_variance_that_belongs_to_somebody_else_is_copied():
    model, noise = make_model(), torch.full((3,), 0.5)
    posterior = Vprop(model.parameters(), num_data=50).posterior(model, likelihood="gaussian", noise_variance=noise)
    noise.zero_()
    assert posterior.predict(X).aleatoric_variance.unique().item() == 0.5

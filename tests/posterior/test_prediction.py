"""Predictive summaries against their definitions."""

from __future__ import annotations

import pytest
import torch

from tests.harness import make_batch, make_model, train
from vprop import Prediction, Vprop

LOGITS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_categorical():
    prediction = Prediction(LOGITS, "categorical")
    probs = torch.stack([sample.softmax(-1) for sample in LOGITS]).mean(0)
    torch.testing.assert_close(prediction.probs, probs)
    entropy = -(probs * probs.log()).sum(-1)
    torch.testing.assert_close(prediction.entropy, entropy)
    conditional = torch.stack([-(s.softmax(-1) * s.log_softmax(-1)).sum(-1) for s in LOGITS]).mean(0)
    torch.testing.assert_close(prediction.mutual_information, entropy - conditional)
    assert not torch.allclose(prediction.probs, LOGITS.mean(0).softmax(-1), atol=1e-3)


def test_bernoulli():
    prediction = Prediction(LOGITS, "bernoulli")
    probs = LOGITS.sigmoid().mean(0)
    torch.testing.assert_close(prediction.probs, probs)
    entropy = -(probs * probs.log() + (1 - probs) * (1 - probs).log())
    torch.testing.assert_close(prediction.entropy, entropy)
    each = LOGITS.sigmoid()
    conditional = -(each * each.log() + (1 - each) * (1 - each).log()).mean(0)
    torch.testing.assert_close(prediction.mutual_information, entropy - conditional)


def test_one_binary_label_as_bernoulli_and_as_categorical():
    """sigmoid(z) is softmax(0, z): both likelihoods describe the same label."""
    logits = LOGITS[..., :1]
    binary = Prediction(logits, "bernoulli")
    pair = Prediction(torch.cat([torch.zeros_like(logits), logits], -1), "categorical")
    torch.testing.assert_close(binary.probs[..., 0], pair.probs[..., 1])
    torch.testing.assert_close(binary.entropy[..., 0], pair.entropy)
    torch.testing.assert_close(binary.mutual_information[..., 0], pair.mutual_information)


@pytest.mark.parametrize("noise", [0.3, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)])
def test_gaussian(noise):
    prediction = Prediction(LOGITS, "gaussian", noise)
    torch.testing.assert_close(prediction.mean, LOGITS.mean(0))
    torch.testing.assert_close(prediction.epistemic_variance, LOGITS.var(0))
    torch.testing.assert_close(prediction.aleatoric_variance, torch.as_tensor(noise, dtype=torch.float64).expand(4, 3))
    torch.testing.assert_close(prediction.variance, prediction.epistemic_variance + prediction.aleatoric_variance)
    assert Prediction(LOGITS[:1], "gaussian").epistemic_variance.abs().max() == 0


def test_extreme_logits_stay_finite():
    prediction = Prediction(torch.tensor([[[1e4, -1e4]]]), "categorical")
    assert prediction.entropy.tolist() == prediction.mutual_information.tolist() == [0.0]
    assert Prediction(torch.tensor([[1e4, -1e4]]), "bernoulli").entropy.tolist() == [0.0, 0.0]


def test_asking_for_what_the_likelihood_does_not_have():
    for likelihood, name in [("gaussian", "probs"), ("categorical", "mean"), (None, "entropy"), (None, "variance")]:
        with pytest.raises(AttributeError, match=r"This prediction has likelihood=.*posterior\.predict"):
            getattr(Prediction(LOGITS, likelihood), name)
    with pytest.raises(ValueError, match="Invalid likelihood='poisson': must be one of 'categorical', 'bernoulli'"):
        Prediction(LOGITS, "poisson")


def test_predict():
    model, optimizer = train(Vprop, num_data=200)
    x, _ = make_batch()
    posterior = optimizer.posterior(model, likelihood="categorical")
    prediction = posterior.predict(x, num_samples=5, seed=3)
    assert prediction.samples.shape == (5, 12, 3)
    assert prediction.likelihood == "categorical"
    assert torch.equal(prediction.samples, posterior.predict(x, num_samples=5, seed=3).samples)
    assert not torch.equal(prediction.samples, posterior.predict(x, num_samples=5, seed=4).samples)
    assert torch.equal(prediction.samples[:3], posterior.predict(x, num_samples=3, seed=3).samples)
    assert posterior.predict(x, likelihood="gaussian", noise_variance=0.5).aleatoric_variance.unique().tolist() == [0.5]
    assert not prediction.samples.requires_grad
    with torch.no_grad():
        expected = torch.func.functional_call(model, posterior.sample(seed=3), x)
    torch.testing.assert_close(prediction.samples[0], expected)
    with pytest.raises(ValueError, match="Invalid num_samples=0: must be an integer >= 1"):
        posterior.predict(x, num_samples=0)


def test_bad_noise_variance_and_outputs_that_are_no_tensors():
    with pytest.raises(ValueError, match=r"Invalid noise_variance=-1\.0: must be finite and >= 0\. It is the var"):
        Prediction(LOGITS, "gaussian", -1.0)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, x):
            return {"logits": self.inner(x)}

    model = Wrapped()
    posterior = Vprop(model.parameters(), num_data=10).posterior(model)
    with pytest.raises(TypeError, match=r"or an output with \.logits; this one returns dict\. Wrap it"):
        posterior.predict(make_batch()[0])


def test_keyword_arguments_and_an_output_with_logits():
    """As the models of Hugging Face have them."""

    class Output(dict):
        __getattr__ = dict.__getitem__

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, features, scale):
            return Output(loss=torch.zeros(()), logits=scale * self.inner(features))

    wrapped, x = Wrapped(), make_batch()[0]
    doubled = Vprop(wrapped.parameters(), num_data=10).posterior(wrapped).predict({"features": x, "scale": 2.0}, 3)
    plain = Vprop(wrapped.inner.parameters(), num_data=10).posterior(wrapped.inner).predict(x, 3)
    torch.testing.assert_close(doubled.samples, 2 * plain.samples)


def test_half_precision_regression_is_summarised_in_float32():
    assert Prediction(LOGITS.to(torch.bfloat16), "gaussian", 0.1).variance.dtype == torch.float32


def test_dropout_is_off_in_predictions():
    model = torch.nn.Sequential(make_model(), torch.nn.Dropout(0.5)).train()
    posterior = Vprop(model.parameters(), num_data=200).posterior(model)
    x, _ = make_batch()
    assert torch.equal(posterior.predict(x, seed=1).samples, posterior.predict(x, seed=1).samples)
    assert model[1].training


def test_noise_that_does_not_fit_the_outputs():
    prediction = Prediction(torch.zeros(4, 5, 2), "gaussian", torch.ones(3))
    with pytest.raises(ValueError, match=r"Invalid noise_variance of shape \(3,\): must be .* shape \(5, 2\)"):
        _ = prediction.aleatoric_variance


def test_a_module_that_is_used_twice_keeps_its_parameters():
    """torch's functional_call, left to itself, puts the sampled weights in the place of such a module's parameters."""
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    weight, optimizer = layer.weight, Vprop(model.parameters(), num_data=10)
    x, before = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), layer.weight.clone()
    posterior = optimizer.posterior(model)
    prediction = posterior.predict(x, num_samples=1, seed=5)
    assert layer.weight is weight
    assert torch.equal(weight, before)
    sample = posterior._draw(5, 0)
    hidden = (x @ sample["0.weight"].T + sample["0.bias"]).tanh()
    torch.testing.assert_close(prediction.samples[0], hidden @ sample["0.weight"].T + sample["0.bias"])

"""Temperature, variance scale, noise scale: against closed forms and float64 transcriptions."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from tests.harness import make_batch, make_model
from vprop.calibration import (
    conformal_intervals,
    conformal_sets,
    fit_noise_scale,
    fit_temperature,
    fit_variance_scale,
)
from vprop.calibration._search import minimum
from vprop.posterior import DiagonalPosterior, FullPosterior, GaussianPrior, Scales


def linear_posterior(mean, variance, structure="diagonal", **rest):
    """A linear model without bias, weights (outputs, inputs), in float64."""
    mean = torch.as_tensor(mean, dtype=torch.float64)
    model = nn.Linear(mean.shape[1], mean.shape[0], bias=False, dtype=torch.float64)
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    variance = torch.as_tensor(variance, dtype=torch.float64).expand(mean.shape)
    if structure == "full":
        return FullPosterior(model, {"weight": mean}, variance.flatten().reciprocal().diag(), prior, ess=1.0, **rest)
    return DiagonalPosterior(model, {"weight": mean}, {"weight": variance}, prior, ess=1.0, **rest)


def classification(n=200, seed=0, sharpness=3.0):
    """Inputs are the logits, ``sharpness`` times those that the labels were drawn with."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return sharpness * logits, y


# -- the search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [0.03, 0.7, 1.0, 1.3, 25.0])
def test_the_search_finds_the_minimum_anywhere(best):
    found = minimum(lambda value: (math.log(value) - math.log(best)) ** 2, 1 / 40, 40)
    assert found.value == pytest.approx(best, rel=1e-5)
    assert not found.at_limit
    assert found.loss_at_one == pytest.approx(math.log(best) ** 2)


def test_the_search_finds_the_deeper_of_two_valleys():
    found = minimum(lambda v: min((math.log(v) + 2) ** 2, (math.log(v) - 1.3) ** 2 - 0.1), 1e-3, 1e3)
    assert found.value == pytest.approx(math.exp(1.3), rel=1e-5)


def test_the_search_at_the_end_of_its_range_and_without_a_minimum():
    assert minimum(lambda value: value, 0.1, 10).at_limit
    flat = minimum(lambda value: 1.0, 0.1, 10)
    assert (flat.value, flat.loss, flat.at_limit) == (1.0, 1.0, False)
    # NaN is no minimum
    assert minimum(lambda v: math.nan if v > 1.5 else (v - 1) ** 2, 0.1, 10).value == pytest.approx(1, abs=1e-4)


# -- temperature ---------------------------------------------------------------------------------------------


def test_temperature_of_one_network_is_that_of_a_transcription():
    x, y = classification()
    posterior = linear_posterior(torch.eye(3), 1e-30, likelihood="categorical")

    def loss(log_temperature):
        return float(nn.functional.cross_entropy(x / math.exp(log_temperature), y))

    expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-10})
    fit = fit_temperature(posterior, x, y)
    assert fit.value == pytest.approx(math.exp(expected.x), rel=1e-4)
    assert (fit.before, fit.after) == pytest.approx((loss(0.0), expected.fun), rel=1e-9)
    assert fit.posterior.scales == Scales(temperature=fit.value)
    # At the optimum the slope in 1/T is 0: the mean logit of the labels is the expected one.
    tempered = x / fit.value
    residual = (tempered.gather(1, y[:, None])[:, 0] - (tempered.softmax(-1) * tempered).sum(-1)).mean()
    assert abs(float(residual)) < 1e-5


def test_temperature_undoes_a_factor_of_the_logits():
    """Labels are drawn from softmax(x/3): the estimate is 3 up to its standard error, 1/√(n·Fisher)."""
    x, y = classification(n=20_000)
    fit = fit_temperature(linear_posterior(torch.eye(3), 1e-30, likelihood="categorical"), x, y, num_samples=1)
    tempered = x / fit.value
    probs = tempered.softmax(-1)
    spread = (probs * tempered.square()).sum(-1) - (probs * tempered).sum(-1).square()  # Var of the logit under p
    error = fit.value / math.sqrt(20_000 * float(spread.mean()))  # of T; log T has 1/√(n·Var)
    assert abs(fit.value - 3) < 4 * error  # false alarm 6e-5
    assert error < 0.1


def test_temperature_averages_probabilities_over_samples():
    x, y = classification()
    posterior = linear_posterior(torch.eye(3), 0.2, likelihood="categorical")
    samples = posterior.predict(x, 32).samples

    def loss(log_temperature):
        probs = (samples / math.exp(log_temperature)).softmax(-1).mean(0)
        return -float(probs.gather(1, y[:, None]).log().mean())

    expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-10})
    fit = fit_temperature(posterior, x, y)
    assert fit.value == pytest.approx(math.exp(expected.x), rel=1e-4)
    assert fit.before == pytest.approx(vprop.metrics.nll(posterior.predict(x, 32).probs, y), rel=1e-9)
    assert fit.after == pytest.approx(vprop.metrics.nll(fit.posterior.predict(x, 32).probs, y), rel=1e-9)
    torch.testing.assert_close(fit.posterior.predict(x, 32).samples, samples / fit.value)


def test_temperature_of_a_binary_label_has_a_closed_form():
    """One logit for all, share p of ones: T = logit / log(p/(1−p))."""
    posterior = linear_posterior([[2.5]], 1e-30, likelihood="bernoulli")
    y = torch.tensor([1.0] * 13 + [0.0] * 7)[:, None]
    fit = fit_temperature(posterior, torch.ones(20, 1, dtype=torch.float64), y)
    assert fit.value == pytest.approx(2.5 / math.log(13 / 7), rel=1e-5)
    entropy = -(0.65 * math.log(0.65) + 0.35 * math.log(0.35))
    assert fit.after == pytest.approx(entropy, rel=1e-9)


def test_a_second_fit_finds_nothing_more_and_temperatures_multiply():
    x, y = classification()
    first = fit_temperature(linear_posterior(torch.eye(3), 0.1, likelihood="categorical"), x, y)
    second = fit_temperature(first.posterior, x, y)
    assert second.value == pytest.approx(1, abs=1e-4)
    assert second.posterior.scales.temperature == pytest.approx(first.value * second.value)
    assert second.before == pytest.approx(first.after, rel=1e-9)


def test_a_loader_and_tensors_give_the_same():
    x, y = classification(n=100)
    posterior = linear_posterior(torch.eye(3), 0.1, likelihood="categorical")
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    assert fit_temperature(posterior, loader).value == pytest.approx(fit_temperature(posterior, x, y).value, rel=1e-9)


@pytest.mark.parametrize("fit", [fit_temperature, fit_variance_scale, conformal_sets])
def test_arrays_and_frames_of_labels_are_labels(fit):
    x, y = classification()
    posterior = linear_posterior(torch.eye(3), 0.1, likelihood="categorical")
    frame, series = pd.DataFrame(x.numpy()), pd.Series(y.numpy(), index=range(7, 7 + len(y)))  # as after a split
    expected = repr(fit(posterior, x, y))
    for kind in ("uint16", "int8", ">i4"):  # the last has its bytes in the other order
        assert repr(fit(posterior, x, y.numpy().astype(kind))) == expected
    assert repr(fit(posterior, frame, series)) == repr(fit(posterior, [(x.numpy(), y.numpy())])) == expected


@pytest.mark.parametrize("fit", [fit_noise_scale, fit_variance_scale, conformal_intervals])
def test_arrays_and_frames_of_targets_are_targets(fit):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + x[:, :1].square()
    model = nn.Linear(3, 1)
    posterior = vprop.Vprop(model.parameters(), num_data=50).posterior(model, likelihood="gaussian")
    expected = repr(fit(posterior, x, y))
    assert repr(fit(posterior, pd.DataFrame(x.numpy()), pd.DataFrame(y.numpy()))) == expected


# -- the scale of the variance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_variance_scale_has_a_closed_form(structure):
    """f = θ at every input: Var[y] = s·σ² + v, so the best s is (mean of (y−μ)² − v)/σ².

    σ² is that of the samples, K of them; their mean is off by σ/√K, and with it the best scale by a share of 1/K.
    """
    sigma2, noise, spread = 0.5, 0.1, 2.0
    posterior = linear_posterior([[0.0]], sigma2, structure, likelihood="gaussian", noise_variance=noise)
    y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).repeat(50, 1) * spread
    x = torch.ones(100, 1, dtype=torch.float64)
    fit = fit_variance_scale(posterior, x, y, num_samples=50)
    of_samples = float(posterior.predict(x[:1], 50).epistemic_variance)
    assert fit.value == pytest.approx((spread**2 - noise) / of_samples, rel=0.03)
    assert of_samples == pytest.approx(sigma2, rel=4 * math.sqrt(2 / 50))
    torch.testing.assert_close(fit.posterior.variance["weight"], posterior.variance["weight"] * fit.value)
    assert fit.posterior.scales == Scales(variance=fit.value)
    assert fit.posterior.mean["weight"] is posterior.mean["weight"]
    assert not fit.at_limit


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_variance_scale_is_that_of_a_transcription(structure):
    x, y = classification()
    posterior = linear_posterior(0.3 * torch.eye(3), 0.05, structure, likelihood="categorical")
    draws = torch.stack([model(torch.eye(3, dtype=torch.float64)).T for model in posterior.sampled_models(16, 0)])
    noise = draws - posterior.mean["weight"]

    def loss(log_scale):
        weights = posterior.mean["weight"] + math.exp(log_scale / 2) * noise
        probs = torch.einsum("ni,koi->kno", x, weights).softmax(-1).mean(0)
        return -float(probs.gather(1, y[:, None]).log().mean())

    expected = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-8})
    fit = fit_variance_scale(posterior, x, y, num_samples=16)
    assert math.log(fit.value) == pytest.approx(expected.x, abs=0.01)
    assert fit.before == pytest.approx(loss(0.0), rel=1e-6)
    assert expected.fun - 1e-12 <= fit.after <= expected.fun + 1e-4


def test_a_posterior_whose_mean_is_better_says_so():
    y = torch.zeros(50, 1, dtype=torch.float64)
    posterior = linear_posterior([[0.0]], 1.0, likelihood="gaussian", noise_variance=1e-9)
    fit = fit_variance_scale(posterior, torch.ones(50, 1, dtype=torch.float64), y)
    assert fit.at_limit
    assert "variance scale 0.001, at the end of its range: held-out log-loss" in repr(fit)


def test_a_scale_that_overflows_is_only_a_bad_one():
    class Exploding(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp().exp()

    model = Exploding(1, 1, bias=False)
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    mean, variance = {"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)}
    posterior = DiagonalPosterior(model, mean, variance, prior, ess=1.0, likelihood="gaussian", noise_variance=0.1)
    generator = torch.Generator().manual_seed(0)
    y = math.e + 0.5 * torch.randn(64, 1, generator=generator)
    fit = fit_variance_scale(posterior, torch.ones(64, 1), y, num_samples=16)
    assert math.isfinite(fit.after)
    assert fit.value < 1


# -- the scale of the noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "heteroscedastic"])
def test_noise_scale_has_a_closed_form(kind):
    """Certain weights: c is the mean of (y−f)²/v."""
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        posterior = linear_posterior([[2.0]], 1e-30, likelihood=kind, noise_variance=0.25)
        expected = float(error.square().mean() / 0.25)
    else:
        posterior = linear_posterior([[2.0], [-0.7]], 1e-30, likelihood=kind)
        expected = float(error.square().mean() / math.exp(-0.7))
    x = torch.ones(40, 1, dtype=torch.float64)
    fit = fit_noise_scale(posterior, x, 2 + error)
    assert fit.value == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(
        fit.posterior.predict(x).aleatoric_variance, posterior.predict(x).aleatoric_variance * fit.value
    )
    torch.testing.assert_close(fit.posterior.predict(x).mean, posterior.predict(x).mean)
    assert fit.posterior.scales == Scales(noise=fit.value)


def test_noise_scale_is_that_of_a_transcription():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = x.sum(-1, keepdim=True) + 2 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    posterior = linear_posterior([[1.0, 1.0]], 0.2, likelihood="gaussian", noise_variance=1.0)
    samples = posterior.predict(x, 32).samples
    mean, weights = samples.mean(0), samples.var(0)

    def loss(log_scale):
        variance = weights + math.exp(log_scale)
        return -float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean())

    expected = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-10})
    fit = fit_noise_scale(posterior, x, y)
    assert fit.value == pytest.approx(math.exp(expected.x), rel=1e-4)
    assert (fit.before, fit.after) == pytest.approx((loss(0.0), expected.fun), rel=1e-9)
    assert fit.posterior.noise_variance == pytest.approx(fit.value)
    prediction = fit.posterior.predict(x)
    assert fit.after == pytest.approx(vprop.metrics.gaussian_nll(prediction.mean, prediction.variance, y), rel=1e-9)


def test_noise_of_several_outputs_keeps_its_proportions():
    noise = torch.tensor([0.1, 0.4], dtype=torch.float64)
    posterior = linear_posterior([[1.0], [2.0]], 1e-30, likelihood="gaussian", noise_variance=noise)
    y = torch.tensor([[1.0, 2.0]], dtype=torch.float64) + torch.tensor([[0.3, 0.6], [-0.3, -0.6]], dtype=torch.float64)
    fit = fit_noise_scale(posterior, torch.ones(2, 1, dtype=torch.float64), y)
    assert fit.value == pytest.approx(0.9, rel=1e-5)  # 0.09/0.1 and 0.36/0.4
    torch.testing.assert_close(fit.posterior.noise_variance, 0.9 * noise, rtol=1e-4, atol=0)


# -- what a calibrated posterior is ----------------------------------------------------------------------------


def calibrated(tmp_path, likelihood, fit, outputs, y):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, outputs)
    x = torch.randn(40, 4, generator=generator)
    optimizer = vprop.Vprop(model.parameters(), num_data=10_000)
    if y is None:  # what the model says, but for every tenth example
        y = (model(x).argmax(-1) + (torch.arange(40) % 10 == 0)) % 3
    posterior = fit(optimizer.posterior(model, likelihood=likelihood), x, y).posterior
    posterior.save(tmp_path / "q.safetensors")
    return x, posterior, vprop.load_posterior(tmp_path / "q.safetensors", model)


@pytest.mark.parametrize(
    ("likelihood", "fit", "outputs", "y"),
    [
        ("categorical", fit_temperature, 3, None),
        ("categorical", fit_variance_scale, 3, None),
        ("heteroscedastic", fit_noise_scale, 2, 4 * torch.linspace(-1, 1, 40)[:, None]),
        ("gaussian", fit_noise_scale, 1, 4 * torch.linspace(-1, 1, 40)[:, None]),
    ],
)
def test_files_keep_calibration(tmp_path, likelihood, fit, outputs, y):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, posterior, loaded = calibrated(tmp_path, likelihood, fit, outputs, y)
    assert posterior.scales != Scales()
    assert loaded.scales == posterior.scales
    torch.testing.assert_close(loaded.predict(x).samples, posterior.predict(x).samples)
    torch.testing.assert_close(loaded.variance["weight"], posterior.variance["weight"])
    assert loaded.noise_variance == posterior.noise_variance


def test_a_temperature_is_for_logits_alone():
    x, y = classification()
    posterior = fit_temperature(linear_posterior(torch.eye(3), 0.1, likelihood="categorical"), x, y).posterior
    raw = torch.stack([model(x) for model in posterior.sampled_models(4)]).detach()
    torch.testing.assert_close(posterior.predict(x, 4).samples * posterior.scales.temperature, raw)
    torch.testing.assert_close(posterior.predict(x, 4, likelihood="gaussian").samples, raw)


def test_calibrated_posteriors_are_not_merged():
    x, y = classification()
    plain = linear_posterior(torch.eye(3), 0.1, likelihood="categorical")
    with pytest.raises(ValueError, match=r"merge\(posteriors\): number 1 is calibrated .* calibrate the result"):
        vprop.merge([plain, fit_temperature(plain, x, y).posterior])


def test_the_model_and_the_posterior_are_left_alone():
    model = make_model()
    optimizer = vprop.Vprop(model.parameters(), num_data=50)
    posterior = optimizer.posterior(model, likelihood="categorical")
    x, y = make_batch(50)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    variance = {name: v.clone() for name, v in posterior.variance.items()}
    fit_temperature(posterior, x, y)
    fit_variance_scale(posterior, x, y, num_samples=4)
    assert posterior.scales == Scales()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert torch.equal(posterior.variance[name], variance[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    model = make_model(dtype)
    posterior = vprop.Vprop(model.parameters(), num_data=500).posterior(model, likelihood="categorical")
    x, _ = make_batch(60, dtype)
    y = (model(x).argmax(-1) + (torch.arange(60) % 10 == 0)) % 3
    fit = fit_temperature(posterior, x, y)
    assert fit.posterior.predict(x, 4).samples.dtype == dtype
    assert fit.after <= fit.before


def test_the_result_in_words():
    x, y = classification(n=100)
    fit = fit_temperature(linear_posterior(torch.eye(3), 1e-30, likelihood="categorical"), x, y)
    assert repr(fit) == str(fit)
    assert repr(fit).startswith(f"temperature {fit.value:.4g}: held-out log-loss {fit.before:.4f} → {fit.after:.4f}")
    assert repr(fit).endswith("(100 examples)")


def test_inputs_may_be_a_named_tuple():
    """It stands for the arguments of the model, as it does for predict."""

    class Inputs(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor

    model = nn.Bilinear(2, 2, 1)
    posterior = vprop.Vprop(model.parameters(), num_data=10**6).posterior(model, likelihood="gaussian")
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(30, 2, generator=generator), torch.randn(30, 2, generator=generator)
    y = model(left, right).detach() + 2 * torch.randn(30, 1, generator=generator)
    fit = vprop.calibration.fit_noise_scale(posterior, Inputs(left, right), y)
    assert fit.value == vprop.calibration.fit_noise_scale(posterior, (left, right), y).value
    intervals = vprop.calibration.conformal_intervals(posterior, Inputs(left, right), y)
    assert intervals.predict(Inputs(left, right))[0].shape == (30, 1)

"""Standard deviations, confidence, quantiles and intervals of predictions against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vprop import Prediction
from vprop.posterior import LinearizedPrediction, PredictionSummary
from vprop.posterior._quantiles import mixture_quantile

LOGITS = torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_classifiers(likelihood):
    prediction = Prediction(LOGITS, likelihood)
    probs = LOGITS.softmax(-1) if likelihood == "categorical" else LOGITS.sigmoid()
    torch.testing.assert_close(prediction.std, probs.std(0))
    mean = probs.mean(0)
    expected = mean.max(-1).values if likelihood == "categorical" else torch.where(mean > 0.5, mean, 1 - mean)
    torch.testing.assert_close(prediction.confidence, expected)
    for q in (0.05, 0.3, 0.5, 0.99):
        torch.testing.assert_close(prediction.quantile(q), probs.quantile(q, dim=0))
    low, high = prediction.interval(0.8)
    torch.testing.assert_close(torch.stack([low, high]), prediction.quantile([0.1, 0.9]))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_several_quantiles_at_once(kind):
    prediction = Prediction(LOGITS, "gaussian")
    levels = [0.25, 0.5, 0.75]
    torch.testing.assert_close(prediction.quantile(kind(levels)), prediction.quantile(levels))
    with pytest.raises(ValueError, match=r"Invalid q=.*: must be a number between 0 and 1, or several"):
        prediction.quantile(kind([]))


@pytest.mark.parametrize("noise", [0.09, torch.tensor([0.01, 0.25, 4.0], dtype=torch.float64)])
@pytest.mark.parametrize("q", [0.01, 0.25, 0.5, 0.95])
def test_regression_is_the_mixture_of_the_samples(noise, q):
    """The distribution function of the mixture, by scipy, is q at its quantile."""
    prediction = Prediction(LOGITS, "gaussian", noise)
    at = prediction.quantile(q)
    std = torch.as_tensor(noise, dtype=torch.float64).sqrt().expand_as(LOGITS)
    reached = stats.norm.cdf(at.numpy(), LOGITS.numpy(), std.numpy()).mean(0)
    assert abs(reached - q).max() < 1e-12
    torch.testing.assert_close(prediction.std, prediction.variance.sqrt())


def test_noise_that_depends_on_the_input():
    outputs = torch.cat([LOGITS, 0.5 * LOGITS.flip(0)], -1)
    at = Prediction(outputs, "heteroscedastic").quantile(0.9)
    std = (0.25 * LOGITS.flip(0)).exp()
    assert abs(stats.norm.cdf(at.numpy(), LOGITS.numpy(), std.numpy()).mean(0) - 0.9).max() < 1e-12


def test_one_sample_is_a_normal_distribution():
    prediction = Prediction(LOGITS[:1], "gaussian", 0.25)
    expected = stats.norm.ppf(0.9, LOGITS[0].numpy(), 0.5)
    torch.testing.assert_close(prediction.quantile(0.9), torch.from_numpy(expected))


def test_without_noise_it_is_a_place_among_the_samples():
    samples = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert Prediction(samples, "gaussian", 0.0).quantile(0.6).tolist() == pytest.approx([3.0])


def test_both_tails_in_float32():
    low, high = Prediction(torch.tensor([[-1.0], [1.0]]), "gaussian", 0.25).interval(1 - 1e-7)
    torch.testing.assert_close(low, -high, rtol=1e-6, atol=0.0)
    assert float(stats.norm.cdf(float(low), [-1.0, 1.0], 0.5).mean()) == pytest.approx(5e-8, rel=0.1)


def test_mixtures_far_apart_and_in_float32():
    means = torch.tensor([-1e4, 0.0, 1e4])
    assert float(mixture_quantile(means, torch.ones(3), 0.5)) == pytest.approx(0.0, abs=1e-4)
    low, high = Prediction(LOGITS.float(), "gaussian", 0.1).interval(0.9)
    expected = Prediction(LOGITS, "gaussian", 0.1).interval(0.9)
    torch.testing.assert_close(torch.stack([low, high]).double(), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_a_summary_takes_one_normal_distribution():
    prediction = Prediction(LOGITS, "gaussian", 0.1)
    summary = PredictionSummary.of(prediction)
    expected = stats.norm.ppf(0.9, prediction.mean.numpy(), prediction.std.numpy())
    torch.testing.assert_close(summary.quantile(0.9), torch.from_numpy(expected))
    assert (summary.quantile(0.9) - prediction.quantile(0.9)).abs().max() > 1e-3


def test_intervals_hold_what_they_promise():
    """Of 4000 observations from the mixture itself; 4 standard errors are 0.019, a false alarm in 16000 runs."""
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(20, 1, generator=generator).expand(20, 4000)
    low, high = Prediction(means, "gaussian", 0.04).interval(0.9)
    chosen = torch.randint(20, (4000,), generator=generator)
    y = means[chosen, 0] + 0.2 * torch.randn(4000, generator=generator)
    assert float(((low <= y) & (y <= high)).double().mean()) == pytest.approx(0.9, abs=0.019)


def test_what_is_refused():
    prediction = Prediction(LOGITS, "gaussian")
    for bad in (0, 1, -0.1, 1.5, "0.5", None, float("nan")):
        with pytest.raises(ValueError, match=r"Invalid q=.*: must be a number between 0 and 1"):
            prediction.quantile(bad)
        with pytest.raises(ValueError, match=r"Invalid level=.*: must be a number between 0 and 1"):
            prediction.interval(bad)
    for ask in (lambda p: p.std, lambda p: p.quantile(0.5), lambda p: p.interval(), lambda p: p.confidence):
        with pytest.raises(AttributeError, match="This prediction has likelihood=None"):
            ask(Prediction(LOGITS))
    with pytest.raises(AttributeError, match="This prediction has likelihood='gaussian'"):
        _ = prediction.confidence
    linear = LinearizedPrediction(LOGITS[0], torch.eye(3, dtype=torch.float64).expand(4, 3, 3))
    with pytest.raises(AttributeError, match="This prediction has likelihood=None"):
        _ = linear.probs

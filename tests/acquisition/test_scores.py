"""Scores of single examples: definitions, identities, closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from vprop import Prediction
from vprop.acquisition import entropy, least_confidence, mutual_information, variation_ratio
from vprop.posterior import LinearizedPrediction, PredictionSummary

LOGITS = 2 * torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SCORES = [entropy, mutual_information, variation_ratio, least_confidence]


def test_classes_are_those_of_the_prediction():
    prediction = Prediction(LOGITS, "categorical")
    torch.testing.assert_close(entropy(prediction), prediction.entropy)
    torch.testing.assert_close(mutual_information(prediction), prediction.mutual_information)
    torch.testing.assert_close(least_confidence(prediction), 1 - prediction.probs.max(-1).values)


@pytest.mark.parametrize("score", SCORES)
def test_a_binary_label_is_one_of_two_classes(score):
    logits = LOGITS[..., 0]
    expected = score(Prediction(torch.stack([torch.zeros_like(logits), logits], -1), "categorical"))
    torch.testing.assert_close(score(Prediction(logits, "bernoulli")), expected)
    torch.testing.assert_close(score(Prediction(logits[..., None], "bernoulli")), expected)


def test_mutual_information_is_the_mean_divergence_from_the_mean():
    """I(y; θ) = E_q KL(p(y|θ) ‖ p(y))."""
    each = LOGITS.softmax(-1)
    divergence = (each * (each / each.mean(0)).log()).sum(-1).mean(0)
    torch.testing.assert_close(mutual_information(Prediction(LOGITS, "categorical")), divergence)


def test_variation_ratio_counts_votes():
    expected = []
    for example in range(5):
        votes = [int(LOGITS[k, example].argmax()) for k in range(7)]
        expected.append(1 - max(votes.count(c) for c in range(3)) / 7)
    assert variation_ratio(Prediction(LOGITS, "categorical")).tolist() == pytest.approx(expected)


def test_samples_that_agree_know_all_but_the_noise():
    same = Prediction(LOGITS[:1].expand(6, 5, 3), "categorical")
    assert mutual_information(same).tolist() == pytest.approx([0] * 5, abs=1e-12)
    assert variation_ratio(same).tolist() == [0] * 5
    assert entropy(same).min() > 0


def test_regression_has_the_information_of_a_gaussian_channel():
    """½ log(1 + signal/noise); entropy ½ log 2πe·variance, also by torch's distribution."""
    prediction = Prediction(LOGITS, "gaussian", noise_variance=0.5)
    expected = 0.5 * torch.log1p(LOGITS.var(0) / 0.5).sum(-1)
    torch.testing.assert_close(mutual_information(prediction), expected)
    gaussian = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
    torch.testing.assert_close(entropy(prediction), gaussian.entropy().sum(-1))
    noisier = Prediction(LOGITS, "gaussian", noise_variance=50.0)
    assert (mutual_information(noisier) < mutual_information(prediction)).all()
    assert (entropy(noisier) > entropy(prediction)).all()


@pytest.mark.parametrize("score", SCORES)
def test_bad_predictions(score):
    bad = LOGITS.clone()
    bad[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="acquisition: the prediction has NaN or infinite logits"):
        score(Prediction(bad, "categorical"))
    with pytest.raises(ValueError, match="acquisition: got no prediction, must be a Prediction with likelihood="):
        score(LOGITS)
    with pytest.raises(ValueError, match="acquisition: got likelihood=None, must be a Prediction"):
        score(Prediction(LOGITS))
    with pytest.raises(ValueError, match=r"samples of shape \(7, 5, 3\), must be one label for each example"):
        score(Prediction(LOGITS, "bernoulli"))


@pytest.mark.parametrize("score", [variation_ratio, least_confidence])
def test_votes_need_classes(score):
    with pytest.raises(ValueError, match="got likelihood='gaussian', must be a Prediction with"):
        score(Prediction(LOGITS, "gaussian"))


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "column"])
@pytest.mark.parametrize("score", [entropy, mutual_information, least_confidence])
def test_a_summary_has_the_scores_of_its_prediction(score, kind):
    logits = {"bernoulli": LOGITS[..., 0], "column": LOGITS[..., :1]}.get(kind, LOGITS)
    prediction = Prediction(logits, "bernoulli" if kind == "column" else kind)
    torch.testing.assert_close(score(PredictionSummary.of(prediction)), score(prediction))


def test_a_linearized_prediction_is_not_drawn_from():
    prediction = LinearizedPrediction(LOGITS[0], torch.eye(3).double().expand(5, 3, 3), "categorical", num_samples=2)
    torch.testing.assert_close(entropy(prediction), prediction.entropy)
    torch.testing.assert_close(least_confidence(prediction), 1 - prediction.confidence)


def test_summaries_that_have_no_scores():
    nan = Prediction(torch.full((2, 3, 4), math.nan), "categorical")
    several = Prediction(torch.zeros(2, 3, 4), "bernoulli")
    for score in (entropy, mutual_information, least_confidence):
        with pytest.raises(ValueError, match="NaN among its probabilities"):
            score(PredictionSummary.of(nan))
        with pytest.raises(ValueError, match="must be one label for each example"):
            score(PredictionSummary.of(several))

"""Entropy, and the rank statistic that tells two sets of scores apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import BinaryAUROC

from vprop import Prediction
from vprop.metrics import auroc, predictive_entropy

LOGITS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=20)


# -- entropy -------------------------------------------------------------------------------------------------


def test_entropy_is_that_of_torch_distributions():
    probs = LOGITS.softmax(-1)
    torch.testing.assert_close(predictive_entropy(probs), torch.distributions.Categorical(probs).entropy())
    bernoulli = torch.distributions.Bernoulli(probs).entropy()
    torch.testing.assert_close(predictive_entropy(probs, task="multilabel"), bernoulli)
    torch.testing.assert_close(predictive_entropy(probs[0, 0]), bernoulli[0, 0])
    torch.testing.assert_close(predictive_entropy(probs[..., :1]), bernoulli[..., :1])


def test_entropy_of_a_prediction():
    classes, labels = Prediction(LOGITS, "categorical"), Prediction(LOGITS, "bernoulli")
    torch.testing.assert_close(predictive_entropy(classes.probs), classes.entropy)
    torch.testing.assert_close(predictive_entropy(labels.probs, task="multilabel"), labels.entropy)


def test_extremes_of_the_entropy():
    uniform = predictive_entropy(torch.full((2, 7), 1 / 7))
    assert uniform.dtype == torch.float64
    assert uniform.tolist() == pytest.approx([math.log(7)] * 2, rel=1e-6)
    assert predictive_entropy(torch.eye(3)).tolist() == [0, 0, 0]
    assert predictive_entropy(torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx([0, math.log(2), 0])


def test_classes_are_forced_on_one_example():
    probs = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert predictive_entropy(probs).shape == (3,)
    assert float(predictive_entropy(probs, task="multiclass")) == pytest.approx(1.5 * math.log(2))


# -- auroc ---------------------------------------------------------------------------------------------------


def labelled(known, unknown):
    return torch.cat([known, unknown]), torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))]).long()


@pytest.mark.parametrize("values", [3, 20, 10**6])
def test_auroc_against_scikit_learn_and_torchmetrics(values):
    """With few different values most pairs are ties."""
    generator = torch.Generator().manual_seed(0)
    known = torch.randint(0, values, (150,), generator=generator) / values
    unknown = (torch.randint(0, values, (80,), generator=generator) / values).sqrt()
    scores, labels = labelled(known, unknown)
    value = auroc(known, unknown)
    assert 0.55 < value < 0.95
    assert value == pytest.approx(roc_auc_score(labels.numpy(), scores.numpy()), rel=1e-12)
    assert value == pytest.approx(float(BinaryAUROC()(scores, labels)), rel=1e-5)


@given(SCORES, SCORES)
def test_auroc_counts_pairs(known, unknown):
    pairs = [(o > i) + 0.5 * (o == i) for o in unknown for i in known]
    known, unknown = torch.tensor(known), torch.tensor(unknown)
    assert auroc(known, unknown) == pytest.approx(sum(pairs) / len(pairs), rel=1e-14)


@given(SCORES, SCORES)
def test_auroc_symmetries(known, unknown):
    known, unknown = torch.tensor(known, dtype=torch.float64), torch.tensor(unknown, dtype=torch.float64)
    value = auroc(known, unknown)
    assert auroc(unknown, known) == pytest.approx(1 - value, abs=1e-12)
    assert auroc(-known, -unknown) == pytest.approx(1 - value, abs=1e-12)
    assert auroc(known.exp(), unknown.exp()) == value
    assert auroc(known.flip(0), unknown.flip(0)) == value
    assert auroc(known, known) == 0.5


def test_auroc_of_scores_on_any_scale():
    """torchmetrics takes scores beyond [0, 1] for logits, and in float32 a sigmoid makes all of these 1."""
    known, unknown = torch.tensor([20.0, 21.0, 22.0]), torch.tensor([30.0, 31.0, math.inf])
    assert auroc(known, unknown) == 1
    assert auroc(unknown, known) == 0


def test_auroc_flattens_and_takes_integers():
    assert auroc(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3], [5]])) == (2.5 + 4) / 8


@pytest.mark.parametrize("where", [0, 1])
def test_auroc_of_nan_is_nan(where):
    scores = [torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])]
    scores[where][0] = math.nan
    assert math.isnan(auroc(*scores))


def test_entropy_and_mutual_information_of_predictions_as_scores():
    """Samples that agree on known inputs and contradict each other on unknown ones."""
    known = Prediction(torch.tensor([4.0, 0.0]).expand(2, 10, 2), "categorical")
    contradiction = torch.tensor([[4.0, 0.0], [0.0, 4.0]])[:, None].expand(2, 5, 2)
    unknown = Prediction(contradiction, "categorical")
    assert auroc(known.entropy, unknown.entropy) == 1
    assert auroc(known.mutual_information, unknown.mutual_information) == 1

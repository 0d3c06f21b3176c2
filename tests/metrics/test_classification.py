"""Accuracy, log-loss and Brier score against scikit-learn, torchmetrics and torch, and how the three tasks relate."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torchmetrics.functional.classification import binary_accuracy, multiclass_accuracy, multilabel_accuracy

from vprop.metrics import accuracy, brier, nll

SCORES = [accuracy, nll, brier]


def multiclass(n=60, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, classes, generator=generator, dtype=torch.float64).softmax(-1)
    return probs, torch.randint(0, classes, (n,), generator=generator)


def multilabel(n=60, labels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(n, labels, generator=generator, dtype=torch.float64)
    return probs, torch.randint(0, 2, (n, labels), generator=generator)


def binary(n=60, seed=0):
    probs, labels = multilabel(n, 1, seed)
    return probs[:, 0], labels[:, 0]


# -- against other libraries ---------------------------------------------------------------------------------


def test_multiclass_against_scikit_learn():
    probs, labels = multiclass()
    assert nll(probs, labels) == pytest.approx(log_loss(labels.numpy(), probs.numpy()), rel=1e-12)
    assert accuracy(probs, labels) == accuracy_score(labels.numpy(), probs.argmax(1).numpy())
    one_against_rest = [brier_score_loss((labels == c).numpy(), probs[:, c].numpy()) for c in range(4)]
    assert brier(probs, labels) == pytest.approx(sum(one_against_rest), rel=1e-12)


def test_binary_against_scikit_learn():
    probs, labels = binary()
    assert nll(probs, labels) == pytest.approx(log_loss(labels.numpy(), probs.numpy()), rel=1e-12)
    assert brier(probs, labels) == pytest.approx(brier_score_loss(labels.numpy(), probs.numpy()), rel=1e-12)
    assert accuracy(probs, labels) == accuracy_score(labels.numpy(), (probs > 0.5).numpy())


def test_accuracy_against_torchmetrics():
    probs, labels = multiclass()
    assert accuracy(probs, labels) == pytest.approx(float(multiclass_accuracy(probs, labels, 4, average="micro")))
    probs, labels = multilabel()
    assert accuracy(probs, labels) == pytest.approx(float(multilabel_accuracy(probs, labels, 3, average="micro")))
    probs, labels = binary()
    assert accuracy(probs, labels) == pytest.approx(float(binary_accuracy(probs, labels)))


def test_multilabel_scores_are_means_over_all_labels():
    probs, labels = multilabel()
    assert nll(probs, labels) == pytest.approx(float(F.binary_cross_entropy(probs, labels.double())), rel=1e-12)
    for score in SCORES:
        columns = [score(probs[:, i], labels[:, i]) for i in range(3)]
        assert score(probs, labels) == pytest.approx(sum(columns) / 3, rel=1e-12)


# -- conventions ---------------------------------------------------------------------------------------------


def test_one_label_as_binary_and_as_two_classes():
    """The Brier score sums over classes, so two classes count the same distance twice."""
    probs, labels = binary()
    pair = torch.stack([1 - probs, probs], -1)
    assert nll(pair, labels) == pytest.approx(nll(probs, labels), rel=1e-12)
    assert accuracy(pair, labels) == accuracy(probs, labels)
    assert brier(pair, labels) == pytest.approx(2 * brier(probs, labels), rel=1e-12)


def test_ties_go_to_the_lower_class():
    assert accuracy(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])) == 0.5
    assert accuracy(torch.tensor([0.5, 0.5]), torch.tensor([0, 0])) == 1
    assert accuracy(torch.tensor([[0.4, 0.4, 0.2]]), torch.tensor([0])) == 1


def test_a_label_of_probability_zero_is_infinitely_surprising():
    sure = torch.tensor([1.0, 0.0])
    assert nll(sure, torch.tensor([1, 1])) == math.inf
    assert nll(sure, torch.tensor([0, 0])) == math.inf
    assert nll(torch.eye(3), torch.tensor([0, 1, 0])) == math.inf
    assert nll(sure[None], torch.tensor([[0, 1]]), task="multilabel") == math.inf


def test_tiny_probabilities_are_neither_clipped_nor_rounded():
    assert nll(torch.tensor([[1e-30, 1.0]]), torch.tensor([0])) == pytest.approx(30 * math.log(10), rel=1e-6)
    tiny = torch.tensor([1e-20], dtype=torch.float64)
    assert nll(tiny, torch.tensor([0])) == pytest.approx(1e-20, rel=1e-12, abs=0)


def test_perfect_and_worst():
    probs, labels = torch.eye(3), torch.arange(3)
    assert (accuracy(probs, labels), nll(probs, labels), brier(probs, labels)) == (1, 0, 0)
    assert math.copysign(1, nll(probs, labels)) == 1
    assert (accuracy(probs, labels.roll(1)), brier(probs, labels.roll(1))) == (0, 2)
    sure = torch.tensor([0.0, 1.0])
    assert (accuracy(sure, sure), nll(sure, sure), brier(sure, sure)) == (1, 0, 0)
    assert (accuracy(sure, 1 - sure), brier(sure, 1 - sure)) == (0, 1)


# -- shapes and dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_leading_dimensions_are_flattened(score):
    probs, labels = multiclass(60)
    assert score(probs.view(5, 4, 3, 4), labels.view(5, 4, 3)) == score(probs, labels)
    assert score(probs[0], labels[0]) == score(probs[:1], labels[:1])
    probs, labels = multilabel(60)
    assert score(probs.view(5, 12, 3), labels.view(5, 12, 3), task="multilabel") == score(probs, labels)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("probs_shape", "labels_shape"), [((6,), (6,)), ((6, 1), (6,)), ((6, 1), (6, 1)), ((6,), (6, 1))]
)
def test_binary_shapes_and_label_dtypes(score, dtype, probs_shape, labels_shape):
    probs, labels = binary(6)
    assert score(probs.view(probs_shape), labels.to(dtype).view(labels_shape)) == score(probs, labels)


@pytest.mark.parametrize("score", SCORES)
def test_a_single_column_is_binary_with_more_dimensions_too(score):
    probs, labels = binary(6)
    assert score(probs.view(2, 3, 1), labels.view(2, 3)) == score(probs, labels)
    assert score(probs.view(2, 3), labels.view(2, 3), task="binary") == score(probs, labels)


@pytest.mark.parametrize("score", SCORES)
def test_the_task_decides_where_shapes_could_mean_two_things(score):
    probs, labels = multiclass(20)
    one_hot = F.one_hot(labels, 4)
    elements = score(probs.reshape(-1), one_hot.reshape(-1))
    assert score(probs, one_hot, task="multilabel") == pytest.approx(elements, rel=1e-12)
    assert score(probs, labels, task="multiclass") == score(probs, labels)
    assert elements != pytest.approx(score(probs, labels))
    assert score(probs / 2, one_hot) == score(probs / 2, one_hot, task="multilabel")


def test_inputs_in_low_precision_are_summed_in_double_precision():
    """A mean of 100,000 float16 numbers, all the same, is that number."""
    probs = torch.full((100_000,), 0.1, dtype=torch.float16)
    exact = float(probs[0])
    assert brier(probs, torch.zeros(100_000)) == pytest.approx(exact**2, rel=1e-12)
    assert nll(probs, torch.ones(100_000)) == pytest.approx(-math.log(exact), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_softmax_outputs_of_every_precision_are_accepted(dtype):
    logits = 5 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1).to(dtype)
    labels = logits.argmax(-1)
    assert nll(probs, labels) == pytest.approx(nll(logits.softmax(-1), labels), rel=1e-2)


def test_what_rounding_does_is_forgiven_and_clipped():
    above = torch.tensor([1.0000001])
    assert float(above) > 1
    assert nll(above, torch.tensor([1])) == brier(above, torch.tensor([1])) == 0
    assert nll(-above.new_tensor([1e-8]), torch.tensor([0])) == 0


def test_gradients_are_neither_needed_nor_kept():
    probs, labels = multiclass()
    assert isinstance(nll(probs.requires_grad_(), labels), float)
    assert probs.grad is None


@given(st.permutations(range(12)))
def test_the_order_of_examples_does_not_matter(order):
    for probs, labels in (multiclass(12), multilabel(12), binary(12)):
        for score in SCORES:
            assert score(probs[order], labels[order]) == pytest.approx(score(probs, labels), rel=1e-12)


@pytest.mark.parametrize("score", [nll, brier])
def test_the_scores_are_proper(score):
    """Expected under p itself, p scores better than any other q: here p = (½, 3/10, 1/5), by ten labels."""
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    truth = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    others = torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = score(truth.expand(10, 3), labels)
    for other in others / others.sum(-1, keepdim=True):
        assert score(other.expand(10, 3), labels) > best

"""Reliability diagrams and calibration errors, by hand and against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError

from vprop.metrics import Reliability, expected_calibration_error, reliability

BINS = [1, 2, 7, 10, 15, 100]


def some(n, width, seed=0):
    """Random probabilities: none of them on the edge of a bin, or 1, where conventions differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, width, generator=generator, dtype=torch.float64), generator


# -- by hand -------------------------------------------------------------------------------------------------


def test_multiclass_from_the_definition():
    """Two bins: 3 examples at 0.9 of which 2 right, 1 example at 0.65 that is wrong."""
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.65, 0.35]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 1])
    diagram = reliability(probs, labels, bins=10)
    assert isinstance(diagram, Reliability)
    assert diagram.confidence == pytest.approx([0.65, 0.9])
    assert diagram.accuracy == pytest.approx([0, 2 / 3])
    assert diagram.share == [0.25, 0.75]
    expected = 0.75 * (0.9 - 2 / 3) + 0.25 * 0.65
    assert diagram.expected_calibration_error == pytest.approx(expected)
    assert expected_calibration_error(probs, labels, bins=10) == pytest.approx(expected)


def test_binary_bins_the_probability_of_label_one():
    """0.1 and 0.9 are as confident, but lie in different bins: each is compared with how often the label is 1."""
    probs, labels = torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64), torch.tensor([0, 1, 1, 1])
    diagram = reliability(probs, labels, bins=5)
    assert diagram.confidence == pytest.approx([0.1, 0.9])
    assert diagram.accuracy == [0.5, 1.0]
    assert expected_calibration_error(probs, labels, bins=5) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    pair = torch.stack([1 - probs, probs], -1)  # top label: four examples at 0.9, three of them right
    assert expected_calibration_error(pair, labels, bins=5) == pytest.approx(0.9 - 0.75)


def test_multilabel_is_the_mean_over_labels():
    probs, generator = some(200, 3)
    labels = torch.randint(0, 2, (200, 3), generator=generator)
    columns = [expected_calibration_error(probs[:, i], labels[:, i]) for i in range(3)]
    assert len(set(columns)) == 3
    assert expected_calibration_error(probs, labels) == pytest.approx(sum(columns) / 3, rel=1e-12)
    together = expected_calibration_error(probs, labels, task="binary")
    assert together == expected_calibration_error(probs.flatten(), labels.flatten())
    assert together < sum(columns) / 3
    shape = (10, 20, 3)
    assert expected_calibration_error(probs.view(shape), labels.view(shape), task="multilabel") == pytest.approx(
        sum(columns) / 3, rel=1e-12
    )
    assert expected_calibration_error(probs.view(shape), labels.view(shape), task="binary") == together


def test_one_label_is_binary():
    probs, labels = torch.tensor([[0.3], [0.6], [0.7]]), torch.tensor([[0], [1], [0]])
    expected = expected_calibration_error(probs[:, 0], labels[:, 0])
    assert expected_calibration_error(probs, labels) == expected
    assert expected_calibration_error(probs, labels, task="multilabel") == expected


# -- edges of bins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [5, 10, 15, 100])
def test_an_edge_belongs_to_the_bin_on_its_right(bins, dtype):
    """k/B for every k, in one bin each; 1 shares the last one with (B-1)/B."""
    probs = (torch.arange(bins + 1, dtype=torch.float64) / bins).to(dtype)
    diagram = reliability(probs, torch.zeros(bins + 1), bins=bins)
    expected = [*probs[:-2].tolist(), float(probs[-2:].double().mean())]
    assert diagram.confidence == pytest.approx(expected, rel=1e-12)
    assert diagram.share == pytest.approx([1 / (bins + 1)] * (bins - 1) + [2 / (bins + 1)])


def test_just_below_an_edge_is_left_of_it():
    below = torch.nextafter(torch.tensor(0.3), torch.tensor(0.0))
    assert reliability(torch.stack([below, torch.tensor(0.2)]), torch.zeros(2), bins=10).share == [1.0]
    assert reliability(torch.stack([below, torch.tensor(0.3)]), torch.zeros(2), bins=10).share == [0.5, 0.5]


def test_probability_one_is_in_the_last_bin():
    """One bin with mean 0.975 and accuracy 0.75."""
    probs = torch.tensor([0.95, 0.95, 1.0, 1.0], dtype=torch.float64)
    labels = torch.tensor([1, 1, 0, 1])
    assert reliability(probs, labels, bins=10).share == [1.0]
    assert expected_calibration_error(probs, labels, bins=10) == pytest.approx(0.225)


# -- against torchmetrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", BINS)
def test_binary_against_torchmetrics(bins):
    probs, generator = some(500, 1)
    labels = (torch.rand(500, generator=generator) < probs[:, 0] ** 2).long()
    expected = BinaryCalibrationError(n_bins=bins, norm="l1").set_dtype(torch.float64)(probs[:, 0], labels)
    assert expected_calibration_error(probs[:, 0], labels, bins=bins) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("bins", BINS)
def test_multiclass_against_torchmetrics(bins):
    """torchmetrics rounds to float32 here."""
    scores, generator = some(500, 4)
    probs, labels = (4 * scores).softmax(-1), torch.randint(0, 4, (500,), generator=generator)
    expected = MulticlassCalibrationError(num_classes=4, n_bins=bins, norm="l1")(probs, labels)
    assert expected_calibration_error(probs, labels, bins=bins) == pytest.approx(float(expected), rel=1e-5)


def test_the_default_number_of_bins_is_that_of_torchmetrics():
    probs, generator = some(500, 1)
    labels = torch.randint(0, 2, (500,), generator=generator)
    assert expected_calibration_error(probs[:, 0], labels) == pytest.approx(
        float(BinaryCalibrationError()(probs[:, 0], labels)), rel=1e-5
    )


def test_torchmetrics_agrees_about_one_when_it_is_a_little_less():
    """It gives p = 1 a bin beyond the last; the largest number below 1 lies where 1 does for us."""
    probs, generator = some(500, 1)
    probs = torch.where(probs > 0.9, 1.0, probs)[:, 0]
    labels = torch.randint(0, 2, (500,), generator=generator)
    below = probs.clamp_max(1 - 2**-53)
    expected = BinaryCalibrationError(n_bins=4).set_dtype(torch.float64)(below, labels)
    assert expected_calibration_error(probs, labels, bins=4) == pytest.approx(float(expected), rel=1e-9)


# -- properties ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30), st.integers(1, 20), st.randoms())
def test_binary_properties(examples, bins, random):
    def error(pairs):
        probs = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
        labels = torch.tensor([y for _, y in pairs])
        assert sum(reliability(probs, labels, bins=bins).share) == pytest.approx(1)
        return expected_calibration_error(probs, labels, bins=bins)

    assert 0 <= error(examples) <= 1 + 1e-12
    assert error(examples * 2) == pytest.approx(error(examples), abs=1e-12)
    shuffled = random.sample(examples, len(examples))
    assert error(shuffled) == pytest.approx(error(examples), abs=1e-12)
    assert error([(float(y), y) for _, y in examples]) == 0
    if bins > 1:  # one bin knows only means
        assert error([(1.0 - y, y) for _, y in examples]) == 1


def test_more_bins_of_an_equal_division_never_lower_the_error():
    """By the triangle inequality, a bin cannot be further off than its parts."""
    probs, generator = some(300, 1)
    labels = torch.randint(0, 2, (300,), generator=generator)
    errors = [expected_calibration_error(probs[:, 0], labels, bins=2**k) for k in range(8)]
    assert errors == sorted(errors)
    assert errors[0] == pytest.approx(abs(float(probs.mean() - labels.double().mean())))


def test_a_diagram_can_be_written_as_json():
    diagram = reliability(torch.eye(2), torch.tensor([0, 1]))
    assert diagram._asdict() == {"confidence": [1.0], "accuracy": [1.0], "share": [1.0]}

"""Every error says which argument, what it is, what is allowed, and what to do."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
import torch
from torch import tensor

from vprop import metrics

LABELLED = [
    metrics.accuracy,
    metrics.nll,
    metrics.brier,
    metrics.expected_calibration_error,
    metrics.reliability,
    metrics.calibration_curve,
]
GAUSSIAN = [metrics.gaussian_nll, metrics.crps_gaussian, metrics.coverage]
SAMPLED = [metrics.crps_samples, metrics.sample_coverage]

HALF = torch.full((4,), 0.5)
PROBS = torch.full((4, 2), 0.5)
CLASSES = tensor([0, 1, 1, 0])

LABELLED_ERRORS = {
    "a list": (
        ([0.5], tensor([1])),
        "Invalid probs: is a list, must be a torch.Tensor. Convert it with torch.as_tensor(probs).",
    ),
    "labels in a list": (
        (HALF, [0, 1, 1, 0]),
        "Invalid labels: is a list, must be a torch.Tensor. Convert it with torch.as_tensor(labels).",
    ),
    "labels in a Series": (
        (HALF, pd.Series([0, 1, 1, 0], index=[5, 7, 2, 3])),  # which torch.as_tensor() cannot read
        "Invalid labels: is a Series, must be a torch.Tensor. Convert it with torch.tensor(labels.to_numpy()).",
    ),
    "complex": (
        (HALF.to(torch.complex64), CLASSES),
        "Invalid probs: has dtype torch.complex64, must be real. Pass real and imaginary parts one by one.",
    ),
    "empty": (
        (torch.zeros(0, 3), torch.zeros(0)),
        "Invalid probs: has shape (0, 3), must be at least one example. The mean of nothing is undefined.",
    ),
    "shapes that fit no task": (
        (PROBS, tensor([0, 1])),
        "Invalid probs: has shape (4, 2) with labels of shape (2,), must be (n,) or (n, 1) with labels (n,) or (n, 1); "
        "(n, C) with C >= 2 and labels (n,); (n, L) with labels (n, L). Reshape one of them; classes, or labels, "
        "are the last dimension.",
    ),
    "an image of labels": (
        (torch.full((2, 3, 4), 0.5), torch.ones(2, 3, 4)),
        "Invalid probs: has shape (2, 3, 4) as labels has, must be of one or two dimensions where the task is to be "
        "inferred. Pass task='multilabel' if the last dimension holds labels, task='binary' if each element is an "
        "example.",
    ),
    "a row for a column": (
        (HALF, CLASSES[None]),
        "Invalid probs: has shape (4,) with labels of shape (1, 4), must be",
    ),
    "a label without a dimension": (
        (HALF[:1], tensor(1)),
        "Invalid probs: has shape (1,) with labels of shape (), must be",
    ),
    "several labels as a column": (
        (PROBS, CLASSES.expand(2, 4).T[..., None]),
        "Invalid probs: has shape (4, 2) with labels of shape (4, 2, 1), must be",
    ),
    "classes": (
        (CLASSES, CLASSES),
        "Invalid probs: has dtype torch.int64, must be floating-point probabilities. Pass what softmax or sigmoid "
        "returns, not predicted classes.",
    ),
    "logits": (
        (tensor([-1.5, 2.25]), tensor([0, 1])),
        "Invalid probs: has values from -1.5 to 2.25, must be in [0, 1]. Pass what softmax or sigmoid returns, not "
        "logits; NaN comes from a model that has diverged.",
    ),
    "a little too large": (
        (tensor([1.001]), tensor([1])),
        "Invalid probs: has values from 1.001 to 1.001, must be in [0, 1].",
    ),
    "a little too small": (
        (tensor([-0.001]), tensor([1])),
        "Invalid probs: has values from -0.001 to -0.001, must be in [0, 1].",
    ),
    "NaN": (
        (tensor([0.5, math.nan]), tensor([0, 1])),
        "Invalid probs: has values from nan to nan, must be in [0, 1].",
    ),
    "rows": (
        (tensor([[0.5, 0.5], [0.5, 0.75]]), tensor([0, 1])),
        "Invalid probs: has a row with the sum 1.25, must be rows with the sum 1. Pass a softmax over the last "
        "dimension, or task='multilabel' if the labels are independent.",
    ),
    "rows that sum to less": (
        (tensor([[0.5, 0.499]]), tensor([0])),
        "Invalid probs: has a row with the sum 0.999, must be rows with the sum 1.",
    ),
    "float classes": (
        (PROBS, CLASSES.float()),
        "Invalid labels: has dtype torch.float32, must be class numbers of an integer dtype. Use labels.long().",
    ),
    "a class too many": (
        (PROBS, CLASSES * 2),
        "Invalid labels: has values from 0 to 2, must be in 0..1 for probs with 2 classes. Leave out examples without "
        "a label; class numbers start at 0.",
    ),
    "an ignored label": (
        (PROBS, tensor([-100, 0, 1, 1])),
        "Invalid labels: has values from -100 to 1, must be in 0..1 for probs with 2 classes.",
    ),
    "labels of -1 and 1": (
        (HALF, 2 * CLASSES - 1),
        "Invalid labels: has values from -1 to 1, must be 0 or 1. Use (labels > 0) if they are -1 and 1.",
    ),
    "soft labels": (
        (PROBS, torch.full((4, 2), 0.25)),
        "Invalid labels: has values from 0.25 to 0.25, must be 0 or 1.",
    ),
    "one-hot labels": (
        (PROBS, torch.eye(2).repeat(2, 1)),
        "Invalid labels: has shape (4, 2) and looks like one-hot classes, must be class numbers, or independent 0/1 "
        "labels. Pass labels.argmax(-1) for classes, or task='multilabel' if the labels are independent.",
    ),
}

TASK_ERRORS = {
    "binary": (
        (PROBS, CLASSES),
        "Invalid probs: has shape (4, 2) with labels of shape (4,), must be (n,) or (n, 1) with labels (n,) or (n, 1) "
        "for task='binary'. Pass the probability of label 1, probs[..., 1] of a softmax over two classes.",
    ),
    "multiclass": (
        (torch.full((4, 2, 5), 0.5), CLASSES[:, None].expand(4, 5)),
        "Invalid probs: has shape (4, 2, 5) with labels of shape (4, 5), must be (n, C) with C >= 2 and labels (n,) "
        "for task='multiclass'. Classes are the last dimension: probs.movedim(1, -1) brings those of an image there.",
    ),
    "multilabel": (
        (PROBS, CLASSES),
        "Invalid probs: has shape (4, 2) with labels of shape (4,), must be (n, L) with labels (n, L) for "
        "task='multilabel'. Pass one probability and one 0/1 label for each example and label.",
    ),
}


def starts_with(message):
    return "^" + re.escape(message)


@pytest.mark.parametrize("metric", LABELLED)
@pytest.mark.parametrize(("arguments", "message"), LABELLED_ERRORS.values(), ids=LABELLED_ERRORS)
def test_probabilities_and_labels(metric, arguments, message):
    with pytest.raises(ValueError, match=starts_with(message)):
        metric(*arguments)


@pytest.mark.parametrize("metric", LABELLED)
@pytest.mark.parametrize("task", TASK_ERRORS)
def test_shapes_for_a_task(metric, task):
    arguments, message = TASK_ERRORS[task]
    with pytest.raises(ValueError, match=starts_with(message)):
        metric(*arguments, task=task)


def test_one_class_is_no_multiclass_task():
    with pytest.raises(ValueError, match=re.escape("(n, C) with C >= 2")):
        metrics.nll(HALF[:, None], CLASSES, task="multiclass")


@pytest.mark.parametrize("metric", LABELLED)
def test_task(metric):
    message = (
        "Invalid task='regression': must be one of 'binary', 'multiclass', 'multilabel'. Leave it out to infer it from "
        "the shapes."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metric(HALF, CLASSES, task="regression")
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.predictive_entropy(HALF, task="regression")


@pytest.mark.parametrize("metric", [metrics.reliability, metrics.expected_calibration_error])
@pytest.mark.parametrize("bins", [0, -3, 2.0, True, "ten"])
def test_bins(metric, bins):
    with pytest.raises(
        ValueError,
        match=starts_with(f"Invalid bins={bins!r}: must be an integer >= 1 (and <= 1000000). 15 is the default."),
    ):
        metric(HALF, CLASSES, bins=bins)


def test_a_diagram_of_several_labels():
    message = (
        "Invalid task='multilabel': must be 'binary' or 'multiclass' for one diagram. Draw one for each label, "
        "reliability(probs[:, i], labels[:, i]); expected_calibration_error averages over them."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.reliability(PROBS, torch.ones(4, 2))


def test_entropy():
    message = (
        "Invalid probs: has shape (4, 1), must be (n, C) with C >= 2 for task='multiclass'. One probability per "
        "example is task='binary'."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.predictive_entropy(HALF[:, None], task="multiclass")
    for probs in (tensor([[0.5, 0.75]]), tensor([1.5]), tensor([1]), torch.zeros(0), [0.5]):
        with pytest.raises(ValueError, match=r"^Invalid probs: "):
            metrics.predictive_entropy(probs)


@pytest.mark.parametrize("name", ["scores_in", "scores_out"])
def test_scores(name):
    scores = {"scores_in": HALF, "scores_out": HALF}
    empty = f"Invalid {name}: has shape (0,), must be at least one example. The mean of nothing is undefined."
    with pytest.raises(ValueError, match=starts_with(empty)):
        metrics.auroc(**scores | {name: HALF[:0]})
    with pytest.raises(ValueError, match=starts_with(f"Invalid {name}: is a float, must be a torch.Tensor.")):
        metrics.auroc(**scores | {name: 0.5})


@pytest.mark.parametrize("metric", GAUSSIAN)
def test_gaussians(metric):
    for variance, message in [
        (
            torch.ones(4, 1),
            "Invalid variance: has shape (4, 1), must be one number or of the shape of mean, (4,). Expand it, "
            "variance.expand(mean.shape).",
        ),
        (
            tensor([1, 1, -0.5, 1]),
            "Invalid variance: has the smallest value -0.5, must be >= 0. It is the variance, not its logarithm.",
        ),
        (-1, "Invalid variance: has the smallest value -1, must be >= 0. It is the variance, not its logarithm."),
        (
            "one",
            "Invalid variance: is a str, must be a torch.Tensor. Convert it with torch.as_tensor(variance).",
        ),
    ]:
        with pytest.raises(ValueError, match=starts_with(message)):
            metric(HALF, variance, HALF)


@pytest.mark.parametrize("metric", [metrics.rmse, *GAUSSIAN])
def test_mean_and_y(metric):
    def call(mean, y):
        return metric(mean, y) if metric is metrics.rmse else metric(mean, 1.0, y)

    message = "Invalid mean: has shape (4,), must be that of y, (4, 1). Reshape one of them, mean.reshape(y.shape)."
    with pytest.raises(ValueError, match=starts_with(message)):
        call(HALF, HALF[:, None])
    with pytest.raises(ValueError, match=starts_with("Invalid mean: has shape (0,), must be at least one example.")):
        call(HALF[:0], HALF[:0])
    with pytest.raises(ValueError, match=starts_with("Invalid y: is a float, must be a torch.Tensor.")):
        call(HALF, 0.5)


def test_a_density_needs_a_variance():
    message = (
        "Invalid variance: has zeros, must be > 0 for a log-density. Add the variance of the noise, or clamp it: a "
        "certain observation has no density."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.gaussian_nll(HALF, tensor([1.0, 1.0, 0.0, 1.0]), HALF)


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan, True, "most"])
def test_level(level):
    message = starts_with(f"Invalid level={level!r}: must be a number in (0, 1). Use 0.9 for an interval of 90 %.")
    with pytest.raises(ValueError, match=message):
        metrics.coverage(HALF, 1.0, HALF, level)
    with pytest.raises(ValueError, match=message):
        metrics.sample_coverage(HALF.expand(30, 4), HALF, level)


@pytest.mark.parametrize("metric", SAMPLED)
def test_samples(metric):
    message = (
        "Invalid samples: has shape (4, 30), must be the samples first and then the shape of y, (4,). Use "
        "samples.movedim(-1, 0) if they are last."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metric(HALF[:, None].expand(4, 30), HALF)
    with pytest.raises(ValueError, match=starts_with("Invalid samples: has shape (), must be the samples first")):
        metric(tensor(0.5), tensor(0.5))
    with pytest.raises(ValueError, match=starts_with("Invalid samples: has shape (30, 0), must be at least one")):
        metric(torch.zeros(30, 0), torch.zeros(0))
    with pytest.raises(ValueError, match=starts_with("Invalid y: is a list, must be a torch.Tensor.")):
        metric(HALF.expand(30, 4), [0.5] * 4)


def test_numbers_of_samples():
    message = "Invalid samples: has 1 sample, must be at least 2. The spread of one sample is unknown."
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.crps_samples(HALF[None], HALF)


@pytest.mark.parametrize(("level", "needed"), [(0.5, 3), (0.8, 9), (0.9, 19), (0.95, 39), (0.99, 199), (0.85, 13)])
def test_the_number_of_samples_that_a_level_needs(level, needed):
    few = HALF.expand(needed - 1, 4)
    message = (
        f"Invalid samples: has {needed - 1} samples, must be at least {needed} for level={level}. Draw more samples or "
        "lower the level."
    )
    with pytest.raises(ValueError, match=starts_with(message)):
        metrics.sample_coverage(few, HALF, level)
    assert metrics.sample_coverage(HALF.expand(needed, 4), HALF, level) == 1


def test_everything_exported_exists_and_has_an_example():
    for name in metrics.__all__:
        if name not in ("CalibrationCurve", "OutlierCurve", "Reliability", "RiskCoverage"):  # what functions return
            assert ">>> " in getattr(metrics, name).__doc__, name
    assert metrics.__all__ == sorted(metrics.__all__)

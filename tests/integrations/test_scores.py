"""Scores of averaged predictions, batch by batch, against the same of all data at once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from vprop import Prediction, metrics
from vprop.integrations._scores import CategoricalScores, scores_for

DRAWS, SIZES = 3, (5, 4, 1)


def generator():
    return torch.Generator().manual_seed(0)


def result(kind, outputs, targets, noise=1.0):
    """The scores of (draws, n, …) outputs, taken in as batches of different sizes."""
    scores = scores_for(kind, noise)
    for batch, labels in zip(outputs.split(SIZES, 1), targets.split(SIZES), strict=True):
        scores.add((draw, labels) for draw in batch)
    return scores.result(processes=1)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_classes(dtype):
    logits = (3 * torch.randn(DRAWS, sum(SIZES), 4, generator=generator())).to(dtype)
    labels = torch.randint(0, 4, (sum(SIZES),), generator=generator())
    probs = Prediction(logits, "categorical").probs
    expected = {
        "log_loss": metrics.nll(probs, labels),
        "accuracy": metrics.accuracy(probs, labels),
        "calibration_error": metrics.expected_calibration_error(probs, labels),
    }
    assert_close(result("categorical", logits, labels), expected)


def test_unlabelled_positions_do_not_count():
    logits = torch.randn(DRAWS, sum(SIZES), 6, 4, generator=generator())
    labels = torch.randint(0, 4, (sum(SIZES), 6), generator=generator())
    labels[:, ::2] = -100
    labels[-1] = -100  # all of the last batch
    kept = labels != -100
    assert_close(
        result("categorical", logits, labels),
        {
            "log_loss": metrics.nll(Prediction(logits[:, kept], "categorical").probs, labels[kept]),
            "accuracy": metrics.accuracy(Prediction(logits[:, kept], "categorical").probs, labels[kept]),
            "calibration_error": metrics.expected_calibration_error(
                Prediction(logits[:, kept], "categorical").probs, labels[kept]
            ),
        },
    )


@pytest.mark.parametrize(("shape", "task"), [((), "binary"), ((1,), "binary"), ((3,), "multilabel")])
def test_zeros_and_ones(shape, task):
    logits = torch.randn(DRAWS, sum(SIZES), *shape, generator=generator())
    labels = torch.randint(0, 2, (sum(SIZES), *shape), generator=generator())
    probs = logits.double().sigmoid().mean(0)
    expected = {
        "log_loss": metrics.nll(probs, labels, task=task),
        "accuracy": metrics.accuracy(probs, labels, task=task),
        "calibration_error": metrics.expected_calibration_error(probs, labels, task=task),
    }
    assert_close(result("bernoulli", logits, labels), expected)


@pytest.mark.parametrize("kind", ["gaussian", "heteroscedastic"])
def test_real_targets(kind):
    outputs = torch.randn(DRAWS, sum(SIZES), 2, generator=generator())
    y = torch.randn(sum(SIZES), 2 if kind == "gaussian" else 1, generator=generator())
    prediction = Prediction(outputs.double(), kind, 0.3 if kind == "gaussian" else None)
    expected = {
        "log_loss": metrics.gaussian_nll(prediction.mean, prediction.variance, y),
        "rmse": metrics.rmse(prediction.mean, y),
        "coverage": metrics.coverage(prediction.mean, prediction.variance, y, level=0.9),
    }
    assert_close(result(kind, outputs, y, noise=0.3), expected)


def test_logits_of_many_draws_are_never_there_at_once():
    """Those of a language model would not fit into memory."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def draws():
        for _ in range(4):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1  # that of the draw before
            logits = torch.randn(2, 5, 7, generator=generator())
            alive.append(weakref.ref(logits))
            yield logits, torch.zeros(2, 5, dtype=torch.int64)
            del logits

    scores = CategoricalScores()
    scores.add(draws())
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert scores.result(processes=1)["log_loss"] > 0

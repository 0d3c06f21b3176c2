"""What cannot be calibrated says so, and what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
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

CLASSES = [fit_temperature, fit_variance_scale, conformal_sets]
NUMBERS = [fit_noise_scale, fit_variance_scale, conformal_intervals]
X, Y = make_batch(40)
TARGETS = torch.zeros(40, 3)


def posterior(likelihood, model=None):
    model = make_model() if model is None else model
    return vprop.Vprop(model.parameters(), num_data=100).posterior(model, likelihood=likelihood)


def refuses(function, message, *arguments, error=ValueError, **keywords):
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments, **keywords)


@pytest.mark.parametrize("function", [*CLASSES, *NUMBERS])
def test_arguments_that_are_none(function):
    kind = "gaussian" if function in NUMBERS else "categorical"
    name = function.__name__
    refuses(function, f"{name}(posterior, …): got Linear, must be a posterior.", nn.Linear(2, 2), X, Y, error=TypeError)
    refuses(function, "got Tensor without targets, must be inputs with y", posterior(kind), X, error=TypeError)
    refuses(function, "got a batch of Tensor, must be a pair (x, y)", posterior(kind), [X], error=TypeError)
    refuses(
        function, "got a batch of ['Tensor', 'list'], must be a pair", posterior(kind), X, [1] * 40, error=TypeError
    )
    words = np.array(["cat"] * 40)
    refuses(function, "y is a ndarray of <U3, must be numbers.", posterior(kind), X, words, error=TypeError)
    refuses(function, "Invalid num_samples=0", posterior(kind), X, TARGETS if kind == "gaussian" else Y, num_samples=0)
    refuses(function, "Invalid seed=-1", posterior(kind), X, TARGETS if kind == "gaussian" else Y, seed=-1)


@pytest.mark.parametrize("function", [*CLASSES, *NUMBERS])
def test_an_empty_loader(function):
    kind = "gaussian" if function in NUMBERS else "categorical"
    refuses(function, f"{function.__name__}(posterior, loader): the loader is empty.", posterior(kind), [])
    nothing = DataLoader(TensorDataset(X[:0], Y[:0]))
    refuses(function, "the loader is empty. Pass data that were held out of training.", posterior(kind), nothing)


@pytest.mark.parametrize("function", CLASSES)
def test_labels_outside_the_classes(function):
    message = "y has values from 0 to 3, must be class numbers in 0..2, as the model has 3 outputs."
    refuses(function, message, posterior("categorical"), X, torch.arange(40) % 4)
    refuses(function, "y has values from -1 to 1", posterior("categorical"), X, torch.arange(40) % 3 - 1)
    refuses(function, "must be class numbers of shape (40,)", posterior("categorical"), X, Y.float())
    refuses(function, "must be class numbers of shape (40,)", posterior("categorical"), X, Y[:, None])
    binary = posterior("bernoulli", nn.Linear(4, 1))
    refuses(function, "y has values other than 0 and 1.", binary, X, torch.full((40, 1), -1.0))


@pytest.mark.parametrize("function", NUMBERS)
def test_targets_of_another_shape(function):
    message = "y has shape (40,), must be that of the predictions, (40, 3)."
    refuses(function, message, posterior("gaussian"), X, Y.float())
    refuses(function, "y has NaN or infinite values", posterior("gaussian"), X, TARGETS / 0)


@pytest.mark.parametrize("function", [*CLASSES, *NUMBERS])
def test_nan_logits(function):
    kind, y = ("gaussian", TARGETS) if function in NUMBERS else ("categorical", Y)
    bad = X.clone()
    bad[3, 1] = torch.nan
    refuses(function, "the model returns NaN or infinite outputs for the held-out data", posterior(kind), bad, y)


@pytest.mark.parametrize("function", [fit_temperature, fit_variance_scale])
def test_one_example(function):
    message = f"{function.__name__}(posterior, …): the held-out data are one example, must be several"
    refuses(function, message, posterior("categorical"), X[:1], Y[:1])


def test_one_example_of_a_regression():
    one = posterior("gaussian", nn.Linear(4, 1))
    message = "fit_noise_scale(posterior, …): the held-out data are one example, must be several"
    refuses(fit_noise_scale, message, one, X[:1], torch.ones(1, 1))
    refuses(fit_noise_scale, "the held-out data are empty", one, X[:0], torch.ones(0, 1))


@pytest.mark.parametrize(("level", "needed", "lower"), [(0.5, 1, None), (0.8, 4, "0.5"), (0.9, 9, "0.5")])
def test_a_conformal_calibration_set_of_one_example(level, needed, lower):
    if lower is None:  # one example does for 50 %: the new score is as likely to be above it as below
        assert conformal_sets(posterior("categorical"), X[:1], Y[:1], level=level).examples == 1
        return
    message = f"the calibration set has 1 example, must have at least {needed} for level={level}"
    refuses(conformal_sets, message, posterior("categorical"), X[:1], Y[:1], level=level)
    remedy = f"Hold out more data, or lower the level to {lower} or less."
    refuses(conformal_intervals, remedy, posterior("gaussian"), X[:1], TARGETS[:1], level=level)


def test_a_likelihood_that_was_not_said():
    message = "the posterior has likelihood=None, must be 'categorical' or 'bernoulli'. Say what the model's outputs"
    refuses(fit_temperature, message, posterior(None), X, Y)
    refuses(conformal_sets, message, posterior(None), X, Y)
    refuses(fit_noise_scale, "must be 'gaussian' or 'heteroscedastic'", posterior("categorical"), X, Y)
    refuses(conformal_intervals, "must be 'gaussian' or 'heteroscedastic'", posterior("categorical"), X, Y)


def test_labels_that_do_not_determine_a_temperature():
    model = nn.Linear(4, 3)
    narrow = vprop.Vprop(model.parameters(), num_data=10**9).posterior(model, likelihood="categorical")
    right = model(X).argmax(-1)
    refuses(fit_temperature, "the 40 held-out labels do not determine a temperature", narrow, X, right)
    refuses(fit_temperature, "because all labels are the most probable ones, or samples", narrow, X, right)
    refuses(fit_temperature, "the labels are no more likely than by chance", narrow, X, model(X).argmin(-1))


def test_targets_that_do_not_determine_the_noise():
    model = nn.Linear(4, 1)
    wide = vprop.Vprop(model.parameters(), num_data=1).posterior(model, likelihood="gaussian")
    message = "the weights' uncertainty alone is more than the errors: see fit_variance_scale"
    refuses(fit_noise_scale, message, wide, X, wide.predict(X, 32).mean)
    narrow = vprop.Vprop(model.parameters(), num_data=10**9).posterior(model, likelihood="gaussian")
    refuses(fit_noise_scale, "errors are beyond all proportion", narrow, X, torch.full((40, 1), 1e6))
    none = vprop.Vprop(model.parameters(), num_data=9).posterior(model, likelihood="gaussian", noise_variance=0.0)
    refuses(fit_noise_scale, "the noise variance has zeros, must be > 0", none, X, torch.zeros(40, 1))


def test_a_structure_that_cannot_be_scaled():
    class Rigid(type(posterior("categorical"))):
        def _with_variance_times(self, scale):
            return vprop.Posterior._with_variance_times(self, scale)

    rigid = posterior("categorical")
    rigid.__class__ = Rigid
    message = "The variance of a Rigid cannot be scaled, because its class has no _with_variance_times()."
    refuses(fit_variance_scale, message, rigid, X, Y, error=TypeError)


def test_a_posterior_of_another_model():
    """Its inputs do not fit, or its classes are others."""
    other = posterior("categorical", nn.Linear(4, 2))
    refuses(fit_temperature, "y has values from 0 to 2, must be class numbers in 0..1", other, X, Y)

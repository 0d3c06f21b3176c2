"""Calibrated sets and intervals of the estimators, on rows that nothing was trained on."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import beta, binom
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import NotFittedError

from vprop.calibration import ConformalIntervals, ConformalSets
from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor


def is_at_least(hits, count, n, level):
    """The coverage of one calibration set is Beta(k, n+1−k) or more; false alarm below 2e-4."""
    k = math.ceil((n + 1) * level)
    return hits >= binom.ppf(1e-4, count, beta.ppf(1e-4, k, n + 1 - k))


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    names = np.array(list("abcdefghij"))  # labels need not be numbers
    X = X + 6 * np.random.RandomState(0).standard_normal(X.shape)
    return X, names[y]


def test_sets(digits):
    X, y = digits
    model = BayesianMLPClassifier(max_iter=5, n_members=1, random_state=0).fit(X[:500], y[:500])
    with pytest.raises(NotFittedError, match=r"This BayesianMLPClassifier has not been calibrated .* calibrate_sets"):
        model.predict_set(X)
    assert model.calibrate_sets(X[500:900], y[500:900], level=0.9) is model
    members = model.predict_set(X[900:])
    assert members.shape == (len(X) - 900, 10)
    assert members.dtype == bool
    hits = members[np.arange(len(members)), np.searchsorted(model.classes_, y[900:])].sum()
    assert is_at_least(hits, len(members), 400, 0.9)
    expected = ConformalSets.fit(
        torch.tensor(model.predict_proba(X[500:900])), torch.tensor(np.searchsorted(model.classes_, y[500:900])), 0.9
    )
    assert model.conformal_sets_ == expected
    with pytest.raises(ValueError, match="the calibration set has 5 examples, must have at least 9"):
        model.calibrate_sets(X[:5], y[:5])
    with pytest.raises(ValueError, match="Invalid y: has the labels"):
        model.calibrate_sets(X[:20], ["?"] * 20)
    model.partial_fit(X[:100], y[:100])
    assert not hasattr(model, "conformal_sets_")  # they were those of another model


def test_sets_of_two_classes():
    X = np.random.RandomState(0).standard_normal((300, 2))
    y = X[:, 0] + np.random.RandomState(1).standard_normal(300) > 0
    model = BayesianLogisticRegression().fit(X[:100], y[:100]).calibrate_sets(X[100:200], y[100:200], level=0.8)
    members = model.predict_set(X[200:])
    assert is_at_least(members[np.arange(100), y[200:].astype(int)].sum(), 100, 100, 0.8)
    model.fit(X, y)
    assert not hasattr(model, "conformal_sets_")


def test_intervals():
    X, y = load_diabetes(return_X_y=True)
    model = BayesianMLPRegressor(max_iter=10, n_members=1, noise_folds=0, random_state=0).fit(X[:150], y[:150])
    with pytest.raises(
        NotFittedError, match=r"This BayesianMLPRegressor has not been calibrated .* calibrate_intervals"
    ):
        model.predict_interval(X)
    model.calibrate_intervals(X[150:300], y[150:300], level=0.9)
    low, high = model.predict_interval(X[300:])
    assert low.shape == y[300:].shape
    assert is_at_least(((low <= y[300:]) & (y[300:] <= high)).sum(), len(low), 150, 0.9)
    mean, std = map(torch.tensor, model.predict(X[150:300], return_std=True))
    expected = ConformalIntervals.fit(mean, std, torch.tensor(y[150:300]), 0.9)
    assert float(model.conformal_intervals_.threshold) == pytest.approx(float(expected.threshold))
    model.fit(X[:150], y[:150])
    assert not hasattr(model, "conformal_intervals_")


def test_intervals_of_several_targets():
    X = np.random.RandomState(0).standard_normal((200, 3))
    y = X[:, :2] * [1, 100]
    model = BayesianMLPRegressor(max_iter=5, n_members=1, noise_folds=0, random_state=0).fit(X[:100], y[:100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = model.calibrate_intervals(X[100:], pd.DataFrame(y[100:])).predict_interval(X[:7])
    assert low.shape == high.shape == (7, 2)
    assert ((high - low) > 0).all()
    with pytest.raises(ValueError, match=r"y is \(2, 100\), must be a tensor of shape"):
        model.calibrate_intervals(X[100:], y[100:].T)  # as many numbers, but not those of the rows

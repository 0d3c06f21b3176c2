"""The defaults have a better log-loss than scikit-learn's on the data sets it ships, as they are and standardized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.sklearn_defaults import CLASSIFICATION, FEATURES, REGRESSION, cross_validate
from sklearn.neural_network import MLPClassifier, MLPRegressor

from vprop.integrations.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "sklearn-defaults.json"
CASES = [
    *[(BayesianMLPClassifier, MLPClassifier, name, loader) for name, loader in CLASSIFICATION.items()],
    *[(BayesianMLPRegressor, MLPRegressor, name, loader) for name, loader in REGRESSION.items()],
]
QUICK = [(*case, features) for case in CASES for features in FEATURES]
QUICK = [case for case in QUICK if case[2] == "wine" or (case[2] != "digits" and case[4] == "raw")]
"""What takes seconds; the rest is in the slow test, and in the published comparison."""


def both(ours, theirs, loader, features, seed, folds=5):
    return (cross_validate(constructor, loader, features, seed, folds) for constructor in (ours, theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "name", "loader", "features"), QUICK, ids=[f"{case[2]}, {case[4]}" for case in QUICK]
)
def test_better_log_loss(ours, theirs, name, loader, features):
    our, their = both(ours, theirs, loader, features, seed=3)
    assert our["log_loss"] < their["log_loss"]
    if name == "diabetes":
        assert our["error"] < their["error"]


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("ours", "theirs", "name", "loader"), CASES, ids=[case[2] for case in CASES])
def test_better_log_loss_with_other_seeds(ours, theirs, name, loader, features):
    for seed in (20, 21, 22):
        our, their = both(ours, theirs, loader, features, seed)
        assert our["log_loss"] < their["log_loss"]


def test_the_published_comparison_is_of_these_defaults():
    """Every row that compares networks is a win, for every seed; and a fit here gives a number of the file."""
    results = json.loads(RESULTS.read_text())["results"]
    rows = [row for row in results if "BayesianLogisticRegression" not in row]
    assert len(rows) == len(CASES) * len(FEATURES)
    assert all(row["wins"] == len(next(iter(runs_of(row)))) >= 5 for row in rows)
    (wine,) = [row for row in rows if (row["data"], row["features"]) == ("wine", "raw")]
    now = cross_validate(BayesianMLPClassifier, CLASSIFICATION["wine"], "raw", seed=10)["log_loss"]
    np.testing.assert_allclose(now, wine["BayesianMLPClassifier"]["log_loss"][0], rtol=0.05)


def runs_of(row):
    return [row[name]["log_loss"] for name in row if name.startswith("Bayesian")]

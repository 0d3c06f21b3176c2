"""scikit-learn's own checks, none expected to fail."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor

QUICK = [
    BayesianMLPClassifier(n_members=2, max_iter=30, n_posterior_samples=16),
    BayesianMLPRegressor(n_members=2, max_iter=40, n_posterior_samples=16),
    BayesianLogisticRegression(max_iter=15, n_posterior_samples=16),
]


@parametrize_with_checks(QUICK)
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("constructor", [BayesianMLPClassifier, BayesianMLPRegressor, BayesianLogisticRegression])
def test_conventions_hold_for_the_defaults(constructor):
    check_estimator(constructor())

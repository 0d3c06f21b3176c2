"""Bayesian neural networks and logistic regression as scikit-learn estimators: ``pip install 'vprop[sklearn]'``."""

from vprop.integrations._requirements import require

require("scikit-learn", "1.6")

from vprop.integrations.sklearn.classifier import BayesianMLPClassifier  # noqa: E402
from vprop.integrations.sklearn.logistic import BayesianLogisticRegression  # noqa: E402
from vprop.integrations.sklearn.regressor import BayesianMLPRegressor  # noqa: E402

__all__ = ["BayesianLogisticRegression", "BayesianMLPClassifier", "BayesianMLPRegressor"]

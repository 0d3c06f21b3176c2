"""scikit-learn estimators with a posterior: calibrated probabilities, error bars, pipelines and grid search.

python examples/sklearn_estimators.py            # half a minute
python examples/sklearn_estimators.py --short    # a few seconds
"""

import argparse

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor


def classify(short):
    """Half of the digits to learn from, and a network that says how sure it is."""
    X, y = load_digits(return_X_y=True)
    X, test_X, y, test_y = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
    noise = np.random.RandomState(0).uniform(0, 16, test_X.shape)
    bayesian = BayesianMLPClassifier(random_state=0, max_iter=30 if short else 100)
    plain = make_pipeline(StandardScaler(), MLPClassifier(random_state=0, max_iter=500))
    print("digits")
    for name, model in (("BayesianMLPClassifier", bayesian), ("MLPClassifier", plain)):
        probabilities = model.fit(X, y).predict_proba(test_X)
        print(
            f"  {name:22} accuracy {accuracy_score(test_y, model.predict(test_X)):.3f}, "
            f"log-loss {log_loss(test_y, probabilities):.3f}, "
            f"confidence on pure noise {model.predict_proba(noise).max(1).mean():.2f}"
        )
    labels, std = bayesian.predict(test_X, return_std=True)
    right, wrong = std[labels == test_y].mean(), std[labels != test_y].mean()
    print(f"  its probability is uncertain by ±{right:.3f} where it is right, by ±{wrong:.3f} where it is wrong")


def regress(short):
    """The progress of diabetes, with intervals that hold what they promise."""
    X, y = load_diabetes(return_X_y=True)
    X, test_X, y, test_y = train_test_split(X, y, test_size=0.3, random_state=0)
    model = BayesianMLPRegressor(random_state=0, max_iter=60 if short else 200).fit(X, y)
    mean, std = model.predict(test_X, return_std=True)
    inside = np.mean(np.abs(test_y - mean) < 1.645 * std)
    print(f"diabetes: noise of ±{model.noise_std_:.0f}; 90 % intervals hold {inside:.0%} of new patients")
    for i in range(3):
        print(f"  predicted {mean[i]:.0f} ± {std[i]:.0f}, observed {test_y[i]:.0f}")


def explain(short):
    """Coefficients with error bars, and a prior chosen by cross-validation."""
    data = load_breast_cancer()
    grid = {"prior_precision": [0.5, "auto"] if short else [0.1, 0.5, 2.0, "auto"]}
    estimator = BayesianLogisticRegression(random_state=0, max_iter=40 if short else 100)
    search = GridSearchCV(estimator, grid, scoring="neg_log_loss", cv=3 if short else 5).fit(data.data, data.target)
    model, best = search.best_estimator_, -search.best_score_
    print(f"breast cancer: {search.best_params_}, cross-validated log-loss {best:.3f}; what speaks for benign, per σ:")
    scale = data.data.std(0)
    effects, errors = model.coef_[0] * scale, model.coef_std_[0] * scale
    for i in np.argsort(-np.abs(effects) / errors)[:4]:
        print(f"  {data.feature_names[i]:22} {effects[i]:+.2f} ± {errors[i]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="train for a few seconds only")
    arguments = parser.parse_args()
    for part in (classify, regress, explain):
        part(arguments.short)

"""The estimators' defaults beside those of scikit-learn's: 5-fold cross-validation on the data sets it ships.

    python benchmarks/sklearn_defaults.py --json benchmarks/results/sklearn-defaults.json

Everything is at its default but ``random_state``, which also shuffles the folds. The score is the log-loss of held-out
rows; for regression the negative log-density, where ``MLPRegressor``, which has no error bars, gets those of a Gaussian
with the variance of its training residuals.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn.base import is_classifier
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor
from vprop.lab.environment import environment

CLASSIFICATION = {"breast cancer": load_breast_cancer, "digits": load_digits, "wine": load_wine}
REGRESSION = {"diabetes": load_diabetes}
PAIRS = [
    (BayesianMLPClassifier, MLPClassifier, CLASSIFICATION),
    (BayesianMLPRegressor, MLPRegressor, REGRESSION),
    (BayesianLogisticRegression, LogisticRegression, CLASSIFICATION),
]
FEATURES = ("raw", "standardized")
FIRST_SEED = 10
"""Below it are those that the defaults were chosen with."""


def gaussian_loss(model: Any, train: tuple, test: tuple) -> tuple[float, float]:
    """Mean negative log-density and squared error."""
    if isinstance(model[-1], BayesianMLPRegressor):
        mean, std = model.predict(test[0], return_std=True)
    else:
        mean, std = model.predict(test[0]), np.std(train[1] - model.predict(train[0]))
    error = np.square(test[1] - mean)
    return float(np.mean(0.5 * np.log(2 * np.pi * std**2) + error / (2 * std**2))), float(error.mean())


def cross_validate(constructor: Any, loader: Any, features: str, seed: int, folds: int = 5) -> dict[str, float]:
    """Means over the folds: log-loss, error (rate, or squared), seconds of one fit."""
    X, y = loader(return_X_y=True)
    classifies = is_classifier(constructor())
    splitter = (StratifiedKFold if classifies else KFold)(folds, shuffle=True, random_state=seed)
    rows = []
    for train, test in splitter.split(X, y):
        scaler = StandardScaler() if features == "standardized" else "passthrough"
        model = make_pipeline(scaler, constructor(random_state=seed))
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # scikit-learn's defaults stop before they converge
            model.fit(X[train], y[train])
        seconds = time.process_time() - start
        if classifies:
            probabilities = model.predict_proba(X[test])
            wrong = float(np.mean(model.classes_[probabilities.argmax(1)] != y[test]))
            rows.append((log_loss(y[test], probabilities), wrong, seconds))
        else:
            rows.append((*gaussian_loss(model, (X[train], y[train]), (X[test], y[test])), seconds))
    return dict(zip(("log_loss", "error", "seconds"), np.mean(rows, axis=0).tolist(), strict=True))


def compare(seeds: int) -> list[dict[str, Any]]:
    """A row for each pair of estimators, data set and treatment of the features."""
    results = []
    for ours, theirs, loaders in PAIRS:
        for name, loader in loaders.items():
            for features in FEATURES:
                row: dict[str, Any] = {"data": name, "features": features}
                for constructor in (ours, theirs):
                    chosen = range(FIRST_SEED, FIRST_SEED + seeds)
                    runs = [cross_validate(constructor, loader, features, seed) for seed in chosen]
                    scores = {key: [run[key] for run in runs] for key in runs[0]}
                    row[constructor.__name__] = scores
                wins = sum(a < b for a, b in zip(*(row[c.__name__]["log_loss"] for c in (ours, theirs)), strict=True))
                row["wins"] = wins
                results.append(row)
                print(line(row), flush=True)
    return results


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    names = [name for name in row if name not in ("data", "features", "wins")]
    parts = [
        f"{name} {np.mean(row[name]['log_loss']):.4f} (error {np.mean(row[name]['error']):.4g}, "
        f"{np.mean(row[name]['seconds']):.2f} s)"
        for name in names
    ]
    seeds = len(row[names[0]]["log_loss"])
    return f"{row['data']}, {row['features']}: {parts[0]}; {parts[1]}; better in {row['wins']} of {seeds}"


def main() -> None:
    """Compare, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many values of random_state")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    results = compare(arguments.seeds)
    if arguments.json:
        command = f"python benchmarks/sklearn_defaults.py --json {arguments.json}"
        if arguments.seeds != parser.get_default("seeds"):
            command += f" --seeds {arguments.seeds}"
        versions = environment() | {"scikit-learn": sklearn.__version__}
        content = {"command": command, "environment": versions, "results": results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What the three estimators share: weights of rows, randomness, early stopping, streams, pickles, pandas, errors."""

from __future__ import annotations

import io
import pickle
import warnings
from unittest.mock import MagicMock

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor
from vprop.integrations.sklearn._training import Progress

NETWORK = {"hidden_layer_sizes": (10,), "n_members": 2, "max_iter": 10, "n_posterior_samples": 8}
CLASSIFIERS = [BayesianMLPClassifier(**NETWORK), BayesianLogisticRegression(max_iter=10, n_posterior_samples=8)]
ESTIMATORS = [*CLASSIFIERS, BayesianMLPRegressor(**NETWORK)]


def name_of(estimator):
    return type(estimator).__name__


every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)
every_classifier = pytest.mark.parametrize("estimator", CLASSIFIERS, ids=name_of)


def data_for(estimator):
    if isinstance(estimator, BayesianMLPRegressor):
        X, y = load_diabetes(return_X_y=True)
        return X[:150], y[:150]
    return load_iris(return_X_y=True)


def answers(model, X):
    """Everything that the model says about rows."""
    return np.column_stack(model.predict(X, return_std=True))


def fresh(estimator, **arguments):
    return clone(estimator).set_params(**{"random_state": 0} | arguments)


# -- randomness ----------------------------------------------------------------------------------------------


@every_estimator
def test_the_same_random_state_gives_the_same_answers(estimator):
    X, y = data_for(estimator)
    first, second = (answers(fresh(estimator).fit(X, y), X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    generators = (answers(fresh(estimator, random_state=np.random.RandomState(3)).fit(X, y), X) for _ in range(2))
    np.testing.assert_array_equal(*generators)
    assert not np.array_equal(first, answers(fresh(estimator, random_state=1).fit(X, y), X))


@every_estimator
def test_nothing_global_is_touched(estimator):
    X, y = data_for(estimator)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads(), torch.get_default_dtype()
    model = fresh(estimator).fit(X, y)
    model.predict(X)
    model.partial_fit(X, y)
    assert torch.equal(before[0], torch.get_rng_state())
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])
    assert before[2:] == (torch.get_num_threads(), torch.get_default_dtype())


@every_estimator
def test_two_predictions_are_the_same_and_rows_do_not_depend_on_their_neighbours(estimator):
    X, y = data_for(estimator)
    model = fresh(estimator).fit(X, y)
    np.testing.assert_array_equal(answers(model, X), answers(model, X))
    alone = np.vstack([answers(model, X[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(alone, answers(model, X)[:5], rtol=1e-9, atol=1e-12)


@every_estimator
def test_many_rows_are_predicted_in_blocks(estimator, monkeypatch):
    X, y = data_for(estimator)
    model = fresh(estimator).fit(X, y)
    whole = answers(model, X)
    monkeypatch.setattr("vprop.integrations.sklearn._base.ROWS_AT_ONCE", 40)
    np.testing.assert_allclose(answers(model, X), whole, rtol=1e-9, atol=1e-12)


# -- weights of rows -----------------------------------------------------------------------------------------


@every_estimator
def test_a_weight_of_k_is_k_copies_of_a_row(estimator):
    """Exactly, where all rows are in one batch: posterior widths included."""
    X, y = data_for(estimator)
    X, y = X[::4], y[::4]
    weights = np.random.RandomState(0).randint(0, 4, len(y))
    arguments = {} if isinstance(estimator, BayesianLogisticRegression) else {"batch_size": 1000}
    if isinstance(estimator, BayesianMLPRegressor):
        arguments["noise_folds"] = 0  # of copies, some are held out while others are trained on
    weighted = fresh(estimator, **arguments).fit(X, y, sample_weight=weights)
    repeated = fresh(estimator, **arguments).fit(X.repeat(weights, axis=0), y.repeat(weights))
    for name, variance in repeated.posterior_.variance.items():
        torch.testing.assert_close(weighted.posterior_.variance[name], variance, rtol=1e-6, atol=0)
    np.testing.assert_allclose(answers(weighted, X), answers(repeated, X), rtol=1e-6)
    assert weighted.posterior_.ess == weights.sum() == repeated.posterior_.ess


@every_estimator
def test_weights_count_with_mini_batches_too(estimator):
    X, y = data_for(estimator)
    # At the limit of a weight's noise it is the limit, not the data, that decides.
    arguments = {"weight_noise_limit": 10.0} if isinstance(estimator, BayesianMLPRegressor) else {}
    model, once = (fresh(estimator, **arguments).fit(X, y, sample_weight=np.full(len(y), k)) for k in (3.0, 1.0))
    assert model.posterior_.ess == 3 * len(y)
    narrow, wide = (sum(v.sum() for v in m.posterior_.variance.values()) for m in (model, once))
    assert narrow < wide


@every_classifier
def test_weights_move_the_decision(estimator):
    X, y = data_for(estimator)
    rows = y > 0  # two classes that overlap
    X, y = X[rows], y[rows]
    shares = []
    for weight in (1.0, 20.0):
        model = fresh(estimator, max_iter=40).fit(X, y, sample_weight=np.where(y == 2, weight, 1.0))
        shares.append(np.mean(model.predict(X) == 2))
    assert shares[1] > shares[0]


# -- early stopping, progress --------------------------------------------------------------------------------


@every_estimator
def test_early_stopping_keeps_the_best_posterior(estimator, capsys, monkeypatch):
    X, y = data_for(estimator)
    means, note = [], Progress.note

    def recording(progress, loss, learner, score):
        means.append(learner.posterior().mean)
        return note(progress, loss, learner, score)

    monkeypatch.setattr(Progress, "note", recording)
    model = fresh(estimator, early_stopping=True, max_iter=200, n_iter_no_change=3, validation_fraction=0.3, verbose=1)
    model.fit(X, y)
    best = int(np.argmax(model.validation_scores_))
    assert 3 < model.n_iter_ < 200
    assert len(model.validation_scores_) == len(model.loss_curve_) == model.n_iter_ == len(means)
    assert model.best_validation_score_ == model.validation_scores_[best]
    for name, mean in model.posterior_.mean.items():
        assert torch.equal(mean, means[best][name])
        assert best == len(means) - 1 or not torch.equal(mean, means[-1][name])
    assert model.posterior_.ess == len(y) - np.ceil(0.3 * len(y))
    output = capsys.readouterr().out
    assert f"Iteration {model.n_iter_}, loss = " in output
    assert "Validation score did not improve" in output
    assert not hasattr(model.set_params(early_stopping=False, verbose=False).fit(X, y), "validation_scores_")


@every_estimator
def test_without_early_stopping_all_rows_are_used_and_nothing_is_printed(estimator, capsys):
    X, y = data_for(estimator)
    model = fresh(estimator).fit(X, y)
    assert model.n_iter_ == model.max_iter == len(model.loss_curve_)
    assert model.posterior_.ess == len(y)
    assert not hasattr(model, "validation_scores_")
    assert capsys.readouterr().out == ""
    assert model.loss_curve_[-1] < model.loss_curve_[0]


def test_divergence_is_reported():
    X, y = load_iris(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="Training diverged.*Lower learning_rate_init"):
        fresh(CLASSIFIERS[0], learning_rate_init=300.0).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="Training diverged.*Lower learning_rate_init"):
        fresh(CLASSIFIERS[0], learning_rate_init=3000.0).partial_fit(X, y, classes=[0, 1, 2])


def test_rows_of_an_interrupted_stream_are_not_counted_twice(monkeypatch):
    X, y = load_iris(return_X_y=True)
    model = fresh(CLASSIFIERS[0]).partial_fit(X, y, classes=[0, 1, 2])
    monkeypatch.setattr(model._learner, "run", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(X, y)
    monkeypatch.undo()
    assert model.partial_fit(X, y).posterior_.ess == 2 * len(y)


@every_estimator
def test_defaults_converge_without_a_warning(estimator):
    X, y = data_for(estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh(estimator).fit(X, y).predict(X)


# -- streams -------------------------------------------------------------------------------------------------


@every_estimator
def test_partial_fit_counts_what_it_has_seen_and_learns(estimator):
    X, y = data_for(estimator)
    order = np.random.RandomState(0).permutation(len(y))
    X, y = X[order], y[order]
    model = fresh(estimator)
    classes = {} if isinstance(estimator, BayesianMLPRegressor) else {"classes": np.unique(y)}
    start = None
    passes = 3 if isinstance(estimator, BayesianLogisticRegression) else 30
    for _ in range(passes):  # more data of the same kind
        for rows in np.array_split(np.arange(len(y)), 3):
            model.partial_fit(X[rows], y[rows], **classes)
            start = start or model.loss_curve_[0]
            classes = {}
    assert model.loss_curve_[-1] < start
    if isinstance(estimator, BayesianLogisticRegression):
        assert model.posterior_.ess == 50  # the rest speaks through the prior
    else:
        assert model.posterior_.ess == passes * len(y)
        assert model.n_iter_ == 3 * passes
    assert model.score(X, y) > (0.2 if isinstance(estimator, BayesianMLPRegressor) else 0.85)


@every_estimator
def test_partial_fit_goes_on_from_fit_and_fit_starts_again(estimator):
    X, y = data_for(estimator)
    model = fresh(estimator).fit(X, y)
    fitted = answers(model, X)
    model.partial_fit(X[:50], y[:50])
    assert not np.array_equal(fitted, answers(model, X))
    np.testing.assert_array_equal(fitted, answers(model.fit(X, y), X))


@every_classifier
def test_classes_of_a_stream_must_be_known(estimator):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=r"classes=None: must list all classes in the first call to partial_fit"):
        fresh(estimator).partial_fit(X, y)
    model = fresh(estimator).partial_fit(X[:50], y[:50], classes=[0, 1, 2])
    assert model.predict_proba(X).shape == (150, 3)
    with pytest.raises(ValueError, match=r"must be those of the first call"):
        model.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"has the labels \[7\], must be among the classes \[0 1 2\]"):
        model.partial_fit(X[:2], [0, 7])


# -- pickles, pandas, other tools ----------------------------------------------------------------------------


@every_estimator
def test_a_pickled_model_predicts_and_goes_on_the_same(estimator):
    X, y = data_for(estimator)
    model = fresh(estimator).fit(X, y)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(model)), joblib.load(file)):
        np.testing.assert_array_equal(answers(model, X), answers(copied, X))
    copied = pickle.loads(pickle.dumps(model)).partial_fit(X, y)
    np.testing.assert_array_equal(answers(model.partial_fit(X, y), X), answers(copied, X))


@every_estimator
def test_pandas_in_and_feature_names_checked(estimator):
    X, y = data_for(estimator)
    frame = pd.DataFrame(X, columns=[f"feature {i}" for i in range(X.shape[1])])
    model = fresh(estimator).fit(frame, pd.Series(y))
    assert list(model.feature_names_in_) == list(frame.columns)
    np.testing.assert_array_equal(answers(model, frame), answers(fresh(estimator).fit(X, y), X))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[frame.columns[::-1]])


@every_classifier
def test_string_labels_and_probabilities(estimator):
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = fresh(estimator, max_iter=40).fit(X, names)
    probabilities, std = model.predict_proba(X, return_std=True)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), model.classes_[probabilities.argmax(1)])
    labels, label_std = model.predict(X, return_std=True)
    np.testing.assert_array_equal(label_std, std[np.arange(150), probabilities.argmax(1)])
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probabilities)
    assert np.mean(labels == names) > 0.9
    assert (std >= 0).all()
    assert label_std.max() > 5 * label_std[:50].mean()  # setosa is easy, the border is not


@every_estimator
def test_pipeline_and_grid_search(estimator):
    X, y = data_for(estimator)
    pipeline = make_pipeline(StandardScaler(), fresh(estimator))
    scores = cross_val_score(pipeline, X, y, cv=3)
    assert np.isfinite(scores).all()
    search = GridSearchCV(fresh(estimator), {"prior_precision": [0.3, 1e6]}, cv=3)
    assert search.fit(X, y).best_params_ == {"prior_precision": 0.3}  # the other has switched everything off


@every_estimator
def test_sample_weight_is_routed(estimator):
    X, y = data_for(estimator)
    weights = np.ones(len(y))
    pipeline = make_pipeline(StandardScaler(), fresh(estimator))
    step = pipeline.steps[-1][0]
    pipeline.fit(X, y, **{f"{step}__sample_weight": 2 * weights})
    assert pipeline[-1].posterior_.ess == 2 * len(y)
    with sklearn.config_context(enable_metadata_routing=True):
        asking = fresh(estimator).set_fit_request(sample_weight=True)
        arguments = {"cv": 3, "params": {"sample_weight": weights}}
        if hasattr(asking, "set_score_request"):
            asking = asking.set_score_request(sample_weight=False)
        plain = cross_val_score(fresh(estimator), X, y, cv=3)
        np.testing.assert_allclose(cross_val_score(asking, X, y, **arguments), plain)


@every_estimator
def test_parameters_survive_clone_and_set_params(estimator):
    model = clone(estimator).set_params(tol=0.5)
    assert clone(model).get_params() == model.get_params()
    assert "tol=0.5" in repr(model)


# -- wrong arguments -----------------------------------------------------------------------------------------

SHARED_ERRORS = [
    ({"max_iter": 0}, r"Invalid max_iter=0: must be an integer >= 1"),
    ({"n_posterior_samples": 2.5}, r"Invalid n_posterior_samples=2.5: must be an integer >= 1"),
    ({"learning_rate_init": -1}, r"Invalid learning_rate_init=-1: must be a finite number > 0"),
    ({"validation_fraction": 1.0}, r"Invalid validation_fraction=1.0: must be a number between 0 and 1"),
    ({"n_iter_no_change": "a"}, r"Invalid n_iter_no_change='a': must be an integer >= 1"),
    ({"tol": -0.1}, r"Invalid tol=-0.1: must be a number >= 0"),
    ({"standardize": "yes"}, r"Invalid standardize='yes': must be True or False"),
    ({"device": "abacus"}, r"Invalid device='abacus': must be the name of a torch device"),
    ({"prior_precision": 0}, r"Invalid prior_precision=0: must be a finite number > 0"),
]
NETWORK_ERRORS = [
    ({"hidden_layer_sizes": (10, 0)}, r"Invalid hidden_layer_sizes=\(10, 0\): must be integers >= 1"),
    ({"hidden_layer_sizes": None}, r"Invalid hidden_layer_sizes=None: must be a tuple of integers"),
    ({"activation": "swish"}, r"Invalid activation='swish': must be 'relu' or 'tanh'"),
    ({"optimizer": "adam"}, r"Invalid optimizer='adam': must be 'vprop' or 'ivon'"),
    ({"n_members": 0}, r"Invalid n_members=0: must be an integer >= 1"),
    ({"temperature": 0.0}, r"Invalid temperature=0.0: must be a finite number > 0"),
    ({"batch_size": "all"}, r"Invalid batch_size='all': must be 'auto' or an integer >= 1"),
    ({"batch_size": 0}, r"Invalid batch_size=0: must be an integer >= 1"),
    ({"betas": (0.9, 1.0)}, r"Invalid betas=\(0.9, 1.0\): must be a pair of numbers, each in \[0, 1\)"),
]
LINEAR_ERRORS = [
    ({"covariance": "low-rank"}, r"Invalid covariance='low-rank': must be 'auto' or 'full' or 'diagonal'"),
    ({"fit_intercept": "no"}, r"Invalid fit_intercept='no': must be True or False"),
]


@pytest.mark.parametrize(
    ("constructor", "arguments", "message"),
    [(type(e), *error) for e in ESTIMATORS for error in SHARED_ERRORS]
    + [(c, *error) for c in (BayesianMLPClassifier, BayesianMLPRegressor) for error in NETWORK_ERRORS]
    + [(BayesianLogisticRegression, *error) for error in LINEAR_ERRORS],
)
def test_wrong_arguments_are_named(constructor, arguments, message):
    for method in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=message):
            getattr(constructor(**arguments), method)([[0.0], [1.0]], [0, 1])


@every_estimator
def test_weights_that_are_none(estimator):
    X, y = data_for(estimator)
    with pytest.raises(ValueError, match="zero"):
        fresh(estimator).fit(X, y, sample_weight=np.zeros(len(y)))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        fresh(estimator).fit(X, y, sample_weight=-np.ones(len(y)))


@every_estimator
def test_a_failed_fit_leaves_the_model_as_it_was_or_unfitted(estimator, monkeypatch):
    X, y = (part[::5] for part in data_for(estimator))
    model = fresh(estimator, max_iter=1, n_posterior_samples=2).fit(X, y)
    before = answers(model, X)
    targets = np.column_stack([y, y]) if isinstance(estimator, BayesianMLPRegressor) else y
    with pytest.raises(ValueError, match="zero"):
        model.fit(X, targets, sample_weight=np.zeros(len(y)))
    assert model.predict(X).shape == y.shape
    assert np.array_equal(answers(model, X), before)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)
    monkeypatch.undo()
    classes = {} if isinstance(estimator, BayesianMLPRegressor) else {"classes": np.unique(y)}
    streams = [clone(model).partial_fit(X, y, **classes), model.partial_fit(X, y, **classes)]
    np.testing.assert_array_equal(answers(streams[0], X), answers(streams[1], X))  # nothing is left of what was cut off


@every_classifier
def test_log_loss_improves_with_training(estimator):
    X, y = data_for(estimator)
    losses = [log_loss(y, fresh(estimator, max_iter=n).fit(X, y).predict_proba(X)) for n in (1, 40)]
    assert losses[1] < 0.5 * losses[0]

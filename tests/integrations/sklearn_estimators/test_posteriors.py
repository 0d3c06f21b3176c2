"""Whether the statistics are right: intervals that cover, coefficients of the exact posterior, streams that add up."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris, make_friedman1

from vprop import Vprop
from vprop.baselines import exact_vi_logistic
from vprop.integrations.sklearn import BayesianLogisticRegression, BayesianMLPClassifier, BayesianMLPRegressor
from vprop.integrations.sklearn._data import Standardization, make_rows
from vprop.integrations.sklearn._likelihoods import Categorical
from vprop.integrations.sklearn._network import make_network
from vprop.integrations.sklearn._training import Learner


def line_with_a_gap(seed, rows=300, noise=0.3):
    """y = sin 2x + noise, x in [−2, −0.5] and [0.5, 2]."""
    random = np.random.RandomState(seed)
    x = random.uniform(0.5, 2, rows) * random.choice([-1, 1], rows)
    return x[:, None], np.sin(2 * x) + noise * random.randn(rows)


# -- regression ----------------------------------------------------------------------------------------------


def test_intervals_cover_and_the_noise_is_found():
    """Of 1000 new observations 90 % should lie in 90 % intervals; the standard error of that share is 0.0095."""
    X, y = line_with_a_gap(0)
    test_X, test_y = line_with_a_gap(1, rows=1000)
    model = BayesianMLPRegressor(random_state=0).fit(X, y)
    mean, std = model.predict(test_X, return_std=True)
    assert 0.27 < model.noise_std_ < 0.36
    assert abs(np.mean(np.abs(test_y - mean) < 1.645 * std) - 0.9) < 0.03
    assert abs(np.mean(np.abs(test_y - mean) < 0.6745 * std) - 0.5) < 0.06
    assert (std > model.noise_std_).all()


def test_error_bars_widen_where_there_are_no_data():
    X, y = line_with_a_gap(0)
    model = BayesianMLPRegressor(random_state=0).fit(X, y)
    _, std = model.predict([[1.2], [5.0], [10.0]], return_std=True)
    epistemic = np.sqrt(std**2 - model.noise_std_**2)
    assert epistemic[1] > 3 * epistemic[0]
    assert epistemic[2] > epistemic[1]


def test_more_data_leave_less_open():
    spreads = []
    for rows in (60, 600):
        X, y = make_friedman1(rows, noise=1.0, random_state=0)
        model = BayesianMLPRegressor(random_state=0, max_iter=100, optimizer="vprop").fit(X, y)
        _, std = model.predict(X, return_std=True)
        spreads.append(np.mean(std**2 - model.noise_std_**2))
    assert spreads[1] < 0.5 * spreads[0]


def test_more_data_make_narrower_intervals():
    widths = []
    for rows in (60, 600):
        X, y = make_friedman1(rows, noise=1.0, random_state=0)
        lower, upper = BayesianMLPRegressor(random_state=0, max_iter=100).fit(X, y).interval(X)
        widths.append(np.mean(upper - lower))
    assert widths[1] < 0.7 * widths[0]


def test_units_of_the_data_do_not_matter():
    """Whatever the units of features and target, the model is the same."""
    X, y = line_with_a_gap(0, rows=100)
    arguments = {"random_state": 0, "max_iter": 20, "n_members": 2}
    plain = BayesianMLPRegressor(**arguments).fit(X, y)
    other = BayesianMLPRegressor(**arguments).fit(1024 * X, 4096 * y)  # powers of two: no rounding
    for one, scaled in zip(plain.predict(X, return_std=True), other.predict(1024 * X, return_std=True), strict=True):
        np.testing.assert_allclose(4096 * one, scaled, rtol=1e-6)
    assert other.noise_std_ == pytest.approx(4096 * plain.noise_std_, rel=1e-6)


def test_several_outputs_each_with_its_noise():
    X, y = line_with_a_gap(0)
    random = np.random.RandomState(5)
    frame = pd.DataFrame({"sine": y, "line": 100 * X[:, 0] + 30 * random.randn(len(y))})
    model = BayesianMLPRegressor(random_state=0).fit(X, frame)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (300, 2)
    np.testing.assert_allclose(model.noise_std_, [0.3, 30], rtol=0.2)
    assert model.score(X, frame) > 0.8
    with pytest.raises(ValueError, match=r"has 1 columns, must have 2"):
        model.partial_fit(X, y)


def test_a_constant_target_and_a_constant_feature():
    X = np.column_stack([np.full(50, 3.7), np.arange(50.0)])
    mean, std = BayesianMLPRegressor(random_state=0, max_iter=50).fit(X, np.full(50, 12.5)).predict(X, return_std=True)
    np.testing.assert_allclose(mean, 12.5, atol=0.5)
    assert np.isfinite(std).all()


def test_weights_shift_the_mean_and_the_scales():
    """Two groups of targets, 0 and 10, at the same place: the heavier one wins."""
    X, y = np.zeros((40, 1)), np.repeat([0.0, 10.0], 20)
    model = BayesianMLPRegressor(random_state=0).fit(X, y, sample_weight=np.repeat([1.0, 3.0], 20))
    assert model.predict([[0.0]])[0] == pytest.approx(7.5, abs=0.3)
    assert model.noise_std_ == pytest.approx(np.sqrt(0.25 * 0.75) * 10, rel=0.1)


# -- classification ------------------------------------------------------------------------------------------


def test_members_and_optimizers():
    X, y = load_iris(return_X_y=True)
    for arguments in ({"n_members": 1}, {"n_members": 3, "hidden_layer_sizes": ()}, {"optimizer": "ivon"}):
        model = BayesianMLPClassifier(random_state=0, max_iter=150, **arguments).fit(X, y)
        assert model.score(X, y) > 0.93, arguments
        members = arguments.get("n_members", 4)
        assert all(len(mean) == members for mean in model.posterior_.mean.values())


def test_members_are_trained_as_if_alone():
    """Without noise in the weights, each of three members ends where it would have ended by itself."""
    X, y = load_iris(return_X_y=True)
    rows = make_rows(X, y, np.ones(len(y)), torch.float64, "cpu")

    def trained(network):
        optimizer = Vprop(network.parameters(), lr=0.1, num_data=rows.count, mc_samples=0)
        learner = Learner(network, optimizer, Categorical())
        for _ in range(20):
            learner.step(rows)
        return network.state_dict()

    together = make_network(3, 4, (5,), 3, "tanh", seed=0)
    alone = [make_network(1, 4, (5,), 3, "tanh", seed=0) for _ in range(3)]
    for member, network in enumerate(alone):
        network.load_state_dict({name: p[member : member + 1] for name, p in together.state_dict().items()})
    start = together.state_dict()["0.weight"].clone()
    result = trained(together)
    assert not torch.allclose(result["0.weight"], start, atol=0.01)
    for member, network in enumerate(alone):
        for name, p in trained(network).items():
            torch.testing.assert_close(result[name][member], p[0])


def test_rare_values_do_not_outweigh_all_else():
    """A feature that was nonzero once in training, far out in a new row, moves it no more than a few units."""
    scaling = Standardization.of(np.eye(1, 1000).T, np.ones(1000), linear_within=3.0)
    far = scaling.apply(np.array([[1.0], [1e6]]))
    assert 3 < far[0, 0] < far[1, 0] < 25
    inside = Standardization.of(np.arange(10.0)[:, None], np.ones(10), linear_within=3.0)
    np.testing.assert_allclose(
        inside.apply(np.arange(10.0)[:, None])[:, 0], (np.arange(10) - 4.5) / np.arange(10).std()
    )


def test_standardization_can_be_left_out():
    X, y = load_iris(return_X_y=True)
    arguments = {"random_state": 0, "max_iter": 3, "standardize": False, "learning_rate_init": 1e-5}
    model, shifted = (BayesianMLPClassifier(**arguments).fit(X + d, y) for d in (0, 100))
    assert not np.allclose(model.predict_proba(X), shifted.predict_proba(X + 100), atol=1e-3)
    model, shifted = (BayesianMLPClassifier(random_state=0, max_iter=3).fit(X + d, y) for d in (0, 100))
    np.testing.assert_allclose(model.predict_proba(X), shifted.predict_proba(X + 100), atol=1e-3)


# -- logistic regression -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cancer():
    X, y = load_breast_cancer(return_X_y=True)
    return X[:, :10], y


def standardized(X):
    return torch.tensor((X - X.mean(0)) / X.std(0))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_coefficients_are_those_of_the_exact_posterior(cancer, covariance):
    """To a quarter of a posterior standard deviation, and 5 % (full) or 10 % of the standard deviations."""
    X, y = standardized(cancer[0]), cancer[1]
    exact = exact_vi_logistic(X, torch.tensor(y), 1.0, covariance)
    model = BayesianLogisticRegression(1.0, random_state=0, covariance=covariance, fit_intercept=False, max_iter=150)
    scale = np.arange(1.0, 11.0)
    model.fit(X.numpy() * scale, y)
    exact_std = exact.variance.sqrt().numpy()
    error = (model.coef_[0] * scale - exact.mean.numpy()) / exact_std
    assert np.abs(error).max() < 0.25
    tolerance = 0.05 if covariance == "full" else 0.1
    np.testing.assert_allclose(model.coef_std_[0] * scale, exact_std, rtol=tolerance)
    assert abs(model.elbo_ - exact.elbo) < 1.5


def test_coefficients_are_in_the_units_of_the_features(cancer):
    """σ(x·coef + intercept) is the probability at the posterior mean, and the spreads are those of the samples."""
    X, y = cancer
    model = BayesianLogisticRegression(random_state=0, n_posterior_samples=600).fit(X, y)
    logits = np.log(model.predict_proba(X)) @ [-1, 1]
    plain = X @ model.coef_[0] + model.intercept_
    assert np.corrcoef(logits, plain)[0, 1] > 0.98
    assert np.mean((plain > 0) == (model.predict(X) == 1)) > 0.99
    samples = [model.posterior_.sample(seed=seed) for seed in range(600)]
    weights = np.stack([sample["weight"][0].numpy() for sample in samples]) / X.std(0)
    biases = np.stack([sample["bias"][0].numpy() for sample in samples]) - weights @ X.mean(0)
    np.testing.assert_allclose(weights.std(0), model.coef_std_[0], rtol=0.15)  # five standard errors
    np.testing.assert_allclose(biases.std(), model.intercept_std_[0], rtol=0.15)
    np.testing.assert_allclose(biases.mean(), model.intercept_[0], atol=0.2 * model.intercept_std_[0])


def test_a_stream_ends_where_fit_does(cancer):
    """Bayes' rule in five parts: means within half a posterior standard deviation, widths within 15 %."""
    X, y = cancer
    order = np.random.RandomState(0).permutation(len(y))
    X, y = (X[order] - X.mean(0)) / X.std(0), y[order]
    whole, stream = (BayesianLogisticRegression(random_state=0, standardize=False, max_iter=60) for _ in range(2))
    whole.fit(X, y)
    for part in np.array_split(np.arange(len(y)), 5):
        stream.partial_fit(X[part], y[part], classes=[0, 1])
    assert np.abs((stream.coef_ - whole.coef_) / whole.coef_std_).max() < 0.5
    np.testing.assert_allclose(stream.coef_std_, whole.coef_std_, rtol=0.15)


def test_several_classes_and_the_automatic_prior():
    X, y = load_iris(return_X_y=True)
    model = BayesianLogisticRegression(random_state=0).fit(X, y)
    assert model.coef_.shape == model.coef_std_.shape == (3, 4)
    assert model.intercept_.shape == (3,)
    assert model.score(X, y) > 0.93
    noise = np.random.RandomState(0).randn(len(X), 10)
    informed = BayesianLogisticRegression("auto", random_state=0).fit(X, y)
    doubtful = BayesianLogisticRegression("auto", random_state=0).fit(noise, y)
    assert informed.prior_precision_ < 1 < 3 < doubtful.prior_precision_
    for found in (informed, doubtful):  # λ that maximizes the ELBO, D/E‖w‖²: the steps of a fit are enough
        moment = found.posterior_.mean["weight"].square() + found.posterior_.variance["weight"]
        assert found.prior_precision_ == pytest.approx(1 / float(moment.mean()), rel=0.1)
    trusting = BayesianLogisticRegression(random_state=0).fit(noise, y)
    spread, trusting_spread = (np.abs(m.predict_proba(noise) - 1 / 3).mean() for m in (doubtful, trusting))
    assert spread < 0.9 * trusting_spread


def test_the_intercept_is_hardly_shrunk():
    """A feature that says nothing, 5 % of class 1: the prior of the intercept must not pull this to one half."""
    random = np.random.RandomState(0)
    X, y = random.randn(400, 1), (np.arange(400) < 20).astype(int)
    model = BayesianLogisticRegression(random_state=0).fit(X, y)
    assert model.predict_proba(X)[:, 1].mean() == pytest.approx(0.05, abs=0.01)
    without = BayesianLogisticRegression(random_state=0, fit_intercept=False).fit(X, y)
    assert without.predict_proba(X)[:, 1].mean() == pytest.approx(0.5, abs=0.1)


def test_without_an_intercept_the_origin_stays_and_a_column_of_ones_is_one():
    X, y = np.random.RandomState(0).randn(60, 1) + 3, (np.arange(60) < 6).astype(int)
    quick = {"max_iter": 15, "n_posterior_samples": 8, "random_state": 0, "fit_intercept": False}
    ones = BayesianLogisticRegression(0.01, **quick).fit(np.c_[X, np.ones(60)], y)
    assert ones.coef_[0, 1] < -1  # a tenth are of class 1
    assert ones.intercept_ == ones.intercept_std_ == 0
    assert ones.predict_proba([[0.0, 0.0]])[0, 1] == 0.5

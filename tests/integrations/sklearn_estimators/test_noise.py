"""Noise of the regressor: densities, quantiles, what held-out rows teach about it, what predictions make of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.base import clone

from vprop.integrations.sklearn import BayesianMLPRegressor
from vprop.integrations.sklearn._data import make_rows
from vprop.integrations.sklearn._folds import held_out_outputs, make_folds
from vprop.integrations.sklearn._noise import Noise, fitted_noise, mixture_log_density, mixture_quantile

SMALL = {"hidden_layer_sizes": (20,), "n_members": 2, "max_iter": 100, "n_posterior_samples": 32, "random_state": 0}


def wave(rows, seed, outliers=False):
    """y = sin x₁ + noise of 0.3, five features of which one matters; Student's t with three degrees if asked for."""
    random = np.random.RandomState(seed)
    X = random.uniform(-2, 2, (rows, 5))
    noise = random.standard_t(3, rows) if outliers else random.randn(rows)
    return X, np.sin(X[:, 0]) + 0.3 * noise


# -- formulas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [Noise(0.7), Noise(0.7, 3.0), Noise(2.0, 10.0)])
def test_density_distribution_and_variance_are_scipys(noise):
    theirs = scipy.stats.norm(scale=noise.scale)
    if math.isfinite(noise.dof):
        theirs = scipy.stats.t(noise.dof, scale=noise.scale)
    z = np.linspace(-5, 5, 11)
    np.testing.assert_allclose(noise.log_density(z), theirs.logpdf(z), rtol=1e-12)
    np.testing.assert_allclose(noise.below(z), theirs.cdf(z), rtol=1e-10)
    assert noise.variance == pytest.approx(theirs.var())


@pytest.mark.parametrize("noise", [Noise(0.7), Noise(0.01, 3.0), Noise(20.0, 4.0)])
@pytest.mark.parametrize("probability", [0.001, 0.05, 0.5, 0.95])
def test_quantiles_are_those_of_the_mixture(noise, probability):
    outputs = np.random.RandomState(0).randn(40, 7) * [[0.0, 1e-6, 0.1, 1.0, 3.0, 10.0, 30.0]]
    points = mixture_quantile(outputs, noise, probability)
    # A quantile within 1e-5 scales is a probability within 1e-5 times the density, which is below 0.4 per scale.
    np.testing.assert_allclose(noise.below(points - outputs).mean(0), probability, atol=4e-6)


def test_a_mixture_of_one_part_has_that_parts_quantiles():
    points = mixture_quantile(np.array([[2.0, -5.0]]), Noise(0.5, 4.0), 0.95)
    np.testing.assert_allclose(points, [2.0, -5.0] + 0.5 * scipy.stats.t(4).ppf(0.95), rtol=1e-6)


def test_log_densities_of_several_columns_belong_to_one_sample():
    """Two samples, two columns: the mean over samples of products, not the product of means."""
    outputs = np.array([[[0.0, 0.0]], [[3.0, 3.0]]])
    noises, y = [Noise(1.0), Noise(2.0, 5.0)], np.array([[0.1, 2.5]])
    first, second = scipy.stats.norm(), scipy.stats.t(5, scale=2)
    by_hand = np.mean([first.pdf(0.1 - m) * second.pdf(2.5 - m) for m in (0.0, 3.0)])
    np.testing.assert_allclose(mixture_log_density(outputs, y, noises), [np.log(by_hand)], rtol=1e-12)


def test_the_noise_that_made_the_data_is_found():
    """4000 rows: the scale has a standard error of about 1.5 %, four of them are allowed."""
    random = np.random.RandomState(0)
    outputs, ones = np.zeros((1, 4000)), np.ones(4000)
    normal, _ = fitted_noise(outputs, 0.5 * random.randn(4000), ones, "student_t")
    assert normal.dof >= 30
    assert normal.scale == pytest.approx(0.5, rel=0.06)
    heavy, _ = fitted_noise(outputs, 0.5 * random.standard_t(3, 4000), ones, "student_t")
    assert heavy.dof in (3, 4)
    assert heavy.scale == pytest.approx(0.5, rel=0.1)
    y = random.randn(4000)
    plain, density = fitted_noise(outputs, y, ones, "normal")
    assert plain.scale == pytest.approx(np.sqrt(np.mean(y**2)), rel=2e-3)  # the maximum of the likelihood
    assert density == pytest.approx(scipy.stats.norm(scale=plain.scale).logpdf(y).mean())
    halves = np.repeat([1.0, 0.0], 2000)
    weighted, _ = fitted_noise(outputs, y, halves, "normal")
    assert weighted.scale == pytest.approx(np.sqrt(np.mean(y[:2000] ** 2)), rel=2e-3)


def test_what_is_spread_of_the_outputs_is_not_noise():
    """Rows drawn from outputs with a spread of 1 and noise of 0.5: the mixture needs no more than that noise."""
    random = np.random.RandomState(0)
    outputs = random.randn(300, 2000)
    noise, _ = fitted_noise(outputs, random.randn(2000) + 0.5 * random.randn(2000), np.ones(2000), "normal")
    assert noise.scale == pytest.approx(0.5, rel=0.15)


# -- folds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "parts", "largest"), [(4, 2, 2), (95, 10, 10), (1000, 10, 100), (8000, 2, 800), (80_000, 1, 5000)]
)
def test_rows_are_held_out_until_there_are_enough(rows, parts, largest):
    data = make_rows(np.zeros((rows, 1)), np.zeros((rows, 1)), np.ones(rows), torch.float32, "cpu")
    folds = make_folds(data, 10, 3, np.random.RandomState(0))
    assert len(folds.held_out) == parts
    assert max(len(part) for part in folds.held_out) == largest
    held = torch.cat(folds.held_out)
    assert len(held.unique()) == len(held)
    assert rows > 1000 or len(held) == rows


def test_networks_do_not_see_what_is_held_out_and_the_rest_counts_fully():
    weights = np.arange(1.0, 21.0)
    data = make_rows(np.zeros((20, 1)), np.zeros((20, 1)), weights, torch.float64, "cpu")
    folds = make_folds(data, 5, 2, np.random.RandomState(0))
    assert folds.networks == 10
    for network in range(10):
        hidden = folds.held_out[network // 2]
        mine = folds.rows.weights[network]
        assert (mine[hidden] == 0).all()
        assert float(mine.mean()) == pytest.approx(1)
        seen = mine > 0
        assert int(seen.sum()) == 20 - len(hidden)
        ratio = mine[seen] / torch.tensor(weights)[seen]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert folds.rows.count == pytest.approx(0.8 * weights.sum())


def test_outputs_for_a_row_are_those_of_networks_without_it():
    data = make_rows(np.zeros((6, 1)), np.zeros((6, 1)), np.ones(6), torch.float64, "cpu")
    folds = make_folds(data, 3, 2, np.random.RandomState(0))
    network = torch.arange(6.0).view(1, 6, 1, 1).expand(4, 6, 6, 1)  # every output is the number of its network
    outputs = held_out_outputs(folds, network)
    assert outputs.shape == (8, 6, 1)
    np.testing.assert_array_equal(np.unique(outputs[:, :2]), [0, 1])
    np.testing.assert_array_equal(np.unique(outputs[:, 4:]), [4, 5])


# -- the regressor -------------------------------------------------------------------------------------------


def test_intervals_cover_new_rows_where_residuals_of_training_do_not():
    """A network that can fit its rows closely. The standard error of the share is 0.007, plus that of the fit."""
    (X, y), (new_X, new_y) = wave(150, seed=0), wave(2000, seed=1)
    shares = {}
    for folds in (0, 5):
        model = BayesianMLPRegressor(noise_folds=folds, max_iter=400, random_state=0).fit(X, y)
        lower, upper = model.interval(new_X, level=0.9)
        shares[folds] = np.mean((lower < new_y) & (new_y < upper))
    assert shares[0] < 0.75
    assert abs(shares[5] - 0.9) < 0.04


def test_held_out_rows_decide_the_noise_and_nothing_else():
    X, y = wave(150, seed=0)
    arguments = SMALL | {"prior_precision": 1.0}
    held_out, training = (BayesianMLPRegressor(**arguments, noise_folds=folds).fit(X, y) for folds in (10, 0))
    for name, mean in training.posterior_.mean.items():
        assert torch.equal(held_out.posterior_.mean[name], mean)
        assert torch.equal(held_out.posterior_.variance[name], training.posterior_.variance[name])
    np.testing.assert_array_equal(held_out.predict(X), training.predict(X))
    assert held_out.noise_std_ > training.noise_std_
    assert np.isfinite(held_out.held_out_log_density_)
    assert not hasattr(training, "held_out_log_density_")
    assert not hasattr(held_out.set_params(noise_folds=0).fit(X, y), "held_out_log_density_")


def test_heavy_tails_are_found_and_pay():
    """Test log-density with Student's t above that with the normal, where the noise has three degrees of freedom."""
    (X, y), (new_X, new_y) = wave(300, seed=0, outliers=True), wave(1000, seed=1, outliers=True)
    normal, student = (BayesianMLPRegressor(**SMALL, noise=noise).fit(X, y) for noise in ("normal", "student_t"))
    assert normal.noise_dof_ == math.inf
    assert student.noise_dof_ <= 6
    assert student.held_out_log_density_ > normal.held_out_log_density_ + 0.02
    assert student.log_density(new_X, new_y).mean() > normal.log_density(new_X, new_y).mean() + 0.02


def test_log_density_is_that_of_the_mixture_in_units_of_the_target():
    X, y = wave(100, seed=0)
    model = BayesianMLPRegressor(**SMALL).fit(X, 50 * y + 1000)
    logs = model.log_density(X[:3], 50 * y[:3] + 1000)
    grid = np.linspace(1000 - 3000, 1000 + 3000, 60_001)
    density = np.exp(model.log_density(np.repeat(X[:1], len(grid), axis=0), grid))
    assert np.sum(density) * (grid[1] - grid[0]) == pytest.approx(1, abs=1e-3)
    lower, upper = model.interval(X[:1], level=0.8)
    inside = (grid > lower) & (grid < upper)
    assert np.sum(density[inside]) * (grid[1] - grid[0]) == pytest.approx(0.8, abs=2e-3)
    assert np.interp(50 * y[0] + 1000, grid, density) == pytest.approx(np.exp(logs[0]), rel=1e-3)


def test_several_columns_have_noise_and_bounds_of_their_own():
    X, y = wave(200, seed=0)
    random = np.random.RandomState(3)
    targets = np.column_stack([y, 100 * X[:, 1] + 20 * random.randn(200)])
    model = BayesianMLPRegressor(**SMALL).fit(X, targets)
    lower, upper = model.interval(X)
    assert lower.shape == upper.shape == (200, 2)
    assert model.noise_std_.shape == model.noise_dof_.shape == (2,)
    assert model.log_density(X, targets).shape == (200,)
    np.testing.assert_allclose(np.mean((lower < targets) & (targets < upper), axis=0), 0.9, atol=0.1)
    with pytest.raises(ValueError, match=r"has 1 columns, must have 2 as in fit"):
        model.log_density(X, y)


def test_early_stopping_learns_the_noise_from_its_own_rows(monkeypatch):
    X, y = wave(200, seed=0)
    monkeypatch.setattr(BayesianMLPRegressor, "_held_out_in_turn", None)  # no further networks are trained
    model = BayesianMLPRegressor(**SMALL, early_stopping=True, validation_fraction=0.3).fit(X, y)
    assert np.isfinite(model.held_out_log_density_)


def test_partial_fit_keeps_shape_and_ratio_of_the_noise():
    X, y = wave(200, seed=0, outliers=True)
    model = BayesianMLPRegressor(**SMALL).fit(X, y)
    ratio, dof = model.noise_std_ / math.sqrt(float(model._learner.likelihood.noise.mean())), model.noise_dof_
    model.partial_fit(X, y)
    assert model.noise_dof_ == dof
    assert model.noise_std_ / math.sqrt(float(model._learner.likelihood.noise.mean())) == pytest.approx(ratio)
    stream = BayesianMLPRegressor(**SMALL).partial_fit(X, y)
    assert stream.noise_dof_ == math.inf
    assert len(stream.interval(X)[0]) == 200


def test_the_posterior_has_the_noise_that_predictions_have():
    X, y = wave(100, seed=0)
    model = BayesianMLPRegressor(**SMALL, standardize=False).fit(X, y)
    assert model.posterior_.noise_variance.flatten().sqrt().tolist() == pytest.approx([model.noise_std_] * 2, rel=1e-6)
    assert (model.predict(X, return_std=True)[1] > model.noise_std_).all()


def test_held_out_rows_choose_the_prior():
    """Targets without any signal want more shrinkage than a function without noise; a number is left alone."""
    X, _ = wave(150, seed=0)
    noise = np.random.RandomState(7).randn(150)
    shrunk = BayesianMLPRegressor(**SMALL).fit(X, noise)
    free = BayesianMLPRegressor(**SMALL).fit(X[:, :1], np.sin(3 * X[:, 0]))
    assert (shrunk.prior_precision_, free.prior_precision_) == (10.0, 1.0)
    alone = BayesianMLPRegressor(**SMALL | {"prior_precision": 10.0}).fit(X, noise)
    np.testing.assert_array_equal(alone.predict(X), shrunk.predict(X))
    assert alone.held_out_log_density_ == shrunk.held_out_log_density_
    assert BayesianMLPRegressor(**SMALL, noise_folds=0).fit(X, noise).prior_precision_ == 1.0
    assert BayesianMLPRegressor(**SMALL).partial_fit(X, noise).prior_precision_ == 1.0
    assert not any(isinstance(value, np.ndarray) and value.size > 1000 for value in vars(shrunk).values())


@pytest.mark.parametrize("optimizer", ["vario", "vprop", "ivon"])
def test_every_optimizer_learns_with_steps_of_its_own(optimizer):
    (X, y), (new_X, new_y) = wave(300, seed=0), wave(500, seed=1)
    model = BayesianMLPRegressor(**SMALL, optimizer=optimizer, noise_folds=3).fit(X, y)
    assert model.score(new_X, new_y) > 0.6
    assert model.learning_rate_init is model.betas is None
    assert clone(model).get_params() == model.get_params()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": "cauchy"}, r"Invalid noise='cauchy': must be 'normal' or 'student_t'"),
        ({"noise_folds": 1}, r"Invalid noise_folds=1: must be 0 or an integer >= 2"),
        ({"noise_folds": -1}, r"Invalid noise_folds=-1: must be an integer >= 0"),
        ({"prior_precision": "flat"}, r"Invalid prior_precision='flat': must be a finite number > 0 or 'auto'"),
        ({"weight_noise_limit": 0}, r"Invalid weight_noise_limit=0: must be a finite number > 0"),
        ({"learning_rate_init": "a"}, r"Invalid learning_rate_init='a': must be a finite number > 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BayesianMLPRegressor(**arguments).fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("level", [0, 1, 1.5, "90 %"])
def test_a_level_is_a_probability(level):
    model = BayesianMLPRegressor(**SMALL | {"max_iter": 1}).fit(*wave(20, seed=0))
    with pytest.raises(ValueError, match=r"Invalid level=.*: must be a number between 0 and 1"):
        model.interval(np.zeros((1, 5)), level=level)


def test_partial_fit_counts_the_examples_of_each_calls_batches():
    """The first rows may be few, and their number must not scale the curvature of later mini-batches."""
    X, y = wave(200, seed=0)
    model = BayesianMLPRegressor(**SMALL).partial_fit(X[:10], y[:10])
    sizes = [model._learner.optimizer.param_groups[0]["batch_size"]]
    for weight in (1.0, 2.0):
        model.partial_fit(X[10:], y[10:], sample_weight=np.full(190, weight))
        sizes.append(model._learner.optimizer.param_groups[0]["batch_size"])
    assert sizes == pytest.approx([10, 64, 128])

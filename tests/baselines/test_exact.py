"""Exact variational inference for logistic regression: that the optimum is one, and known values."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, special

from vprop.baselines import ExactVI, exact_vi_logistic
from vprop.functional import logistic

STRUCTURES = ["diagonal", "full"]


def make_problem(rows=80, columns=5, seed=0):
    random = np.random.RandomState(seed)
    X = random.randn(rows, columns)
    X[:, 1] += 0.8 * X[:, 0]  # correlations, so that the two structures differ
    y = random.rand(rows) < special.expit(X @ random.randn(columns))
    return torch.tensor(X), torch.tensor(y)


def read_libsvm(name, features):
    """A LIBSVM file as dense tensors; the test is skipped where the data are not."""
    folder = Path(os.environ.get("VPROP_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
    path = folder / "libsvm" / name
    if not path.exists():
        pytest.skip(f"{name} is not there: set VPROP_DATA to a folder with libsvm/{name}")
    labels, rows = [], []
    for line in path.read_text().splitlines():
        label, *entries = line.split()
        row = np.zeros(features)
        for entry in entries:
            index, value = entry.split(":")
            row[int(index) - 1] = float(value)
        labels.append(float(label))
        rows.append(row)
    return torch.tensor(np.array(rows)), torch.tensor(labels)


def spread_of(result):
    return result.variance if result.structure == "diagonal" else result.covariance


def assert_is_optimal(X, y, precision, result):
    """A fixed point of the natural-gradient step, and nothing nearby is better."""
    assert result.gradient_norm <= 1e-6
    mean_logit, std_logit = logistic.logit_moments(X, result.mean, spread_of(result))
    hessian = (X.T * logistic.expected_slope(mean_logit, std_logit)) @ X + precision * torch.eye(X.shape[1])
    residual = logistic.expected_sigmoid(mean_logit, std_logit) - y.double()
    scale = hessian.diagonal().sqrt()
    assert float(((X.T @ residual + precision * result.mean) / scale).abs().max()) < 2e-6
    if result.structure == "diagonal":
        torch.testing.assert_close(result.variance.reciprocal(), hessian.diagonal(), rtol=1e-5, atol=0)
        torch.testing.assert_close(result.covariance, result.variance.diag(), rtol=0, atol=0)
    else:
        whitened = torch.linalg.cholesky(hessian).T @ result.covariance @ torch.linalg.cholesky(hessian)
        torch.testing.assert_close(whitened, torch.eye(len(scale), dtype=torch.float64), rtol=0, atol=1e-5)
        torch.testing.assert_close(result.covariance.diagonal(), result.variance)

    def elbo(mean, spread):
        return float(logistic.elbo(X, y, mean, spread, precision))

    assert result.elbo == pytest.approx(elbo(result.mean, spread_of(result)), abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.1):
        for _ in range(10):
            direction = torch.randn(len(scale), generator=generator, dtype=torch.float64)
            assert elbo(result.mean + size * direction / scale, spread_of(result)) < result.elbo
            if result.structure == "diagonal":
                spread = result.variance * (size * direction).exp()
            else:
                factor = torch.linalg.cholesky(result.covariance) @ direction
                spread = result.covariance + (size / len(scale)) * torch.outer(factor, factor)
            assert elbo(result.mean, spread) < result.elbo


# -- the optimum -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("precision", [0.01, 1.0, 50.0])
def test_the_optimum_is_one(structure, precision):
    X, y = make_problem()
    result = exact_vi_logistic(X, y, precision, structure)
    assert result.structure == structure
    assert_is_optimal(X, y, precision, result)


def test_a_richer_structure_is_closer_to_the_evidence():
    """Laplace < exact, diagonal < full, and all of them below log p(y), here an integral over two weights."""
    X, y = make_problem(columns=2)
    diagonal, full = (exact_vi_logistic(X, y, 1.0, structure) for structure in STRUCTURES)
    signs = 2 * y.numpy() - 1

    def joint(first, second):
        logits = signs * (X.numpy() @ np.array([first, second]))
        log_prior = -0.5 * (first**2 + second**2) - math.log(2 * math.pi)
        return math.exp(log_prior - np.logaddexp(0, -logits).sum() - full.elbo)

    low, high = full.mean - 8 * full.variance.sqrt(), full.mean + 8 * full.variance.sqrt()
    ratio = integrate.dblquad(lambda b, a: joint(a, b), low[0], high[0], low[1], high[1], epsabs=1e-6)[0]
    assert diagonal.elbo < full.elbo < full.elbo + math.log(ratio)
    assert math.log(ratio) < 0.02  # a nearly Gaussian posterior
    precision = torch.linalg.inv(full.covariance)
    laplace = logistic.elbo(X, y, full.mean, precision.diagonal().reciprocal().diag(), 1.0)
    assert float(laplace) < diagonal.elbo


def test_small_features_are_linear_regression():
    """σ' = ¼ where the logits are small: precision λI + XᵀX/4, mean its inverse times Xᵀ(y−½)."""
    X, y = make_problem()
    X = 1e-2 * X
    result = exact_vi_logistic(X, y, 1.0, "full", tolerance=1e-8)
    precision = X.T @ X / 4 + torch.eye(X.shape[1], dtype=torch.float64)
    mean = torch.linalg.solve(precision, X.T @ (y.double() - 0.5))
    # weights of size 1 make logits of size 0.03, so the curvature is ¼ to about 1e-3, and its part of the precision
    # is 80·1e-4/4 = 2e-3 of the whole
    torch.testing.assert_close(result.covariance, torch.linalg.inv(precision), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.mean, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("rows", "columns", "precision"), [(50, 5, 1e-5), (20, 60, 1e-3), (1, 1, 1.0), (30, 4, 1e4)])
def test_hard_ones_converge(structure, rows, columns, precision):
    """Separable classes with a nearly flat prior, more features than examples, one example, a dominant prior."""
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    X[:, -1] *= 30
    y = X[:, 0] > 0
    assert_is_optimal(X, y, precision, exact_vi_logistic(X, y, precision, structure))


def test_features_that_say_nothing_keep_the_prior():
    X, y = make_problem(columns=3)
    X[:, 2] = 0
    X[:7] = 0
    for structure in STRUCTURES:
        result = exact_vi_logistic(X, y, 4.0, structure)
        assert float(result.variance[2]) == pytest.approx(0.25, rel=1e-6)
        assert float(result.mean[2]) == pytest.approx(0.0, abs=1e-6)


# -- known values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("structure", "elbo"), [("diagonal", -613.392), ("full", -591.990)])
def test_a1a(structure, elbo):
    X, y = read_libsvm("a1a", 123)
    result = exact_vi_logistic(X, y, 2.8072, structure)
    assert result.elbo == pytest.approx(elbo, abs=1e-3)
    assert_is_optimal(X, (y + 1) / 2, 2.8072, result)


def test_a1a_with_a_nearly_flat_prior():
    """Directions in which the classes are separable make the Laplace approximation a very bad first guess."""
    X, y = read_libsvm("a1a", 123)
    assert exact_vi_logistic(X, y, 1e-5, "full").elbo == pytest.approx(-961.370, abs=1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_australian(structure):
    X, y = read_libsvm("australian_scale", 14)
    half = torch.randperm(690, generator=torch.Generator().manual_seed(0))[:345]
    X, y = torch.cat([X, torch.ones(690, 1, dtype=X.dtype)], 1)[half], y[half]
    assert_is_optimal(X, (y + 1) / 2, 1e-5, exact_vi_logistic(X, y, 1e-5, structure))


# -- arguments -------------------------------------------------------------------------------------------------------


def test_labels_and_dtypes():
    X, y = make_problem()
    X = X.float()
    expected = exact_vi_logistic(X.double(), y, 1.0)
    assert expected.mean.dtype == expected.covariance.dtype == torch.float64
    for labels in (y.long(), 2 * y.float() - 1, y[:, None].int(), y.to(torch.int8) * 2 - 1):
        result = exact_vi_logistic(X, labels, 1)
        torch.testing.assert_close(result.mean, expected.mean, rtol=0, atol=0)
    with torch.no_grad():
        assert exact_vi_logistic(X, y, 1.0).elbo == expected.elbo
    assert exact_vi_logistic(X, torch.ones(len(X)), 1.0).mean.isfinite().all()  # one class only


def test_the_result_and_what_it_leaves_alone():
    X, y = make_problem()
    before, state = X.clone(), torch.get_rng_state()
    result = exact_vi_logistic(X, y, 1.0)
    assert torch.equal(X, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(result, ExactVI)
    assert repr(result).startswith("ExactVI(diagonal, 5 weights, elbo=-")
    assert 1 <= result.iterations < 50
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.elbo = 0.0
    for tensor in (result.mean, result.variance, result.covariance):
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"structure": "x"}, r"Invalid structure='x': must be 'diagonal' or 'full'\. "),
        ({"prior_precision": 0.0}, r"Invalid prior_precision=0\.0: must be a finite number > 0\. "),
        ({"prior_precision": "1"}, r"Invalid prior_precision='1': must be a finite number > 0\. "),
        ({"prior_precision": math.inf}, r"Invalid prior_precision=inf: must be a finite number > 0\. "),
        ({"prior_precision": True}, r"Invalid prior_precision=True: must be a finite number > 0\. "),
        ({"tolerance": -1.0}, r"Invalid tolerance=-1\.0: must be a finite number > 0\. "),
        ({"max_iterations": 0}, r"Invalid max_iterations=0: must be an integer >= 1\. "),
        ({"X": torch.ones(4)}, r"Invalid X: has shape \(4,\), must be \(examples, features\).*X\[:, None\]"),
        ({"X": torch.ones(0, 3)}, r"Invalid X: has shape \(0, 3\), must be"),
        ({"X": torch.tensor([[1.0], [math.nan]])}, r"Invalid X: 1 entries are NaN or infinite, must be finite"),
        ({"y": torch.ones(3)}, r"Invalid y: has shape \(3,\), must be \(2,\)\. Pass one label"),
        ({"y": torch.tensor([1.0, 2.0])}, r"Invalid y: has values \[1\.0, 2\.0\], must be 0 and 1, -1 and \+1, or"),
        ({"y": torch.tensor([-1.0, 0.0])}, r"Invalid y: has values \[-1\.0, 0\.0\], must be"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {"X": torch.ones(2, 1), "y": torch.tensor([0, 1]), "prior_precision": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        exact_vi_logistic(**arguments)


def test_no_convergence_is_an_error():
    X, y = make_problem()
    with pytest.raises(RuntimeError, match=r"norm of the gradient is \d.* after 2 iterations.*Raise max_iterations=2"):
        exact_vi_logistic(X, y, 0.01, max_iterations=2)
    with pytest.raises(RuntimeError, match=r"must be <= tolerance=1e-300"):  # below rounding: it gives up
        exact_vi_logistic(X, y, 0.01, tolerance=1e-300)

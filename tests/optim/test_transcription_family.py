"""CVI, VON, VONG, VOGN, the sampled Fisher and BBVI, step by step against tests/reference_family.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import reference_family as naive
from vprop import CVI, VOGN, VON, VONG, Objective, Vprop
from vprop.baselines import BBVI, Newton
from vprop.likelihood import draw_labels
from vprop.noise import Draw, Stream, normal

SIZE, STEPS, SEED = 6, 12, 7
X = np.random.RandomState(0).randn(20, SIZE)
Y = (X @ np.array([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) + np.random.RandomState(1).randn(20) > 0).astype(float)
START = np.random.RandomState(2).randn(SIZE)
PRIOR = {"prior_precision": np.linspace(0.5, 2.0, SIZE), "prior_mean": np.linspace(-1, 1, SIZE)}
MATRIX = 0.2 * np.ones((SIZE, SIZE)) + np.diag(np.linspace(0.5, 2.0, SIZE))


def rows_of(step):
    return np.random.RandomState(100 + step).permutation(20)[:8]


class Logistic(nn.Module):
    """A logistic regression without bias, in float64, whose weights are one vector."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(START))

    def forward(self, x):
        return x @ self.weight


def as_library_arguments(arguments):
    own = dict(arguments)
    for name in ("prior_mean", "prior_precision"):
        value = own.get(name)
        if isinstance(value, np.ndarray):
            own[name] = torch.tensor(value) if value.ndim == 2 else [torch.tensor(value)]
    return own


def noises_of(step, mc_samples, antithetic=False):
    count = -(-mc_samples // 2) if antithetic else mc_samples
    return [normal(0, SIZE, Draw(SEED, 0, step, k), dtype=torch.float64).numpy() for k in range(count)]


def compare(constructor, reference, naive_step, arguments, curvature="hess"):
    """Both run on the same mini-batches and noise; mean and curvature must agree after every step."""
    model = Logistic()
    optimizer = constructor(model.parameters(), seed=SEED, **as_library_arguments(arguments))
    for step in range(STEPS):
        rows = rows_of(step)
        x, y = torch.tensor(X[rows]), torch.tensor(Y[rows])
        optimizer.step(Objective(model, F.binary_cross_entropy_with_logits, x, y))
        noises = noises_of(step, optimizer.mc_samples, optimizer.param_groups[0]["antithetic"])
        naive_step(reference, rows, noises, step)
        np.testing.assert_allclose(model.weight.detach().numpy(), reference.mean, rtol=1e-9, atol=1e-10)
        own = optimizer.state[model.weight][curvature].numpy()
        np.testing.assert_allclose(own, getattr(reference, curvature), rtol=1e-9, atol=1e-10)
    return model, optimizer


SETTINGS = [
    {"mc_samples": 0},
    {"mc_samples": 1},
    {"mc_samples": 3, "betas": (0.9, 0.95), **PRIOR},
    {"mc_samples": 2, "antithetic": True, "temperature": 0.5, "clip_radius": 0.1, "hess_init": 0.3},
]
COMMON = {"num_data": 200, "lr": 0.3, "betas": (0.0, 0.9)}


def gradient(rows):
    return lambda theta: naive.logistic_gradient(theta, X[rows], Y[rows])


@pytest.mark.parametrize("settings", SETTINGS)
def test_cvi(settings):
    arguments = COMMON | settings

    def step(reference, rows, noises, _):
        reference.step(gradient(rows), lambda t: naive.logistic_hessian_diagonal(t, X[rows], Y[rows]), noises)

    compare(CVI, naive.NaiveCVI(START, **arguments), step, arguments)


@pytest.mark.parametrize("settings", [*SETTINGS, {"prior_precision": MATRIX, "prior_mean": PRIOR["prior_mean"]}])
def test_von(settings):
    arguments = COMMON | settings

    def step(reference, rows, noises, _):
        reference.step(gradient(rows), lambda t: naive.logistic_hessian(t, X[rows], Y[rows]), noises)

    _, optimizer = compare(VON, naive.NaiveVON(START, **arguments), step, arguments)
    reference = naive.NaiveVON(START, **arguments)
    assert reference.covariance.shape == (SIZE, SIZE)
    assert optimizer.state_dict()["state"][0]["hess"].dtype == torch.float64


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_vong(settings, centered):
    if centered and settings["mc_samples"] < 2:
        return  # a spread needs two
    arguments = COMMON | settings

    def step(reference, rows, noises, _):
        reference.step(gradient(rows), noises)

    reference = naive.NaiveVONG(START, centered=centered, **arguments)
    compare(VONG, reference, step, arguments | {"centered": centered})


@pytest.mark.parametrize("settings", SETTINGS)
def test_vogn(settings):
    arguments = COMMON | settings

    def step(reference, rows, noises, _):
        reference.step(lambda t: naive.logistic_per_example_gradients(t, X[rows], Y[rows]), noises)

    compare(VOGN, naive.NaiveVOGN(START, **arguments), step, arguments | {"chunk_size": 3})


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_sampled_fisher(settings, full):
    """The labels come from the documented address: stream LABELS, this step, this sample."""
    arguments = COMMON | settings

    def step(reference, rows, noises, number):
        def drawn_label_gradient(theta, k):
            logits, real = torch.tensor(X[rows] @ theta), torch.tensor(Y[rows])
            labels = draw_labels(logits, real, "bernoulli", 1.0, Draw(SEED, 0, number, k, stream=Stream.LABELS))
            return naive.logistic_gradient(theta, X[rows], labels.numpy())

        reference.step(gradient(rows), drawn_label_gradient, noises, batch_size=len(rows))

    reference = naive.NaiveSampledFisher(START, full=full, **arguments)
    compare(VONG if full else Vprop, reference, step, arguments | {"sampled_fisher": True})


@pytest.mark.parametrize("method", ["sgd", "rmsprop", "adam"])
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_bbvi(settings, method):
    rest = {name: value for name, value in settings.items() if name not in ("betas", "clip_radius", "hess_init")}
    arguments = {"num_data": 200, "lr": 0.05, "lr_std": 0.02, "betas": (0.9, 0.99), "method": method, **rest}
    ess = 200 / rest.get("temperature", 1.0)
    std = 1 / np.sqrt(ess * 0.5 + rest.get("prior_precision", 1.0)) * np.ones(SIZE)

    def step(reference, rows, noises, _):
        reference.step(gradient(rows), noises)

    reference = naive.NaiveBBVI(START, std, alpha=0.99, **arguments)
    compare(BBVI, reference, step, arguments | {"hess_init": 0.5}, curvature="std")


def test_newton_is_von_without_sampling_and_averaging():
    arguments = {"num_data": 200, "lr": 0.7, "prior_precision": 2.0}
    reference = naive.NaiveVON(START, **arguments, mc_samples=0, betas=(0.0, 0.0))

    def step(reference, rows, noises, _):
        reference.step(gradient(rows), lambda t: naive.logistic_hessian(t, X[rows], Y[rows]), noises)

    compare(Newton, reference, step, arguments)


@pytest.mark.parametrize(("constructor", "reference"), [(CVI, naive.NaiveCVI), (VON, naive.NaiveVON)])
def test_where_the_loss_is_not_convex(constructor, reference):
    """A double well started between its minima: the curvature estimate is negative, h is kept from following it."""
    w = nn.Parameter(torch.tensor([0.1, -0.2], dtype=torch.float64))

    class Well(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = w

        def forward(self, x):
            return (self.w.square() - 1).square().sum().expand(len(x))

    arguments = {"num_data": 50, "lr": 0.02, "betas": (0.0, 0.5), "mc_samples": 1, "hess_init": 0.5}
    optimizer = constructor([w], seed=SEED, **arguments)
    twin = reference(w.detach().numpy().copy(), **arguments)
    model, x = Well(), torch.zeros(1, 1)
    for step in range(15):
        optimizer.step(Objective(model, lambda output, y: output.mean(), x, x))
        noises = [normal(0, 2, Draw(SEED, 0, step), dtype=torch.float64).numpy()]
        second = (lambda t: 12 * t**2 - 4) if reference is naive.NaiveCVI else (lambda t: np.diag(12 * t**2 - 4))
        twin.step(lambda t: 4 * t * (t**2 - 1), second, noises)
        np.testing.assert_allclose(w.detach().numpy(), twin.mean, rtol=1e-6, atol=1e-9)
    assert (optimizer.posterior(model).variance["w"] <= 1.0 + 1e-9).all()

"""a1a against exact variational inference: how near each estimator comes when it is given time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vprop import CVI, IVON, VOGN, VON, MeanField, Vprop
from vprop.baselines import exact_vi_logistic
from vprop.lab.data import DataNotFound
from vprop.lab.engine.binary import problem

EXACT = {"diagonal": -613.392, "full": -591.990}
HERE = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def a1a():
    folder = Path(os.environ["VPROP_DATA"]) if "VPROP_DATA" in os.environ else HERE
    try:
        return problem("logreg", "a1a", folder if folder.is_dir() else None)
    except DataNotFound as error:
        pytest.skip(f"needs a1a: {error}")


def train(task, optimizer, model, steps, decay_from=None):
    """Full-batch steps; from ``decay_from`` on the step size falls linearly to zero."""
    start = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        if decay_from is not None and step >= decay_from:
            optimizer.param_groups[0]["lr"] = start * (steps - step) / (steps - decay_from)
        optimizer.step(task.objective(model, None))
    return task.score_posterior(optimizer.posterior(model), test=False).elbo


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_exact_inference(a1a, structure):
    result = exact_vi_logistic(a1a.train_x, a1a.data.train_y, a1a.prior_precision, structure)
    assert result.gradient_norm <= 1e-6
    assert result.elbo == pytest.approx(EXACT[structure], abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "structure", "tolerance"), [(CVI, "diagonal", 1.0), (VOGN, "diagonal", 1.0), (VON, "full", 0.5)]
)
def test_ten_samples_come_within_a_nat(a1a, optimizer, structure, tolerance):
    """CVI-10, VOGN-10 and VON-10, with a step that falls to zero over the second half."""
    model = a1a.model(0)
    chunk = {"chunk_size": 4096} if optimizer is VOGN else {}
    instance = optimizer(
        model.parameters(), lr=0.1, num_data=a1a.num_data, prior_precision=a1a.prior_precision, betas=(0.0, 0.98),
        mc_samples=10, hess_init=0.02, **chunk,
    )  # fmt: skip
    elbo = train(a1a, instance, model, steps=400, decay_from=200)
    assert EXACT[structure] - tolerance <= elbo <= EXACT[structure] + 1e-3


@pytest.mark.parametrize(("centered", "lr", "beta2", "at_least"), [(True, 0.2, 0.5, -662), (False, 1.0, 0.99, -873)])
def test_two_samples_after_ten_passes(a1a, centered, lr, beta2, at_least):
    """Passes as the paper counts them, one per step: centring is worth tens of nats."""
    model = a1a.model(0)
    instance = Vprop(
        model.parameters(), lr=lr, num_data=a1a.num_data, prior_precision=a1a.prior_precision, betas=(0.0, beta2),
        mc_samples=2, antithetic=centered, centered=centered, hess_init=0.01,
    )  # fmt: skip
    assert train(a1a, instance, model, steps=10) >= at_least


PAIRS = {"mc_samples": 2, "antithetic": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constructor", "arguments", "low", "high"),
    [
        (Vprop, {"mc_samples": 2}, 0.0, 0.15),
        (Vprop, PAIRS | {"centered": True}, 0.5, 1.5),
        (MeanField, PAIRS | {"curvature": "centered"}, 0.5, 1.5),
        (MeanField, PAIRS | {"curvature": "price"}, 0.9, 1.1),
        (MeanField, {"curvature": "price", "riemannian": True}, 0.5, 1.5),
        (IVON, PAIRS, 0.9, 1.1),
        (MeanField, {"curvature": "hutchinson"}, 0.9, 1.1),
    ],
    ids=["squared", "Vprop-centered", "centered", "price-pairs", "price-single", "IVON-pairs", "hutchinson"],
)
def test_variance_on_mini_batches(a1a, constructor, arguments, low, high):
    """Median of variance over exact variance, batches of 32: the squared gradient is far too certain, the centred one
    about right, Price and Hutchinson right."""
    exact = exact_vi_logistic(a1a.train_x, a1a.data.train_y, a1a.prior_precision, "diagonal")
    model = a1a.model(0)
    optimizer = constructor(
        model.parameters(), lr=0.01, num_data=a1a.num_data, prior_precision=a1a.prior_precision,
        betas=(0.0, 0.999), hess_init=0.02, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        for rows in torch.randperm(a1a.num_data, generator=generator).split(32):
            optimizer.step(a1a.objective(model, rows))
    ratio = optimizer.posterior(model).variance["weight"].flatten() / exact.variance
    print(f"median {float(ratio.median()):.3f}")
    assert low <= float(ratio.median()) <= high

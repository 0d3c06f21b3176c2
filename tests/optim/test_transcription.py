"""Step by step against the naive float64 transcription of the paper's equations in tests/reference.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import NaiveVprop
from vprop import Vprop
from vprop.noise import Draw, normal

X = np.random.RandomState(0).randn(20, 6)
Y = (X @ np.array([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) + np.random.RandomState(1).randn(20) > 0).astype(float)


# mc_samples, antithetic, centered
SAMPLES = [
    (0, False, False),
    (1, False, False),
    (3, False, False),
    (3, False, True),
    (2, True, False),
    (3, True, False),
    (2, True, True),
    (4, True, True),
]


def mean_loss_gradient(rows):
    """Gradient of the mean logistic loss, in numpy."""
    return lambda theta: X[rows].T @ (0.5 + 0.5 * np.tanh(X[rows] @ theta / 2) - Y[rows]) / len(rows)


def run_both(steps: int, dtype: torch.dtype = torch.float64, **arguments):
    """Yield (optimizer's mean, its h, naive mean, naive h) after every step, on the same mini-batches and noise."""
    start = np.random.RandomState(2).randn(6)
    naive = NaiveVprop(start, **arguments)
    weight = torch.tensor(start, dtype=dtype).requires_grad_()
    own = dict(arguments)
    for name in ("prior_mean", "prior_precision"):
        if isinstance(own.get(name), np.ndarray):
            own[name] = [torch.tensor(own[name])]
    optimizer = Vprop([weight], seed=7, **own)
    features, labels = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    for step in range(steps):
        rows = np.random.RandomState(100 + step).permutation(20)[:8]

        def closure(rows=rows):
            optimizer.zero_grad()
            logits = features[rows] @ weight
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
        draws = [Draw(7, 0, step, sample) for sample in range(arguments["mc_samples"])]
        noises = [normal(0, 6, draw, dtype=torch.float64).numpy() for draw in draws]
        naive.step(mean_loss_gradient(rows), noises)
        yield weight.detach().double().numpy(), optimizer.state[weight]["hess"].double().numpy(), naive.mean, naive.hess


@pytest.mark.parametrize("mc_samples", [0, 1, 2, 5])
def test_the_papers_updates(mc_samples):
    """Vprop-0, Vprop-1 and Vprop-K for 50 steps of mini-batches, λ and N as in its experiments."""
    for mean, hess, naive_mean, naive_hess in run_both(
        50, mc_samples=mc_samples, num_data=20, prior_precision=2.8, lr=0.1, betas=(0.0, 0.9)
    ):
        np.testing.assert_allclose(mean, naive_mean, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(hess, naive_hess, rtol=1e-9)


@settings(max_examples=40)
@given(
    num_data=st.sampled_from([1, 20, 345, 60_000]),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
    prior_precision=st.one_of(st.sampled_from([1e-5, 1.0, 50.0]), st.just(np.linspace(0.5, 4, 6))),
    prior_mean=st.sampled_from([None, np.linspace(-1, 1, 6)]),
    lr=st.sampled_from([1e-3, 0.1, 1.0]),
    betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.5, 0.9, 0.999])),
    samples=st.sampled_from(SAMPLES),
    hess_init=st.sampled_from([0.1, 1.0, 10.0]),
    clip_radius=st.sampled_from([float("inf"), 0.05]),
)
def test_every_argument(samples, prior_mean, **arguments):
    """All hyperparameters at once, in float64, 10 steps."""
    mc_samples, antithetic, centered = samples
    if prior_mean is not None:
        arguments["prior_mean"] = prior_mean
    for mean, hess, naive_mean, naive_hess in run_both(
        10, mc_samples=mc_samples, antithetic=antithetic, centered=centered, **arguments
    ):
        np.testing.assert_allclose(mean, naive_mean, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(hess, naive_hess, rtol=1e-7)


def test_float32_follows_to_rounding():
    for mean, hess, naive_mean, naive_hess in run_both(
        20, torch.float32, mc_samples=2, num_data=200, prior_precision=1.0, lr=0.1, betas=(0.9, 0.99)
    ):
        np.testing.assert_allclose(mean, naive_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(hess, naive_hess, rtol=1e-4)


def test_mean_and_sum_losses_agree_when_num_data_says_so():
    """N enters only through ess: the mean loss with N equals the sum loss over N examples with ess = 1.

    ess·ĝ² with ĝ of the mean loss is (1/N)·(sum gradient)², so h(mean, N) = h(sum, 1)/N, δ likewise, and the
    variances and the steps are the same.
    """
    results = []
    for num_data, scale, hess_init in [(20, 1.0, 1.0), (1, 20.0, 20.0)]:
        weight = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        optimizer = Vprop([weight], lr=0.1, num_data=num_data, hess_init=hess_init, prior_precision=2.0)
        for _ in range(10):
            with optimizer.sampled_params():
                logits = torch.tensor(X) @ weight
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(Y))
                optimizer.zero_grad()
                (scale * loss).backward()
            optimizer.step()
        results.append((weight.detach(), num_data * optimizer.state[weight]["hess"]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)

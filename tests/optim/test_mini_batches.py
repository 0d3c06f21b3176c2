"""Curvature from mini-batches, averages that forget their start, floors, and steps of Adam's kind."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vprop
from tests.harness import assert_same_run, closure_step, context_step, make_batch, make_model, split
from tests.reference_networks import NaiveForNetworks
from vprop.functional import diagonal
from vprop.noise import Draw, normal

X = np.random.RandomState(0).randn(20, 6)
Y = (X @ np.array([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) + np.random.RandomState(1).randn(20) > 0).astype(float)

CASES = {
    "mini-batch": {"batch_size": 8},
    "forgets at once": {"batch_size": 8, "init_steps": 0, "hess_floor": 0.01},
    "forgets slowly": {"batch_size": 8, "init_steps": 7.5},
    "floor": {"batch_size": 8, "hess_floor": 0.4, "temperature": 0.5},
    "limit": {"batch_size": 8, "noise_limit": 0.05, "prior_precision": 3.0},
    "both": {"batch_size": 8, "noise_limit": 0.3, "hess_floor": 0.02},
    "root": {"batch_size": 8, "preconditioner": "root", "lr": 0.01, "prior_precision": 0.5},
    "identity": {"batch_size": 8, "preconditioner": "identity", "lr": 0.2, "prior_precision": 3.0, "noise_limit": 0.2},
    "all": {"batch_size": 8, "preconditioner": "root", "lr": 0.01, "init_steps": 0, "noise_limit": 0.2},
}


def mean_loss_gradient(rows):
    """Of the mean logistic loss, in numpy."""
    return lambda theta: X[rows].T @ (0.5 + 0.5 * np.tanh(X[rows] @ theta / 2) - Y[rows]) / len(rows)


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
@pytest.mark.parametrize("optimizer_type", [vprop.Vprop, vprop.IVON])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)], ids=["portable", "kernel"]
)
def test_step_by_step_as_transcribed(optimizer_type, arguments, dtype, tolerance):
    """With the same mini-batches and noise; float32 goes through the kernels."""
    arguments = {"num_data": 20, "lr": 0.05, "betas": (0.9, 0.95)} | arguments
    price = optimizer_type is vprop.IVON
    start = np.random.RandomState(2).randn(6)
    naive = NaiveForNetworks(start, price=price, **arguments)
    weight = torch.tensor(start, dtype=dtype).requires_grad_()
    extra = {"curvature": "price"} if price else {}
    optimizer = (vprop.MeanField if price else vprop.Vprop)([weight], seed=7, **arguments, **extra)
    features, labels = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    for step in range(20):
        rows = np.random.RandomState(100 + step).permutation(20)[:8]
        before = naive.hess
        naive.step(mean_loss_gradient(rows), normal(0, 6, Draw(7, 0, step, 0), dtype=torch.float64).numpy())
        if price and np.any(naive.hess < 0):  # clamped in the library, which the transcription does not do
            assert step > 0 or np.any(before >= 0)
            break

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(features[rows] @ weight, labels[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
        np.testing.assert_allclose(weight.detach().numpy(), naive.mean, rtol=tolerance, atol=tolerance)
        (marginal,) = optimizer.marginals()
        np.testing.assert_allclose(marginal.hess.numpy(), naive.hess, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(marginal.variance.numpy(), naive.sigma**2, rtol=10 * tolerance)


def per_example_gradients(weight: np.ndarray) -> np.ndarray:
    return X * (0.5 + 0.5 * np.tanh(X @ weight / 2) - Y)[:, None]


def estimate_of(weight: np.ndarray, rows: np.ndarray, batch_size: float | None) -> np.ndarray:
    """ĥ as one step of the library finds it, without noise in the weights."""
    p = nn.Parameter(torch.tensor(weight))
    arguments = {"mc_samples": 0, "num_data": 20, "init_steps": 0, "batch_size": batch_size, "lr": 0.0}
    optimizer = vprop.Vprop([p], **arguments)
    features, labels = torch.tensor(X[rows]), torch.tensor(Y[rows])
    F.binary_cross_entropy_with_logits(features @ p, labels).backward()
    optimizer.step()
    return optimizer.state[p]["hess"].numpy()


@pytest.mark.parametrize("batch_size", [2, 8])
def test_expectation_and_variance_are_those_of_single_gradients(batch_size):
    """E[M·ĝ²] = Σ + M·ḡ², with Σ the covariance of the gradients of single examples, drawn independently.

    And Var[M·ĝ²] from the fourth moments: with d the deviations, M²·E[(ḡ+d̄)⁴] − (E[M·ĝ²])².
    """
    weight = np.random.RandomState(3).randn(6) * 0.5
    single = per_example_gradients(weight)
    mean, deviation = single.mean(0), single - single.mean(0)
    m2, m3, m4 = ((deviation**k).mean(0) for k in (2, 3, 4))
    M = batch_size
    expected = m2 + M * mean**2
    # Moments of the mean d̄ of M independent deviations.
    d2, d3, d4 = m2 / M, m3 / M**2, (m4 + 3 * (M - 1) * m2**2) / M**3
    variance = M**2 * (mean**4 + 6 * mean**2 * d2 + 4 * mean * d3 + d4) - expected**2
    draw = np.random.RandomState(4)
    found = np.stack([estimate_of(weight, draw.randint(0, 20, M), M) for _ in range(3000)])
    error = np.sqrt(variance / len(found))
    assert np.all(np.abs(found.mean(0) - expected) < 4.5 * error)
    np.testing.assert_allclose(found.var(0), variance, rtol=0.25)
    # The paper's factor, N, makes it N/M times as large.
    rows = draw.randint(0, 20, M)
    np.testing.assert_allclose(estimate_of(weight, rows, None), estimate_of(weight, rows, M) * 20 / M, rtol=1e-12)


def test_a_batch_of_all_data_is_the_paper():
    runs = []
    for arguments in ({}, {"batch_size": 200}):
        model = make_model()
        optimizer = vprop.Vprop(model.parameters(), num_data=200, **arguments)
        for step in range(4):
            closure_step(optimizer, model, [make_batch(seed=step)])
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=0, atol=0)


def test_micro_batches_count_together():
    """k micro-batches whose mean gradient is accumulated are one batch, of which M counts all examples."""
    runs = []
    for parts in (1, 3):
        model = make_model(torch.float64)
        optimizer = vprop.Vario(model.parameters(), lr=0.01, num_data=200, batch_size=12)
        for step in range(4):
            closure_step(optimizer, model, split(make_batch(12, torch.float64, seed=step), parts))
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fused", [None, False])
def test_the_objective_knows_its_batch(fused):
    """Also when the last batch of an epoch is smaller."""
    runs = []
    for known in (True, False):
        model = make_model()
        optimizer = vprop.Vario(
            model.parameters(), lr=0.01, num_data=200, batch_size="objective" if known else 1, fused=fused
        )
        for step, size in enumerate((12, 12, 5)):
            optimizer.param_groups[0]["batch_size"] = "objective" if known else float(size)
            optimizer.step(vprop.Objective(model, F.cross_entropy, *make_batch(size, seed=step)))
        for group in optimizer.param_groups:
            group["batch_size"] = None
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=0, atol=0)


def test_without_an_objective_nobody_knows():
    model = make_model()
    optimizer = vprop.Vprop(model.parameters(), num_data=200, batch_size="objective")
    with pytest.raises(ValueError, match=r'batch_size="objective" needs step\(vprop.Objective'):
        closure_step(optimizer, model, [make_batch()])


@pytest.mark.parametrize("fused", [None, False])
def test_what_is_not_known_is_refused_before_the_step_is_counted(fused):
    model = make_model()
    optimizer = vprop.Vario(model.parameters(), num_data=200, batch_size="objective", fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(make_batch()[0]).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="batch_size"):
        optimizer.step(closure)
    assert not calls
    with optimizer.sampled_params():
        model(make_batch()[0]).square().mean().backward()
    with pytest.raises(ValueError, match="batch_size"):
        optimizer.step()
    for p, mean in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), mean)
        assert int(optimizer.state[p]["step"]) == 0


@pytest.mark.parametrize("fused", [None, False])
def test_a_whole_number_set_later_counts_as_one_from_the_start(fused):
    """Schedules of the batch size write into the group, and whole numbers."""
    runs = []
    for first, then in ((8, None), (4, 8)):
        model = make_model()
        optimizer = vprop.Vprop(model.parameters(), lr=0.05, num_data=200, batch_size=first, fused=fused)
        if then is not None:
            optimizer.param_groups[0]["batch_size"] = then
        for step in range(3):
            closure_step(optimizer, model, [make_batch(8, seed=step)])
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=0, atol=0)


def test_what_a_group_was_edited_into_is_checked():
    p = nn.Parameter(torch.ones(2))
    optimizer = vprop.Vario([p], num_data=200, batch_size=8, mc_samples=0)
    p.sum().backward()
    for wrong in (None, 0, "all"):
        optimizer.param_groups[0]["batch_size"] = wrong
        with pytest.raises(ValueError, match="batch_size"):
            optimizer.step()


def test_one_covariance_has_one_batch_size():
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "batch_size": size} for size in (8, 80)]
    with pytest.raises(ValueError, match="batch_size"):
        vprop.VONG(groups, num_data=200)


def test_full_covariance_counts_the_same():
    """VONG's matrix has the same diagonal as what Vprop finds, at the first step and without noise."""
    diagonals = []
    for optimizer_type in (vprop.Vprop, vprop.VONG):
        p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimizer = optimizer_type([p], num_data=20, batch_size=8, init_steps=0, mc_samples=0, lr=0.1)
        F.binary_cross_entropy_with_logits(torch.tensor(X[:8]) @ p, torch.tensor(Y[:8])).backward()
        optimizer.step()
        hess = optimizer.state[p]["hess"]
        diagonals.append(hess.diagonal() if hess.dim() == 2 else hess)
    torch.testing.assert_close(*diagonals, rtol=1e-12, atol=0)


@pytest.mark.parametrize("optimizer_type", [vprop.Vprop, vprop.VONG])
@pytest.mark.parametrize("init_steps", [0, 4, None])
def test_how_long_the_start_counts(optimizer_type, init_steps):
    """Fed the same estimate for ever, the average has only the start to forget: its share is w₀β₂ᵗ of all weights."""
    beta2, start = 0.9, 5.0
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = optimizer_type(
        [p], num_data=20, batch_size=4, init_steps=init_steps, hess_init=start, mc_samples=0, lr=0.0, betas=(0.0, beta2)
    )
    w0 = 1.0 if init_steps is None else init_steps * (1 - beta2)
    for step in range(1, 8):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        share = w0 * beta2**step / (w0 * beta2**step + 1 - beta2**step)
        assert float(optimizer.state[p]["hess"]) == pytest.approx(share * start + (1 - share) * 1.0, rel=1e-12)


@pytest.mark.parametrize("fused", [None, False])
def test_a_large_start_leaves_nothing_behind(fused):
    """In float32 a curvature of 1e-9 has no digits in a difference to a start of 1."""
    p = nn.Parameter(torch.ones(3))
    arguments = {"num_data": 100, "batch_size": 4, "init_steps": 0, "mc_samples": 0, "fused": fused}
    optimizer = vprop.Vprop([p], lr=0.0, betas=(0.0, 0.999), **arguments)
    for _ in range(3):
        p.grad = torch.tensor([1e-5, 1e-4, 1.0])
        optimizer.step()
        torch.testing.assert_close(optimizer.state[p]["hess"], 4 * p.grad.square(), rtol=1e-5, atol=0)


def test_without_prior_and_noise_the_root_is_adams():
    """The same gradients to torch's Adam: the same weights."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2))
    optimizer = vprop.Vario([ours], lr=0.01, num_data=100, batch_size=10, prior_precision=0.0, mc_samples=0)
    adam = torch.optim.Adam([theirs], lr=0.01, eps=1e-8)
    for _ in range(30):
        theirs.grad = torch.randn(7, dtype=torch.float64)
        ours.grad = theirs.grad.clone()
        optimizer.step()
        adam.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_weight_without_gradient_is_pulled_gently():
    """To the prior's mean, by at most lr a step, and to rest there. Divided by 1e-8 it would be thrown away."""
    p = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = vprop.Vario([p], lr=0.01, num_data=100, batch_size=10, mc_samples=0)
    found = [1.0]
    for _ in range(400):
        optimizer.zero_grad()
        (p[0] - 1).square().backward()
        optimizer.step()
        found.append(float(p[1].detach()))
    steps = [before - after for before, after in itertools.pairwise(found)]
    assert min(steps) >= 0
    assert max(steps) <= 0.01001
    assert found[60] < 0.5
    assert found[-1] < 1e-3


class TestFloors:
    def trained(self, **arguments):
        model = make_model()
        optimizer = vprop.Vprop(model.parameters(), lr=0.05, num_data=200, batch_size=12, init_steps=0, **arguments)
        for step in range(40):
            closure_step(optimizer, model, [make_batch(seed=step)])
        return model, optimizer

    @pytest.mark.parametrize("fused", [None, False])
    def test_no_noise_is_above_the_share_of_the_weights(self, fused):
        model, optimizer = self.trained(noise_limit=0.1, fused=fused)
        posterior, at_limit = optimizer.posterior(model), 0
        for name in posterior.mean:
            limit = 0.1 * optimizer.state[model.get_parameter(name)]["size"]
            std = posterior.variance[name].sqrt()
            assert bool((std <= limit * (1 + 1e-5)).all())
            at_limit += int((std > limit * (1 - 1e-5)).sum())
        assert at_limit > 0
        # The size is that of the weights, a few steps ago.
        size = optimizer.state[model[0].weight]["size"]
        assert float(size) == pytest.approx(float(model[0].weight.detach().square().mean().sqrt()), rel=0.2)

    def test_an_absolute_one(self):
        model, optimizer = self.trained(hess_floor=0.5)
        posterior = optimizer.posterior(model)
        assert max(float(v.max()) for v in posterior.variance.values()) == pytest.approx(1 / (200 * 0.5), rel=1e-5)

    def test_the_posterior_is_an_ordinary_gaussian_under_the_same_prior(self):
        """KL, ELBO and the next prior know nothing of a floor: they read mean and variance."""
        model, optimizer = self.trained(noise_limit=0.1, prior_precision=2.0)
        posterior = optimizer.posterior(model)
        kl = 0.0
        for name, mean in posterior.mean.items():
            ratio = 2.0 * posterior.variance[name].double()
            kl += float((0.5 * (ratio + 2.0 * mean.double().square() - 1 - ratio.log())).sum())
        assert float(posterior.kl()) == pytest.approx(kl, rel=1e-5)
        following = posterior.as_prior()
        for name, precision in zip(posterior.variance, following["prior_precision"], strict=True):
            torch.testing.assert_close(precision, posterior.variance[name].reciprocal())

    def test_a_smaller_family_has_no_better_bound(self):
        """On a quadratic loss the ELBO has a closed form: the floor's optimum is the best Gaussian inside it."""
        ess, hess, delta, mean = 50.0, 0.02, 0.01, 0.3
        limit = 1 / math.sqrt(ess * 0.1)

        def elbo(std: float) -> float:
            expected_loss = 0.5 * hess * (mean**2 + std**2)
            kl = 0.5 * (ess * delta * (std**2 + mean**2) - 1 - math.log(ess * delta * std**2))
            return -ess * expected_loss - kl

        stds = np.linspace(0.01, limit, 2000)
        best = stds[np.argmax([elbo(s) for s in stds])]
        ours = float(diagonal.variance(torch.tensor(hess), ess, delta, 0.1).sqrt())
        assert ours == pytest.approx(best, rel=1e-3) == pytest.approx(limit, rel=1e-3)
        assert elbo(1 / math.sqrt(ess * (hess + delta))) > elbo(ours)

    def test_one_set_later(self):
        """On a group that trained without, and off again."""
        model, optimizer = self.trained()
        for limit in (0.05, math.inf):
            optimizer.param_groups[0]["noise_limit"] = limit
            for step in range(2):
                closure_step(optimizer, model, [make_batch(seed=step)])
            weight = optimizer.posterior(model).variance["0.weight"]
            bounded = bool((weight.sqrt() <= 0.051 * model[0].weight.detach().square().mean().sqrt()).all())
            assert bounded == math.isfinite(limit)

    @pytest.mark.parametrize("fused", [None, False])
    def test_without_samples_the_size_follows_too(self, fused):
        """Weights that start at zero would keep the least size, and the least noise, for ever."""
        p = nn.Parameter(torch.zeros(6))
        optimizer = vprop.Vario([p], lr=0.1, num_data=200, batch_size=8, mc_samples=0, fused=fused)
        for _ in range(33):
            optimizer.zero_grad()
            (p - 2.0).square().mean().backward()
            optimizer.step()
        assert float(optimizer.state[p]["size"]) > 1

    def test_sizes_stay_where_they_are_when_the_kernels_tables_are_made_anew(self):
        """A CUDA graph goes on writing there."""
        model, optimizer = self.trained(noise_limit=0.1)
        addresses = [optimizer.state[p]["size"].data_ptr() for p in model.parameters()]
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)  # which makes a momentum
        closure_step(optimizer, model, [make_batch()])
        assert [optimizer.state[p]["size"].data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("fused", [True, False])
def test_a_riemannian_average_does_not_forget_its_start_by_an_edit_either(fused):
    p = nn.Parameter(torch.ones(3))
    optimizer = vprop.IVON([p], num_data=20, fused=fused)
    optimizer.param_groups[0]["init_steps"] = 0.0

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"Invalid init_steps=0\.0: must be None with IVON's riemannian average"):
        optimizer.step(closure)
    assert torch.equal(p.detach(), torch.ones(3))
    optimizer.param_groups[0]["init_steps"] = None
    optimizer.step(closure)
    assert not torch.equal(p.detach(), torch.ones(3))


def test_a_batch_size_that_only_an_objective_knows_can_be_edited_after_the_step_was_refused():
    """The refused step's sample was drawn for the group as it was."""
    model, other = make_model(), make_model()
    optimizer = vprop.Vario(model.parameters(), num_data=20, batch_size="objective")
    with pytest.raises(ValueError, match=r"needs step\(vprop\.Objective"):
        context_step(optimizer, model, [make_batch()])
    optimizer.param_groups[0]["batch_size"] = 12
    context_step(optimizer, model, [make_batch()])
    right = vprop.Vario(other.parameters(), num_data=20, batch_size=12)
    context_step(right, other, [make_batch()])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_first_step_of_sgds_kind_is_not_rescaled():
    """``rescale_lr`` makes IVON's first step lr times a plain gradient; that of SGD's kind is one."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = vprop.IVON([weight], lr=0.1, num_data=10, hess_init=0.5, rescale_lr=True, preconditioner="identity")
    with optimizer.sampled_params():
        weight.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.1, 0.2, -0.3]))


def test_a_group_edited_to_an_unknown_step_is_refused():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = vprop.Vario([weight], num_data=10, batch_size=5)
    optimizer.param_groups[0]["preconditioner"] = "sgd"
    with pytest.raises(ValueError, match="Invalid preconditioner='sgd': must be"):
        optimizer.step(lambda: None)

"""IVON, Vadam and MeanField: step by step against tests/reference_family.py, and against each other where they meet."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import reference_family as naive
from tests.harness import assert_same_run, train
from vprop import CVI, IVON, VOGN, MeanField, Objective, Vadam, Vprop
from vprop import curvature as estimators
from vprop.noise import Draw, normal

INPUTS, HIDDEN, BATCH, STEPS, SEED = 3, 4, 8, 25, 7
SIZE = naive.mlp_size(INPUTS, HIDDEN)
X = np.random.RandomState(0).randn(24, INPUTS)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.5 * np.random.RandomState(1).randn(24) > 0).astype(float)
START = 0.7 * np.random.RandomState(2).randn(SIZE)
PRIOR = {"prior_precision": np.linspace(0.5, 4.0, SIZE), "prior_mean": np.linspace(-1, 1, SIZE)}


def rows_of(step):
    return np.random.RandomState(100 + step).permutation(24)[:BATCH]


def gradient_of(step):
    rows = rows_of(step)
    return lambda theta: naive.mlp_gradient(theta, X[rows], Y[rows], HIDDEN)


def make_network():
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1), nn.Flatten(0)).double()
    nn.utils.vector_to_parameters(torch.tensor(START), model.parameters())
    return model


def like_parameters(vector, model):
    pieces = torch.tensor(vector).split([p.numel() for p in model.parameters()])
    return [piece.view_as(p) for piece, p in zip(pieces, model.parameters(), strict=True)]


def as_library_arguments(arguments, model):
    return {k: like_parameters(v, model) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).numpy()


@functools.cache
def noises_of(step, count):
    """ε of `count` independent draws, over all parameters in their order."""
    sizes = [p.numel() for p in make_network().parameters()]
    return [
        flat([normal(0, n, Draw(SEED, i, step, k), dtype=torch.float64) for i, n in enumerate(sizes)])
        for k in range(count)
    ]


def run(constructor, arguments, *, steps=STEPS, loss_factor=1.0, copies=1, before_step=lambda step, optimizer: None):
    """Train on mini-batches; returns μ and h after each step, shape (steps, 2, SIZE)."""
    model = make_network()
    optimizer = constructor(model.parameters(), seed=SEED, **as_library_arguments(arguments, model))
    trajectory = []
    for step in range(steps):
        rows = np.tile(rows_of(step), copies)
        objective = Objective(
            model,
            lambda z, y: loss_factor * F.binary_cross_entropy_with_logits(z, y),
            torch.tensor(X[rows]),
            torch.tensor(Y[rows]),
            likelihood="bernoulli",
        )
        before_step(step, optimizer)
        optimizer.step(objective)
        hess = flat([optimizer.state[p]["hess"] for p in model.parameters()])
        trajectory.append((flat(model.parameters()), hess))
    return np.array(trajectory)


def compare(constructor, reference, arguments, **extra):
    """Both on the same mini-batches and noise; the mean and the curvature must agree after every step."""
    antithetic, mc_samples = arguments.get("antithetic", False), arguments.get("mc_samples", 1)
    draws = -(-mc_samples // 2) if antithetic else mc_samples
    own = run(constructor, arguments | extra)
    for step, (mean, hess) in enumerate(own):
        reference.step(gradient_of(step), noises_of(step, draws))
        np.testing.assert_allclose(hess, reference.hess, rtol=1e-9, atol=1e-10, err_msg=f"h after step {step}")
        np.testing.assert_allclose(mean, reference.mean, rtol=1e-9, atol=1e-10, err_msg=f"mean after step {step}")
    assert np.abs(own[-1, 0] - START).max() > 1e-3  # or nothing was compared


# Every setting in which each argument is away from its default at least once, alone and with others.
SETTINGS = {
    "defaults": {},
    "no momentum": {"betas": (0.0, 0.9)},
    "momentum": {"betas": (0.8, 0.95)},
    "three samples": {"mc_samples": 3, "betas": (0.5, 0.9)},
    "antithetic": {"mc_samples": 2, "antithetic": True, "betas": (0.5, 0.9)},
    "antithetic, one without partner": {"mc_samples": 3, "antithetic": True, "betas": (0.5, 0.9)},
    "prior": {"betas": (0.9, 0.9), **PRIOR},
    "strong prior": {"betas": (0.9, 0.9), "prior_precision": 300.0, "prior_mean": np.ones(SIZE)},
    "hot": {"temperature": 3.0, "betas": (0.5, 0.9)},
    "cold": {"temperature": 0.1, "betas": (0.5, 0.9), "prior_precision": 5.0},
    "clipped": {"clip_radius": 0.07, "betas": (0.5, 0.9)},
    "hess_init": {"hess_init": 0.2, "betas": (0.5, 0.9)},
    "all at once": {
        **{"mc_samples": 4, "antithetic": True, "betas": (0.7, 0.8), "temperature": 0.5, "clip_radius": 0.3},
        **{"hess_init": 2.0, **PRIOR},
    },
}
COMMON = {"num_data": 300, "lr": 0.1}
settings_of_each = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@pytest.mark.parametrize("rescale_lr", [False, True])
@settings_of_each
def test_ivon(settings, rescale_lr):
    arguments = COMMON | settings
    compare(IVON, naive.NaiveIVON(START, rescale_lr=rescale_lr, **arguments), arguments, rescale_lr=rescale_lr)


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"mc_samples": 0}], ids=[*SETTINGS, "at the mean"])
def test_vadam(settings):
    arguments = COMMON | settings
    compare(Vadam, naive.NaiveVadam(START, **arguments), arguments)


@settings_of_each
def test_price_without_the_riemannian_term(settings):
    arguments = COMMON | {"lr": 0.01, "betas": (0.9, 0.99)} | settings  # where h is 0 steps are long
    compare(MeanField, naive.NaivePrice(START, **arguments), arguments, curvature="price")


@settings_of_each
def test_price_with_the_riemannian_term_is_ivon(settings):
    arguments = COMMON | {"betas": (0.9, 0.99)} | settings
    reference = naive.NaiveIVON(START, **arguments)
    compare(MeanField, reference, arguments, curvature="price", riemannian=True)


def test_the_settings_tell_apart_what_papers_write_differently():
    """The transcriptions' own differences, each larger than the tolerance above by far: none is compared in vain."""

    def last(reference):
        for step in range(STEPS):
            reference.step(gradient_of(step), noises_of(step, 4))
        return np.concatenate([reference.mean, reference.hess])

    class PriorInside(naive.NaiveIVON):
        def update(self, gradient, hess_estimate):
            pull = self.delta * (self.mean - self.prior_mean)
            self.prior_mean, kept = self.mean, self.prior_mean
            super().update(gradient + pull, hess_estimate)
            self.prior_mean = kept

    class NoCorrection(naive.NaiveIVON):
        update = naive.NaivePrice.update

    for name in ("momentum", "prior", "strong prior", "all at once"):
        arguments = COMMON | SETTINGS[name]
        right = last(naive.NaiveIVON(START, **arguments))
        for other in (PriorInside, NoCorrection, naive.NaiveVadam):
            assert np.abs(last(other(START, **arguments)) - right).max() > 1e-5, (name, other)


# -- where the curvature is negative -------------------------------------------------------------------------------


class Well(nn.Module):
    """Loss Σ (w²−1)²: two minima, and a negative curvature between them. Its Hessian is diagonal."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x):
        return (self.w.square() - 1).square().sum().expand(len(x))

    def objective(self):
        x = torch.zeros(1, 1)
        return Objective(self, lambda output, y: output.mean(), x, x)


@pytest.mark.parametrize("riemannian", [True, False])
@pytest.mark.parametrize("beta2", [0.2, 0.6, 0.9])
def test_where_the_loss_is_not_convex(beta2, riemannian):
    """Started between the minima. IVON's h goes below 0, but not to −δ; the plain update keeps h ≥ 0."""
    start, floor = np.linspace(-0.3, 0.3, 12), 0.0
    arguments = {"num_data": 50, "lr": 0.01, "betas": (0.5, beta2), "hess_init": 0.5, "prior_precision": 20.0}
    model = Well(start)
    optimizer = MeanField(model.parameters(), curvature="price", riemannian=riemannian, seed=SEED, **arguments)
    twin = (naive.NaiveIVON if riemannian else naive.NaivePrice)(start, **arguments)
    lowest = np.inf
    if riemannian:
        floor = -(1 - 1e-3) * twin.delta[0]
    for step in range(STEPS):
        optimizer.step(model.objective())
        noise = normal(0, len(start), Draw(SEED, 0, step), dtype=torch.float64).numpy()
        twin.step(lambda t: 4 * t * (t**2 - 1), [noise])
        lowest = min(lowest, twin.hess.min())
        np.testing.assert_allclose(optimizer.state[model.w]["hess"].numpy(), twin.hess, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(model.w.detach().numpy(), twin.mean, rtol=1e-8, atol=1e-9)
        assert optimizer.state[model.w]["hess"].min() >= floor - 1e-12
    assert lowest < 0 if riemannian else lowest == 0  # it was put to the test
    assert (optimizer.posterior(model).variance["w"] > 0).all()


def test_the_floor_under_ivons_curvature():
    """With β₂ = 0 and ĥ = −δ the new h+δ is exactly half the old, step after step. It ends at δ/1000, and recovers.

    The closure makes up the gradients: g = ĥσ²/(θ−μ) has the estimate g(θ−μ)/σ² = ĥ whatever the noise.
    """
    w = nn.Parameter(torch.zeros(5, dtype=torch.float64))  # the mean, which lr = 0 leaves at 0
    num_data, delta = 10, 1.0
    optimizer = IVON([w], 0.0, num_data=num_data, prior_precision=num_data * delta, betas=(0.0, 0.0), hess_init=0.5)
    expected = 1.5
    for step in range(20):
        estimate = -delta if step < 15 else 0.25

        def closure(estimate=estimate, variance=1 / (num_data * expected)):
            w.grad = estimate * variance / w.detach()
            return torch.zeros(())

        optimizer.step(closure)
        ratio = 1.0 - (estimate + delta) / expected
        expected = max(expected * (1 - ratio + ratio**2 / 2), delta / 1000)
        hess = optimizer.state[w]["hess"].numpy() + delta
        np.testing.assert_allclose(hess, expected, rtol=1e-9)
        assert (expected == delta / 1000) == (11 <= step + 1 <= 15)


# -- N, the batch, the temperature, the loss's scale ---------------------------------------------------------------

METHODS = {
    "IVON": (IVON, {"betas": (0.8, 0.9)}),
    "IVON, rescaled": (IVON, {"betas": (0.8, 0.9), "rescale_lr": True}),
    "Vadam": (Vadam, {"betas": (0.8, 0.9)}),
    "price": (MeanField, {"betas": (0.8, 0.9), "curvature": "price"}),
    "hutchinson": (MeanField, {"betas": (0.8, 0.9), "curvature": "hutchinson"}),
}
each_method = pytest.mark.parametrize(("constructor", "own"), METHODS.values(), ids=METHODS)


@each_method
def test_a_batch_twice_over_is_the_batch(constructor, own):
    arguments = COMMON | own | {"mc_samples": 2}
    once, twice = run(constructor, arguments), run(constructor, arguments, copies=2)
    np.testing.assert_allclose(twice, once, rtol=1e-9, atol=1e-11)


@each_method
def test_temperature_and_num_data_enter_as_their_ratio(constructor, own):
    arguments = own | {"lr": 0.1, "mc_samples": 2, **PRIOR}
    runs = [run(constructor, arguments | {"num_data": n, "temperature": t}) for n, t in [(300, 1.0), (1200, 4.0)]]
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-12)
    other = run(constructor, arguments | {"num_data": 1200})
    assert np.abs(other - runs[0]).max() > 1e-3  # N does matter


@pytest.mark.parametrize("riemannian", [True, False])
@pytest.mark.parametrize("curvature", ["price", "hutchinson"])
def test_the_loss_as_a_sum(curvature, riemannian):
    """f = N·ℓ with ess = 1 is ℓ with ess = N: s = N·h, the same means and variances. Vadam, without ess, has no such
    rule."""
    arguments = {"lr": 0.1, "betas": (0.8, 0.9), "prior_precision": 2.0}
    arguments |= {"curvature": curvature, "riemannian": riemannian}
    mean = run(MeanField, arguments | {"num_data": 300, "hess_init": 1.0})
    total = run(MeanField, arguments | {"num_data": 1, "hess_init": 300.0}, loss_factor=300.0)
    np.testing.assert_allclose(total[:, 0], mean[:, 0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(total[:, 1], 300 * mean[:, 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_data", [1, 10, 400])
def test_rescaling_the_learning_rate(num_data):
    """rescale_lr is lr·(h₀+δ), δ with the λ and the ess of now."""
    arguments = {"num_data": num_data, "prior_precision": 3.0, "temperature": 2.0, "hess_init": 0.6}
    rescaled = run(IVON, arguments | {"lr": 0.1, "rescale_lr": True})
    plain = run(IVON, arguments | {"lr": 0.1 * (0.6 + 3.0 * 2.0 / num_data)})
    np.testing.assert_allclose(rescaled, plain, rtol=1e-12)


def test_the_learning_rate_may_change_on_the_way():
    """A schedule changes the mean's steps from the next step on, and multiplies rescaled rates alike."""

    def halve(step, optimizer):
        if step == 4:
            optimizer.param_groups[0]["lr"] *= 0.5

    arguments = COMMON | {"betas": (0.5, 0.9), "hess_init": 0.4, "rescale_lr": True}
    changed = run(IVON, arguments, steps=5, before_step=halve)
    first, second = run(IVON, arguments, steps=5), run(IVON, arguments | {"lr": 0.05}, steps=5)
    np.testing.assert_array_equal(changed[:4], first[:4])
    full_step = first[4, 0] - first[3, 0]
    np.testing.assert_allclose(changed[4, 0] - changed[3, 0], 0.5 * full_step, rtol=1e-9)
    assert np.abs(second[4] - changed[4]).max() > 1e-6


@pytest.mark.parametrize("constructor", [IVON, MeanField, Vadam])
def test_to_maximize_is_to_minimize_the_negative(constructor):
    arguments = COMMON | {"betas": (0.5, 0.9)} | ({"curvature": "price"} if constructor is MeanField else {})
    expected = run(constructor, arguments)
    np.testing.assert_array_equal(run(constructor, arguments | {"maximize": True}, loss_factor=-1.0), expected)


# -- limits and special cases --------------------------------------------------------------------------------------


def test_vadam_without_noise_is_adam():
    """ess → ∞ with δ = λ/ess held at 1e-10: σ → 0, and δ is Adam's eps. (δμ ≈ 1e-10 in the gradient remains.)"""
    delta, ess = 1e-10, 1e26
    arguments = {"num_data": 1, "temperature": 1 / ess, "prior_precision": delta * ess, "lr": 0.01}
    own = run(Vadam, arguments | {"betas": (0.9, 0.99)})[:, 0]
    model, means = make_network(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=delta)
    for step in range(STEPS):
        rows = rows_of(step)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(torch.tensor(X[rows])), torch.tensor(Y[rows])).backward()
        optimizer.step()
        means.append(flat(model.parameters()))
    np.testing.assert_allclose(own, np.array(means), rtol=1e-6, atol=1e-8)


def test_vadams_curvature_has_no_factor_ess():
    """h = 0 at first, so σ² = 1/λ and the first sample whatever N; its squared gradient gives the same h."""
    first = [run(Vadam, {"num_data": n, "lr": 0.1}, steps=1)[0, 1] for n in (10, 10_000)]
    np.testing.assert_array_equal(first[0], first[1])
    theta = START + noises_of(0, 1)[0]
    expected = (1 - 0.999) * gradient_of(0)(theta) ** 2
    np.testing.assert_allclose(first[0], expected, rtol=1e-9)


def test_the_constructors_defaults_are_the_papers():
    model = make_network()
    group = IVON(model.parameters(), 0.1, num_data=10).param_groups[0]
    assert (group["betas"], group["hess_init"], group["mc_samples"]) == ((0.9, 0.99999), 1.0, 1)
    group = Vadam(model.parameters(), num_data=10).param_groups[0]
    assert (group["lr"], group["betas"], group["hess_init"]) == (1e-3, (0.9, 0.999), 0.0)


@pytest.mark.parametrize("own", [{"mc_samples": 0}, {"centered": True, "mc_samples": 2}])
def test_what_ivon_refuses(own):
    """Without noise ĝ·(θ−μ)/σ² is 0/0, and its curvature is not one of a spread."""
    with pytest.raises(ValueError, match=next(iter(own))):
        IVON(make_network().parameters(), 0.1, num_data=10, **own)


def test_price_needs_a_sample():
    with pytest.raises(ValueError, match="mc_samples"):
        MeanField(make_network().parameters(), 0.1, num_data=10, curvature="price", mc_samples=0)


SAMPLES = [
    {"mc_samples": 1},
    {"mc_samples": 3, "betas": (0.9, 0.9)},
    {"mc_samples": 4, "antithetic": True, "temperature": 0.5, "clip_radius": 0.2, "prior_precision": 5.0},
]
TWINS = {
    "squared_gradient": (Vprop, {}),
    "centered": (Vprop, {"centered": True}),
    "hessian": (CVI, {}),
    "gauss_newton": (VOGN, {}),
    "sampled_fisher": (Vprop, {"sampled_fisher": True}),
}


@pytest.mark.parametrize("samples", [{"mc_samples": 0}, *SAMPLES])
@pytest.mark.parametrize("curvature", TWINS)
def test_mean_field_is_each_of_its_special_cases(curvature, samples):
    """The same weights and the same state, bit for bit."""
    constructor, own = TWINS[curvature]
    if curvature == "centered" and samples["mc_samples"] < 2:
        return  # a spread needs two
    arguments = {"lr": 0.1, "num_data": 100, "betas": (0.5, 0.9), "steps": 8, "seed": SEED} | samples
    expected = train(constructor, "closure", **arguments, **own)
    assert_same_run(train(MeanField, "closure", curvature=curvature, **arguments), expected)


@pytest.mark.parametrize("samples", SAMPLES)
def test_mean_field_with_ivons_update_is_ivon(samples):
    arguments = {"lr": 0.1, "num_data": 100, "betas": (0.5, 0.9), "steps": 8, "seed": SEED} | samples
    expected = train(IVON, "closure", **arguments)
    assert_same_run(train(MeanField, "closure", curvature="price", riemannian=True, **arguments), expected)


@pytest.mark.parametrize("curvature", ["squared_gradient", "hessian"])
def test_ivons_update_with_another_estimate(curvature):
    """The Riemannian term belongs to the update, whatever the estimate: ½(1−β₂)²(h−ĥ)²/(h+δ) on top."""
    arguments = COMMON | {"betas": (0.5, 0.8), "curvature": curvature, "hess_init": 0.3}
    with_term, without = (run(MeanField, arguments | {"riemannian": r}, steps=1)[0] for r in (True, False))
    hess_estimate = (without[1] - 0.8 * 0.3) / 0.2
    if curvature == "hessian":  # where the plain update did not have to stop at 0
        where = without[1] > 0
        assert where.sum() > SIZE / 2
    else:
        where = slice(None)
    term = 0.5 * 0.2**2 * (0.3 - hess_estimate) ** 2 / (0.3 + 1 / 300)
    np.testing.assert_allclose(with_term[1][where], (without[1] + term)[where], rtol=1e-9)


@pytest.mark.parametrize("mc_samples", [0, 1, 3])
def test_hutchinson_is_exact_where_the_hessian_is_diagonal(mc_samples):
    """z⊙(Dz) = D whatever the signs z: the run is CVI's, with any number of probes."""
    arguments = {"num_data": 50, "lr": 0.02, "betas": (0.5, 0.8), "mc_samples": mc_samples, "seed": SEED}
    choices = {"CVI": None, "one probe": "hutchinson", "three": estimators.Hutchinson(probes=3)}
    runs = {}
    for name, curvature in choices.items():
        model = Well([1.3, -0.8, 0.4])
        own = {} if curvature is None else {"curvature": curvature}
        optimizer = (CVI if curvature is None else MeanField)(model.parameters(), **arguments, **own)
        for _ in range(STEPS):
            optimizer.step(model.objective())
        runs[name] = torch.cat([model.w.detach(), optimizer.state[model.w]["hess"]])
    torch.testing.assert_close(runs["one probe"], runs["CVI"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(runs["three"], runs["CVI"], rtol=1e-9, atol=1e-11)


def test_estimators_may_be_given_as_objects():
    pairs = {
        "squared_gradient": estimators.SquaredGradient(),
        "centered": estimators.SampleSpread(),
        "gauss_newton": estimators.PerExampleGaussNewton(),
        "hessian": estimators.HessianDiagonal(),
        "hutchinson": estimators.Hutchinson(),
        "price": estimators.Price(),
        "sampled_fisher": estimators.SampledFisher(),
    }
    arguments = {"lr": 0.1, "num_data": 100, "betas": (0.5, 0.9), "mc_samples": 2, "steps": 4}
    for name, estimator in pairs.items():
        expected = train(MeanField, "closure", curvature=name, **arguments)
        assert_same_run(train(MeanField, "closure", curvature=estimator, **arguments), expected)
    expected = train(MeanField, "closure", curvature="centered", antithetic=True, **arguments)
    spread = estimators.AntitheticSpread()
    assert_same_run(train(MeanField, "closure", curvature=spread, antithetic=True, **arguments), expected)


def test_price_uses_the_scale_that_the_sample_was_drawn_with():
    """A temperature that is changed between the sample and the step must not change what the sample says."""
    found = []
    for temperature in (1.0, 4.0):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = MeanField([weight], curvature="price", num_data=10, betas=(0.0, 0.0), lr=0.0)
        with optimizer.sampled_params():
            (weight**4).sum().backward()
        optimizer.param_groups[0]["temperature"] = temperature
        optimizer.step()
        found.append(optimizer.state[weight]["hess"])  # β₂ = 0: ĥ itself, where it is not negative
    assert (found[0] > 0).any()
    torch.testing.assert_close(found[1], found[0])


def test_momentum_that_starts_late_is_as_if_it_had_always_been_there():
    """Vadam averages the prior's pull too, so that is what a late average starts with."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = Vadam([weight], num_data=10, lr=0.0, mc_samples=0, betas=(0.0, 0.9), prior_precision=20.0)

    def closure():
        optimizer.zero_grad()
        (3.0 * weight).sum().backward()

    for step in range(4):
        optimizer.param_groups[0]["betas"] = (0.0 if step < 3 else 0.8, 0.9)
        optimizer.step(closure)
    debiased = optimizer.state[weight]["momentum"] / (1 - 0.8**4)
    torch.testing.assert_close(debiased, torch.tensor([5.0], dtype=torch.float64))  # ĝ + δμ = 3 + 2·1

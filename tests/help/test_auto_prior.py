"""prior_precision="auto" against models whose best λ is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from tests.table import TABLE
from vprop import CVI, IVON, VON, AutoPrior, Objective, Vprop
from vprop.help.auto_prior import BOUNDS, best_precision, damped

ROWS = 200
EXACT = {"mc_samples": 0, "betas": (0.0, 0.0), "lr": 1.0}
"""The curvature of a linear model is exact at the mean, and a full step lands on the optimum."""


def squared_error(output, y):
    """The negative log-likelihood of observations with variance 1, up to a constant."""
    return 0.5 * (output.squeeze(-1) - y).square().mean()


def orthogonal_design(weights, seed=0):
    """XᵀX = N·I, so that the exact posterior is diagonal with curvature 1."""
    generator = torch.Generator().manual_seed(seed)
    columns, _ = torch.linalg.qr(torch.randn(ROWS, len(weights), dtype=torch.float64, generator=generator))
    x = columns * math.sqrt(ROWS)
    return x, x @ weights + torch.randn(ROWS, dtype=torch.float64, generator=generator)


def linear(size):
    model = nn.Linear(size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def normals(size, std, seed):
    return std * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("true_precision", [0.3, 4.0, 40.0])
def test_the_best_precision_of_an_orthogonal_regression(true_precision):
    """The evidence of N(ŵ; 0, 1/λ + 1/N) is largest at λ = 1/(mean ŵ² − 1/N)."""
    x, y = orthogonal_design(normals(20, true_precision**-0.5, seed=1))
    best = 1 / (float((x.T @ y / ROWS).square().mean()) - 1 / ROWS)
    model = linear(20)
    optimizer = CVI(model.parameters(), num_data=ROWS, prior_precision="auto", **EXACT)
    for _ in range(600):
        optimizer.step(Objective(model, squared_error, x, y))
    assert optimizer.param_groups[0]["prior_precision"] == pytest.approx(best, rel=1e-3)
    prior = optimizer.posterior(model).prior
    assert float(prior.precision["weight"]) == pytest.approx(best, rel=1e-3)


def log_evidence(x, y, precision):
    covariance = torch.eye(len(x), dtype=torch.float64) + x @ x.T / precision
    return float(torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), covariance).log_prob(y))


def test_the_full_covariance_maximizes_the_evidence():
    """With correlated inputs the exact posterior is full; its best λ is where the evidence is largest."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    x = torch.randn(60, 6, dtype=torch.float64, generator=generator) @ mixing
    y = x @ normals(6, 0.7, seed=6) + torch.randn(60, dtype=torch.float64, generator=generator)
    model = linear(6)
    optimizer = VON(model.parameters(), num_data=60, prior_precision=AutoPrior(damping=0.5, every=1), **EXACT)
    for _ in range(300):
        optimizer.step(Objective(model, squared_error, x, y))
    found = optimizer.param_groups[0]["prior_precision"]
    assert log_evidence(x, y, found) > max(log_evidence(x, y, found * factor) for factor in (0.98, 1.02))


def test_samples_and_mini_batches_come_near():
    """Centred Vprop on batches of 50: its variances are estimates, and so is λ, to a few per cent."""
    x, y = orthogonal_design(normals(20, 0.5, seed=2))
    best = 1 / (float((x.T @ y / ROWS).square().mean()) - 1 / ROWS)
    model = linear(20)
    optimizer = Vprop(
        model.parameters(), lr=0.05, num_data=ROWS, prior_precision="auto", betas=(0.0, 0.99),
        mc_samples=2, antithetic=True, centered=True,
    )  # fmt: skip
    order = torch.Generator().manual_seed(0)
    for _ in range(300):
        for rows in torch.randperm(ROWS, generator=order).split(50):
            optimizer.step(Objective(model, squared_error, x[rows], y[rows]))
    assert optimizer.param_groups[0]["prior_precision"] == pytest.approx(best, rel=0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_groups_have_their_own_or_share(shared):
    weights = torch.cat([normals(10, 2.0, seed=3), normals(10, 0.3, seed=4)])
    x, y = orthogonal_design(weights)
    model = nn.Module()
    model.first, model.second = linear(10), linear(10)
    model.forward = lambda x: model.first(x[:, :10]) + model.second(x[:, 10:])
    groups = [{"params": list(part.parameters())} for part in (model.first, model.second)]
    optimizer = CVI(groups, num_data=ROWS, prior_precision=AutoPrior(shared=shared), **EXACT)
    for _ in range(400):
        optimizer.step(Objective(model, squared_error, x, y))
    squares = (x.T @ y / ROWS).square()
    parts = [squares, squares] if shared else [squares[:10], squares[10:]]
    best = [1 / (float(part.mean()) - 1 / ROWS) for part in parts]
    assert [group["prior_precision"] for group in optimizer.param_groups] == pytest.approx(best, rel=1e-3)


def test_a_group_may_keep_its_number():
    x, y = orthogonal_design(normals(20, 1.0, seed=3))
    model = nn.Module()
    model.first, model.second = linear(10), linear(10)
    model.forward = lambda x: model.first(x[:, :10]) + model.second(x[:, 10:])
    groups = [
        {"params": list(model.first.parameters()), "prior_precision": "auto"},
        {"params": list(model.second.parameters())},
    ]
    optimizer = CVI(groups, num_data=ROWS, prior_precision=3.0, **EXACT)
    for _ in range(50):
        optimizer.step(Objective(model, squared_error, x, y))
    assert optimizer.param_groups[1]["prior_precision"] == 3.0
    assert optimizer.param_groups[0]["prior_precision"] != 1.0


def test_it_is_the_maximum_of_the_elbo():
    """The closed form against the posterior's own KL on a grid of λ."""
    x, y = orthogonal_design(normals(12, 0.8, seed=7))
    model = linear(12)
    mean = [normals(12, 0.1, seed=8).view(1, 12)]
    optimizer = CVI(model.parameters(), num_data=ROWS, prior_precision="auto", prior_mean=mean, **EXACT)
    for _ in range(300):
        optimizer.step(Objective(model, squared_error, x, y))
    posterior = optimizer.posterior(model)
    found = float(posterior.prior.precision["weight"])

    def kl(precision):
        posterior.prior.precision["weight"] = torch.tensor(precision, dtype=torch.float64)
        return float(posterior.kl())

    assert kl(found) < min(kl(found * 0.97), kl(found * 1.03))


def test_nothing_to_learn_stays_finite():
    """Targets of zero: the best λ is infinite, so it goes to its bound, and everything stays finite."""
    x, _ = orthogonal_design(normals(5, 1.0, seed=9))
    model = linear(5)
    prior = AutoPrior(damping=0.0, every=1, warmup=0)
    optimizer = CVI(model.parameters(), num_data=ROWS, prior_precision=prior, **EXACT)
    for _ in range(100):
        optimizer.step(Objective(model, squared_error, x, torch.zeros(ROWS, dtype=torch.float64)))
    # From far above the curvature an iteration changes λ little: it is on its way, and finite.
    assert 1e3 < optimizer.param_groups[0]["prior_precision"] <= BOUNDS[1]
    assert math.isfinite(float(optimizer.posterior(model).kl()))


def test_never_a_value_that_is_not_finite():
    assert best_precision(3, 0.0) == BOUNDS[1]
    assert best_precision(3, 1e300) == BOUNDS[0]
    assert best_precision(3, math.nan) is None
    assert damped(2.0, None, 0.5) == 2.0
    assert damped(2.0, 8.0, 0.5) == pytest.approx(4.0)
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Vprop([weight], num_data=10, prior_precision=AutoPrior(warmup=0, every=1))
    for bad in (math.nan, math.inf, 1e30):

        def closure(bad=bad):
            optimizer.zero_grad()
            (weight * bad).sum().backward()

        with pytest.warns(RuntimeWarning, match="left out"):
            optimizer.step(closure)
        assert math.isfinite(optimizer.param_groups[0]["prior_precision"])


def test_a_prior_that_falls_leaves_ivon_a_positive_precision():
    """IVON's h may lie between −δ and 0; when λ, and with it δ, falls, the precision must not become negative."""
    weight = nn.Parameter(torch.ones(50))
    optimizer = IVON([weight], num_data=100, prior_precision=50.0, betas=(0.0, 0.9), hess_init=0.1, lr=0.001)

    def closure():
        optimizer.zero_grad()
        loss = -0.1 * weight.square().sum()  # a loss that curves downwards
        loss.backward()
        return loss

    for step in range(40):
        if step == 20:
            assert (optimizer.state[weight]["hess"] < 0).any()
            optimizer.param_groups[0]["prior_precision"] = 0.5
        optimizer.step(closure)
        with optimizer.sampled_params(train=False):
            assert torch.isfinite(weight).all()


def test_a_checkpoint_goes_on_exactly():
    x, y = orthogonal_design(normals(5, 1.0, seed=3))

    def run(model, optimizer, steps):
        for _ in range(steps):
            optimizer.step(Objective(model, squared_error, x, y))

    model = linear(5)
    optimizer = Vprop(model.parameters(), num_data=ROWS, prior_precision="auto")
    run(model, optimizer, 47)
    other = copy.deepcopy(model)
    resumed = Vprop(other.parameters(), num_data=ROWS, prior_precision="auto")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, 40)
    run(other, resumed, 40)
    assert optimizer.param_groups[0]["prior_precision"] == resumed.param_groups[0]["prior_precision"] != 1.0
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
def test_every_optimizer_has_it(info):
    x, y = orthogonal_design(normals(5, 1.0, seed=3))
    model = linear(5)
    prior = AutoPrior(warmup=0, every=1)
    optimizer = info.build(model.parameters(), num_data=ROWS, prior_precision=prior, lr=0.01)
    for _ in range(5):
        optimizer.step(Objective(model, squared_error, x, y, likelihood="gaussian"))
    found = optimizer.param_groups[0]["prior_precision"]
    assert found != 1.0
    assert 0 < found < math.inf


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda: "automatic", r"Invalid prior_precision='automatic': must be .*\"auto\""),
        (lambda: AutoPrior(damping=1.0), r"Invalid damping=1\.0: must be a number in \[0, 1\)"),
        (lambda: AutoPrior(every=0), r"Invalid every=0: must be an integer >= 1"),
        (lambda: AutoPrior(warmup=-1), r"Invalid warmup=-1: must be an integer >= 0"),
        (lambda: AutoPrior(start=0.0), r"Invalid start=0\.0: must be a number in \[1e-08, 1e\+08\]"),
        (lambda: AutoPrior(shared=1), r"Invalid shared=1: must be True or False"),
    ],
)
def test_bad_requests(prior, message):
    with pytest.raises(ValueError, match=message):
        Vprop([nn.Parameter(torch.zeros(2))], num_data=10, prior_precision=prior())


def test_a_captured_graph_cannot_change_it():
    with pytest.raises(ValueError, match=r"Invalid prior_precision='auto': must be a number with capturable=True"):
        Vprop([nn.Parameter(torch.zeros(2))], num_data=10, prior_precision="auto", capturable=True)


def test_shared_is_one_number_whatever_the_groups_started_from():
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [
        {"params": [first], "prior_precision": AutoPrior(shared=True, start=10.0)},
        {"params": [second], "prior_precision": AutoPrior(shared=True, start=1.0)},
    ]
    optimizer = Vprop(groups, num_data=10)

    def closure():
        optimizer.zero_grad()
        (first.square() + second.square()).sum().backward()

    for _ in range(30):
        optimizer.step(closure)
    values = [group["prior_precision"] for group in optimizer.param_groups]
    assert values[0] == values[1] not in (1.0, 10.0)


def test_a_group_that_sits_out_keeps_its_precision():
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = Vprop([{"params": [first]}, {"params": [second]}], num_data=10, prior_precision=AutoPrior(warmup=0))

    def closure(taking_part):
        optimizer.zero_grad()
        sum(p.square().sum() for p in taking_part).backward()

    for _ in range(10):
        optimizer.step(lambda: closure([first, second]))
    values = [group["prior_precision"] for group in optimizer.param_groups]
    for _ in range(7):
        optimizer.step(lambda: closure([first]))
    assert optimizer.param_groups[1]["prior_precision"] == values[1] != 1.0
    assert optimizer.param_groups[0]["prior_precision"] != values[0]


def test_auto_may_be_asked_for_later():
    weight = nn.Parameter(torch.ones(4))
    optimizer = Vprop([weight], num_data=10)
    optimizer.param_groups[0]["prior_precision"] = AutoPrior(warmup=0, every=1)

    def closure():
        optimizer.zero_grad()
        weight.square().sum().backward()

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["prior_precision"] != 1.0


@pytest.mark.parametrize("prior", [0.0, "per weight"])
def test_a_prior_that_is_set_by_hand_while_it_is_followed(prior):
    """A number is followed from there; one per weight, as ``as_prior()`` makes it, is not followed any longer."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = Vprop([weight], num_data=10, prior_precision=AutoPrior(warmup=0, every=1))
    group = optimizer.param_groups[0]
    group["prior_precision"] = [torch.full((3,), 7.0)] if prior == "per weight" else prior
    with optimizer.sampled_params():
        weight.square().sum().backward()
    optimizer.step()
    if prior == "per weight":
        assert group["prior_precision"][0].tolist() == [7.0] * 3
        assert "auto_prior" not in group
    else:
        assert 0 < group["prior_precision"] < 1

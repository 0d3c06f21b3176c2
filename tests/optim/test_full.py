"""One matrix over all weights: what happens to it when parameters, groups, priors or gradients are not the usual."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.full_harness import hess_of, objective_of, random_spd, sample_of, take_steps
from tests.harness import make_batch, make_model
from vprop import CVI, VOGN, VON, VONG, Objective, Vprop
from vprop.baselines import Newton

FULL = [VON, VONG]


# -- parameters that come, go, and sit out -------------------------------------------------------------------------


class Sum(nn.Module):
    """Logits from two parameters that can be told not to take part."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.full((4,), 0.3).double()), nn.Parameter(torch.full((4,), -0.2).double())
        self.active = ("w", "v")

    def forward(self, x):
        return sum(((k + 1) * x @ getattr(self, name)).tanh() for k, name in enumerate(self.active))


def sum_objective(model, seed=1):
    x, y = make_batch(dtype=torch.float64, seed=seed)
    return Objective(model, F.binary_cross_entropy_with_logits, x, (y > 0).double())


@pytest.mark.parametrize("away", ["w", "v"])
@pytest.mark.parametrize("constructor", FULL)
def test_a_parameter_without_gradient_stays(constructor, away):
    """Its mean and its block of H to the last bit; what connects it with the others fades as √β₂, step by step."""
    model = Sum()
    optimizer = constructor(model.parameters(), num_data=50, betas=(0.5, 0.9))
    for seed in range(3):
        optimizer.step(sum_objective(model, seed))
    other = "v" if away == "w" else "w"
    rows = {"w": slice(0, 4), "v": slice(4, 8)}
    before, mean = hess_of(optimizer).clone(), {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = optimizer.state[getattr(model, away)]["momentum"].clone()
    assert before[:4, 4:].abs().max() > 1e-3
    model.active = (other,)
    for seed in range(2):
        optimizer.step(sum_objective(model, seed))
    after = hess_of(optimizer)
    assert torch.equal(getattr(model, away), mean[away])
    assert torch.equal(after[rows[away], rows[away]], before[rows[away], rows[away]])
    assert torch.equal(optimizer.state[getattr(model, away)]["momentum"], momentum)
    torch.testing.assert_close(after[:4, 4:], 0.9 * before[:4, 4:])
    torch.testing.assert_close(after, after.T)
    assert (getattr(model, other) - mean[other]).abs().min() > 1e-4
    assert (after - before)[rows[other], rows[other]].abs().max() > 1e-4
    assert [int(optimizer.state[getattr(model, name)]["step"]) for name in (away, other)] == [3, 5]
    model.active = ("w", "v")
    optimizer.step(sum_objective(model))
    assert not torch.equal(getattr(model, away), mean[away])


@pytest.mark.parametrize("late", ["a group", "the first parameter"])
@pytest.mark.parametrize("constructor", FULL)
def test_a_parameter_that_comes_later_grows_the_matrix(constructor, late):
    """The old block is kept where it belongs; the new one starts with its hess_init and without correlations."""
    model = make_model(torch.float64)
    if late == "a group":
        optimizer = constructor(model[0].parameters(), num_data=50, betas=(0.0, 0.5))
        old, new = slice(0, 40), slice(40, 67)
    else:
        model[0].requires_grad_(False)
        optimizer = constructor(model.parameters(), num_data=50, betas=(0.0, 0.5), hess_init=0.3)
        old, new = slice(40, 67), slice(0, 40)
    take_steps(model, optimizer, 2)
    before = hess_of(optimizer).clone()
    if late == "a group":
        optimizer.add_param_group({"params": model[2].parameters(), "hess_init": 0.3})
    model[0].requires_grad_(True)
    sample_of(model, optimizer)
    after = hess_of(optimizer)
    assert torch.equal(after[old, old], before)
    assert torch.equal(after[new, new], 0.3 * torch.eye(67 - len(before), dtype=torch.float64))
    assert not after[old, new].any()
    assert not after[new, old].any()
    take_steps(model, optimizer, 2)
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == (
        [4, 4, 2, 2] if new.start else [2, 2, 4, 4]
    )
    assert optimizer.posterior(model).covariance.shape == (67, 67)


@pytest.mark.parametrize("constructor", FULL)
def test_a_parameter_frozen_later_is_conditioned_on(constructor):
    """The posterior of the others is the Gaussian given its mean: Σ_aa − Σ_ab Σ_bb⁻¹ Σ_ba."""
    model = make_model(torch.float64)
    optimizer = constructor(model.parameters(), num_data=50, betas=(0.0, 0.5), prior_precision=random_spd(67))
    take_steps(model, optimizer, 3)
    whole = optimizer.posterior(model).covariance
    model[0].requires_grad_(False)
    frozen, rest = slice(0, 40), slice(40, 67)
    expected = whole[rest, rest] - whole[rest, frozen] @ torch.linalg.solve(whole[frozen, frozen], whole[frozen, rest])
    torch.testing.assert_close(optimizer.posterior(model).covariance, expected, rtol=1e-8, atol=1e-12)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    drawn = sample_of(model, optimizer)
    assert torch.equal(drawn[:40], before[:40])
    assert not (drawn[40:] == before[40:]).any()
    take_steps(model, optimizer, 2)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(after[:40], before[:40])
    assert not (after[40:] == before[40:]).any()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("constructor", FULL)
def test_the_order_of_the_parameters_does_not_matter(constructor, layers):
    """Without sampling (noise goes by position), with a prior per weight."""
    model = make_model(torch.float64)
    if layers == 1:
        model = nn.Sequential(model[0], nn.Tanh())
    other = copy.deepcopy(model)
    posteriors = []
    for current, turn in ((model, list), (other, lambda parameters: list(reversed(list(parameters))))):
        precisions = turn([1 + p.detach().square() for p in current.parameters()])
        settings = {"num_data": 50, "mc_samples": 0, "betas": (0.5, 0.5), "prior_precision": precisions}
        optimizer = constructor(turn(current.parameters()), **settings)
        take_steps(current, optimizer, 3)
        posteriors.append(optimizer.posterior(current))
    torch.testing.assert_close(posteriors[1].mean, posteriors[0].mean)
    torch.testing.assert_close(posteriors[1].precision, posteriors[0].precision)


# -- groups --------------------------------------------------------------------------------------------------------


def test_groups_may_differ_in_lr_prior_and_clip():
    """One step at the mean, written out: (H+Δ)⁻¹(g+Δ(μ−m₀)) with everything per weight."""
    model = make_model(torch.float64)
    mean = torch.cat([p.detach().flatten() for p in model.parameters()])
    prior = {"prior_mean": [torch.ones_like(p) for p in model[2].parameters()], "prior_precision": 7.0}
    groups = [
        {"params": model[0].parameters(), "clip_radius": 0.03},
        {"params": model[2].parameters(), "lr": 0.4, **prior},
    ]
    optimizer = VON(groups, 0.1, num_data=50, mc_samples=0, betas=(0.0, 0.0), prior_precision=2.0)
    objective = objective_of(model)
    objective()
    grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step(objective)

    def per_weight(first, second):
        return torch.cat([torch.full((40,), first), torch.full((27,), second)]).double()

    delta = torch.diag(per_weight(2.0, 7.0) / 50)
    direction = torch.linalg.solve(hess_of(optimizer) + delta, grad + delta @ (mean - per_weight(0.0, 1.0)))
    assert (direction[:40].abs() > 0.03).any()
    expected = mean - per_weight(0.1, 0.4) * direction.clamp(-per_weight(0.03, math.inf), per_weight(0.03, math.inf))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_data", 60),
        ("temperature", 0.5),
        ("betas", (0.0, 0.9)),
        ("antithetic", True),
        ("centered", True),
        ("maximize", True),
        ("sampled_fisher", True),
        ("mc_samples", 3),
    ],
)
def test_groups_must_agree_in_what_is_of_the_whole_matrix(name, value):
    """… when they are given, when one is added, and when one is edited."""
    model = make_model()
    settings = {"num_data": 50, "mc_samples": 2}
    message = rf"Invalid {name}=.*must be the same in all parameter groups"
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), name: value}]
    with pytest.raises(ValueError, match=message):
        VONG(groups, **settings)
    optimizer = VONG(model[0].parameters(), **settings)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": model[2].parameters(), name: value})
    optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=message):
        take_steps(model, optimizer)


def test_one_device_and_one_precision():
    w = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"one device and in one precision.*float32 on cpu, torch\.float64 on cpu"):
        VON([w, nn.Parameter(torch.zeros(2, dtype=torch.float64))], num_data=10)
    with pytest.raises(ValueError, match=r"one device and in one precision.*on cpu, torch\.float32 on meta"):
        VON([w, nn.Parameter(torch.zeros(2, device="meta"))], num_data=10)
    VON([w, nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], num_data=10)  # both have a float32 mean
    VON([w, nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)], num_data=10)


@pytest.mark.parametrize("constructor", [VON, VONG, Newton])
def test_the_size_limit(constructor):
    model = make_model()
    with pytest.raises(ValueError, match=rf"{constructor.__name__} keeps .*67 parameters.*Pass max_parameters=67 "):
        constructor(model.parameters(), num_data=10, max_parameters=66)
    constructor(model.parameters(), num_data=10, max_parameters=67)
    model[0].weight.requires_grad_(False)
    optimizer = constructor(model.parameters(), num_data=10, max_parameters=35)  # frozen ones take no room
    take_steps(model, optimizer)
    model[0].weight.requires_grad_(True)
    before, hess = copy.deepcopy(model.state_dict()), hess_of(optimizer).clone()
    with pytest.raises(ValueError, match="Pass max_parameters=67 "):
        take_steps(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(hess_of(optimizer), hess)
    optimizer.param_groups[0]["max_parameters"] = 67
    take_steps(model, optimizer)
    assert hess_of(optimizer).shape == (67, 67)


def test_bad_matrix_priors():
    model = nn.Linear(2, 1)
    good = random_spd(3)
    VON(model.parameters(), num_data=10, prior_precision=good.float())
    not_definite = good - 5 * torch.eye(3)
    for bad in (good + torch.triu(torch.ones(3, 3)), not_definite, torch.full((3, 3), math.nan), torch.zeros(3, 3)):
        with pytest.raises(ValueError, match=r"Invalid prior_precision='a matrix': must be symmetric and positive def"):
            VON(model.parameters(), num_data=10, prior_precision=bad)
    for shape in ((2, 2), (3,), (3, 3, 3)):
        with pytest.raises(ValueError, match=r"is a tensor of shape \(.*matrix of shape \(3, 3\).*require a gradient"):
            VON(model.parameters(), num_data=10, prior_precision=torch.ones(shape))
    groups = [{"params": [model.weight], "prior_precision": good[:2, :2]}, {"params": [model.bias]}]
    with pytest.raises(ValueError, match=r"a matrix covers all weights, so there can be one parameter group only"):
        VON(groups, num_data=10)
    optimizer = VON([model.weight], num_data=10, prior_precision=good[:2, :2])
    with pytest.raises(ValueError, match="one parameter group only"):
        optimizer.add_param_group({"params": [model.bias]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("constructor", [Vprop, CVI, VOGN])
def test_a_diagonal_optimizer_has_no_matrix_prior(constructor):
    """The prior that a full posterior hands on is not for it, also where shapes would broadcast."""
    model = nn.Linear(3, 1, bias=False)
    prior = VON(model.parameters(), num_data=10).posterior(model).as_prior()
    with pytest.raises(ValueError, match="Invalid prior_precision"):
        constructor(model.parameters(), num_data=10, **prior)


# -- NaN, and losses that are not convex ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize("constructor", [VON, VONG, Vprop, CVI, VOGN])
def test_a_step_with_nan_changes_nothing_and_training_goes_on(constructor, first, bad):
    """Not the mean, not the curvature, not the momentum; also where the very first gradient is bad."""
    model = make_model(torch.float64)
    optimizer = constructor(model.parameters(), 0.1, num_data=50, betas=(0.9, 0.9), mc_samples=0)
    if not first:
        take_steps(model, optimizer, 2)
    before, posterior = copy.deepcopy(optimizer.state_dict()["state"]), optimizer.posterior(model)
    x, y = make_batch(dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"\d+ gradient elements were NaN or infinite and were left out"):
        optimizer.step(Objective(model, lambda f, y: F.cross_entropy(f, y) * bad, x, y))
    torch.testing.assert_close(optimizer.posterior(model).mean, posterior.mean, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.posterior(model).variance, posterior.variance, rtol=0, atol=0)
    for p, old in before.items():
        kept = optimizer.state_dict()["state"][p]
        assert all(torch.equal(kept[key], old[key]) for key in old if key != "step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(model, optimizer, 3)
    for p, name in zip(model.parameters(), posterior.mean, strict=True):
        assert torch.isfinite(optimizer.state[p]["momentum"]).all()
        assert (p - posterior.mean[name]).abs().max() > 1e-3


class Well(nn.Module):
    """Σ (w² − 1)², which is concave between its minima at ±1."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x):
        return (self.w.square() - 1).square().sum().expand(len(x))


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("constructor", [CVI, VON])
def test_where_the_loss_is_concave_no_direction_is_less_certain_than_under_the_prior(constructor, beta2):
    """Also on the way there: a slow average brings H + δ close to zero, where steps and variances would explode."""
    model, x = Well([0.1, -0.2]), torch.zeros(1, 1)
    optimizer = constructor(model.parameters(), 0.0, num_data=50, betas=(0.0, beta2), mc_samples=0, hess_init=0.1)
    for _ in range(60):
        optimizer.step(Objective(model, lambda output, y: output.mean(), x, x))
        assert optimizer.posterior(model).variance["w"].max() <= 1.001  # the prior's variance is 1


def test_no_curvature_at_all():
    """A linear loss and a flat prior leave nothing to divide by: the step is left out, as in the diagonal structure."""
    model = nn.Linear(3, 1, bias=False).double()
    before = model.weight.detach().clone()
    for constructor in (CVI, VON):
        optimizer = constructor(model.parameters(), num_data=10, prior_precision=0.0, betas=(0.0, 0.0), mc_samples=0)
        with pytest.warns(RuntimeWarning, match="left out of the step"):
            optimizer.step(Objective(model, lambda output, y: output.mean(), torch.ones(4, 3).double(), torch.ones(4)))
        assert torch.equal(model.weight, before)

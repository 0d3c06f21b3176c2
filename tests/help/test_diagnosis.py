"""``optimizer.diagnose()``: each symptom is found where it is, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import make_batch, make_model, train
from tests.table import cases
from vprop import CVI, IVON, VON, VONG, AutoPrior, Objective, Vprop


def symptoms(optimizer):
    return {finding.symptom for finding in optimizer.diagnose()}


def healthy(**arguments):
    """A regression that the data determine: 100 rows, 3 weights far from zero, curvature 1, long enough."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    y = x @ torch.tensor([2.0, -3.0, 1.0]) + 0.1 * torch.randn(100, generator=generator)
    model = nn.Linear(3, 1, bias=False)
    settings = {"lr": 0.3, "num_data": 100, "betas": (0.0, 0.9), "hess_init": 3.0} | arguments
    optimizer = CVI(model.parameters(), **settings)

    def loss_fn(output, y):
        return 0.5 * (output.squeeze(-1) - y).square().mean()

    for _ in range(100):
        optimizer.step(Objective(model, loss_fn, x, y))
    return optimizer


def test_nothing_is_wrong():
    diagnosis = healthy().diagnose()
    assert len(diagnosis) == 0
    assert str(diagnosis) == "Nothing looks wrong."
    assert not diagnosis


@pytest.mark.parametrize(
    ("arguments", "symptom", "words"),
    [
        ({"betas": (0.0, 0.9999)}, "curvature at hess_init", ["After 100 steps", "hess_init=3", "betas[1]=0.9999"]),
        ({"prior_precision": 1e6}, "variance at prior", ["as wide as their prior", "num_data=100", "prior_precision"]),
        ({"clip_radius": 1e-4}, "steps clipped", ["clip_radius=0.0001", "Raise clip_radius"]),
        ({"temperature": 1e4, "prior_precision": 0.01}, "noise dominates", ["larger than the weights", "temperature"]),
    ],
)
def test_each_symptom_is_found(arguments, symptom, words):
    diagnosis = healthy(**arguments).diagnose()
    finding = next(finding for finding in diagnosis if finding.symptom == symptom)
    assert finding.group == 0
    for word in words:
        assert word in str(diagnosis)


def test_clipping_counts_the_last_step_only():
    optimizer = healthy(clip_radius=1e-4)
    assert "steps clipped" in symptoms(optimizer)
    optimizer.param_groups[0]["clip_radius"] = float("inf")
    model = nn.Linear(3, 1, bias=False)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step(Objective(model, F.mse_loss, torch.ones(4, 3), torch.ones(4, 1)))
    assert "steps clipped" not in symptoms(optimizer)


def test_not_finite():
    optimizer = healthy()
    (weight,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        weight[0, 1] = torch.nan
    (finding,) = [finding for finding in optimizer.diagnose() if finding.symptom == "not finite"]
    assert "33.3%" in finding.what


def test_no_steps_and_no_gradient():
    used, unused, never = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = Vprop([{"params": [used, unused]}, {"params": [never]}, {"params": [frozen]}], num_data=10)
    assert [finding.symptom for finding in optimizer.diagnose()] == ["no steps", "no steps"]

    def closure():
        optimizer.zero_grad()
        used.square().sum().backward()

    optimizer.step(closure)
    by_group = [(finding.group, finding.symptom) for finding in optimizer.diagnose()]
    assert (0, "no gradient") in by_group
    assert (1, "no steps") in by_group
    assert not any(group == 2 for group, _ in by_group)


def test_an_automatic_prior_at_its_bound():
    optimizer = healthy(prior_precision=AutoPrior(warmup=0, every=1))
    assert "prior at its bound" not in symptoms(optimizer)
    optimizer.param_groups[0]["prior_precision"] = 1e8
    assert "prior at its bound" in symptoms(optimizer)


def test_the_long_average_of_ivon_is_pointed_out():
    """The classic: β₂ = 0.99999 and a thousand steps, so that the posterior is that of hess_init."""
    model = make_model()
    optimizer = IVON(model.parameters(), num_data=1000)
    for seed in range(30):
        optimizer.step(Objective(model, F.cross_entropy, *make_batch(seed=seed)))
    assert "curvature at hess_init" in symptoms(optimizer)


@pytest.mark.parametrize("case", cases())
def test_every_optimizer_can_be_asked_and_is_not_changed(case):
    model, optimizer = train(case, steps=3)
    before = [p.clone() for p in model.parameters()]
    text = str(optimizer.diagnose())
    assert text
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_not_inside_a_sample():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Vprop([weight], num_data=10)
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match=r"diagnose\(\) inside an active sample"):
        optimizer.diagnose()


def test_a_curvature_of_zero_is_not_the_start():
    """A loss that curves downwards: h is kept at zero, long after the start is forgotten."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = CVI(model.parameters(), num_data=100, betas=(0.0, 0.9), lr=1e-5)
    for _ in range(300):
        optimizer.step(Objective(model, lambda f, y: -f.square().mean(), torch.ones(4, 3), torch.ones(4)))
    assert "curvature at hess_init" not in symptoms(optimizer)


@pytest.mark.parametrize("constructor", [VON, VONG])
def test_the_full_structure_counts_clipped_steps(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=100, clip_radius=1e-6)
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    assert "steps clipped" in symptoms(optimizer)


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_groups_without_weights_have_nothing_wrong(case):
    """An empty list of parameters, and a parameter without elements; also where the prior follows the posterior."""
    weight, nothing = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(0, 3))
    groups = [{"params": []}, {"params": [nothing]}, {"params": [weight]}]
    optimizer = case(groups, prior_precision=AutoPrior(warmup=0, every=1))
    assert {finding.group for finding in optimizer.diagnose()} == {2}

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum() + nothing.sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert {finding.group for finding in optimizer.diagnose()} <= {2}
    assert [group["prior_precision"] for group in optimizer.param_groups[:2]] == [1.0, 1.0]
    assert optimizer.param_groups[2]["prior_precision"] != 1.0

"""Curvature that needs more than gradients, in data-parallel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vprop
from tests.distributed.runs import assert_differs, assert_equal, go_on, run, start
from tests.harness import make_batch

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "VOGN": {},
    "VOGN maximized": {"maximize": True},
    "CVI": {"mc_samples": 2},
    "MeanField": {"curvature": "hutchinson"},
    "VON": {},
    "VONG": {"mc_samples": 2},
    "VONG centred": {"mc_samples": 2, "antithetic": True, "centered": True},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_curvature_is_that_of_the_whole_batch(ranks, name) -> None:
    optimizer, arguments = name.split()[0], CONFIGURATIONS[name]
    alone = run(None, optimizer, arguments)
    for together in ranks(2)(run, "ddp", optimizer, arguments):
        assert_equal(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["Vprop", "VONG"])
def test_drawn_labels_differ_from_rank_to_rank_and_the_curvature_is_shared(ranks, optimizer) -> None:
    arguments = {"sampled_fisher": True}
    first, second = ranks(2)(run, "ddp", optimizer, arguments)
    assert_equal(first, second)
    assert_differs(first, run(None, optimizer, arguments))


def fisher_of_one_step(optimizer: str, strategy: str | None) -> torch.Tensor:
    """The sampled Fisher at the first step, over many seeds: h = (1−β₂)·ĥ, from hess_init=0."""
    total = torch.zeros(())
    x, y = make_batch(24, torch.float64)
    rank, count = (torch.distributed.get_rank(), 2) if strategy else (0, 1)
    for seed in range(200):
        arguments = {"sampled_fisher": True, "mc_samples": 0, "hess_init": 0.0, "betas": (0.0, 0.5), "seed": seed}
        model, optim = start(strategy, optimizer, arguments)
        optim.step(vprop.Objective(model, F.cross_entropy, x.chunk(count)[rank], y.chunk(count)[rank]))
        total = total + optim.state[next(model.parameters())]["hess"].detach() / 0.5 / 200
    return total


def test_the_sampled_fisher_of_two_ranks_is_unbiased(ranks) -> None:
    """Against the Fisher of the softmax, Σ over classes, at the start; 5 standard errors of 400 independent draws."""
    model, _ = start(None, "Vprop", {})
    x, _ = make_batch(24, torch.float64)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)["0.weight"]
    probs = model(x).softmax(-1).detach()
    fisher_of_outputs = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    exact = torch.einsum("nabc,nad,ndbc->bc", jacobian, fisher_of_outputs, jacobian) / len(x)
    for estimate in ranks(2)(fisher_of_one_step, "Vprop", "ddp"):
        # M·g̃² with g̃ a sum of independent scores is close to F̄·χ²₁, whose variance is 2; there are 2·200 of them.
        error = (estimate - exact) / (exact * (2 / 400) ** 0.5)
        assert float(error.abs().max()) < 5
        assert abs(float(error.mean())) < 1


def step_on_spread_parameters(optimizer: str) -> None:
    model, optim = start("fsdp", optimizer, {})
    go_on(model, optim, "fsdp", "closure", steps=1)


GRADIENTS_ONLY, DIAGONAL = "Vprop, IVON, Vadam", 'Vprop, Vario and IVON with structure="diagonal", Vadam'


@pytest.mark.parametrize(
    ("optimizer", "instead"),
    [("VOGN", GRADIENTS_ONLY), ("CVI", GRADIENTS_ONLY), ("VON", DIAGONAL), ("VONG", DIAGONAL)],
)
def test_what_needs_whole_parameters_says_so(ranks, optimizer, instead) -> None:
    for error in ranks(2).errors(step_on_spread_parameters, optimizer):
        assert error is not None
        assert "are spread over ranks (FSDP, tensor parallel)" in error[1]
        assert instead in error[1]


def objective_around_a_wrapped_part() -> None:
    model, _ = start("ddp", "VOGN", {})
    outer = torch.nn.Sequential(model, torch.nn.Identity())
    vprop.Objective(outer, F.cross_entropy, *make_batch(8, torch.float64))


def test_a_model_of_which_a_part_is_wrapped_is_refused(ranks) -> None:
    for error in ranks(2).errors(objective_around_a_wrapped_part):
        assert error is not None
        assert "Wrap the whole model in DistributedDataParallel" in error[1]


def found_rates() -> float:
    """Ranks whose data differ: on the second, all labels are the same."""
    model, optim = start("ddp", "Vprop", {})
    x, y = make_batch(12, torch.float64)
    y = y * 0 if torch.distributed.get_rank() else y
    return vprop.lr_find(optim, model, F.cross_entropy, [(x, y)], steps=10).suggestion


def test_ranks_find_the_same_step_size(ranks) -> None:
    first, second = ranks(2)(found_rates)
    assert first == second

"""torch.distributed.checkpoint: a run goes on, bit for bit, on another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import vprop
from tests.distributed.runs import assert_equal, fsdp, gathered, go_on, run, start
from tests.harness import make_model

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Vprop": {},
    "Vprop with momentum": {"betas": (0.9, 0.99), "clip_radius": 2.0},
    "IVON": {},
    "Vadam": {},
}


def save_half_way(strategy: str | None, optimizer: str, arguments: dict[str, Any], folder: str) -> None:
    model, optim = start(strategy, optimizer, arguments)
    go_on(model, optim, strategy, "closure", steps=2)
    weights, state = get_state_dict(model, optim)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resume(strategy: str | None, optimizer: str, arguments: dict[str, Any], folder: str) -> dict[str, Tensor]:
    # Another start and other settings: what counts is in the checkpoint.
    model, optim = start(strategy, optimizer, arguments | {"lr": 0.01, "seed": 7})
    weights, state = get_state_dict(model, optim)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=state)
    go_on(model, optim, strategy, "closure", steps=2, first_step=2)
    return gathered(model, optim)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("fsdp", 2, 4), ("fsdp", 4, 2), ("tensor parallel", 2, 4), ("ddp", 2, 4)],
)
def test_a_run_goes_on_with_another_number_of_ranks(ranks, tmp_path, strategy, before, after, name) -> None:
    optimizer, arguments = name.split()[0], CONFIGURATIONS[name]
    ranks(before)(save_half_way, strategy, optimizer, arguments, str(tmp_path))
    expected = run(None, optimizer, arguments)
    for resumed in ranks(after)(resume, strategy, optimizer, arguments, str(tmp_path)):
        assert_equal(resumed, expected, rtol=1e-9, atol=1e-12)


def test_with_the_same_ranks_it_goes_on_bit_for_bit(ranks, tmp_path) -> None:
    ranks(2)(save_half_way, "fsdp", "Vprop", {}, str(tmp_path))
    uninterrupted = ranks(2)(run, "fsdp", "Vprop", {})
    for resumed, expected in zip(ranks(2)(resume, "fsdp", "Vprop", {}, str(tmp_path)), uninterrupted, strict=True):
        assert_equal(resumed, expected)


@pytest.mark.parametrize(("optimizer", "arguments"), [("Vprop", {}), ("Vprop", {"mc_samples": 0}), ("IVON", {})])
def test_the_request_for_a_state_is_no_step(optimizer, arguments) -> None:
    """It asks by a step on zero gradients; the run afterwards must be the run without it."""
    model = make_model(torch.float64)
    optim = getattr(vprop, optimizer)(model.parameters(), lr=0.1, num_data=100, **arguments)
    get_state_dict(model, optim)
    assert all(int(state["step"]) == 0 for state in optim.state.values())
    go_on(model, optim, None, "closure")
    assert_equal(gathered(model, optim), run(None, optimizer, arguments))


def test_a_step_of_length_zero_with_gradients_is_still_refused_without_a_sample() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optim = vprop.Vprop([weight], lr=0.0, num_data=100)
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"step\(\) without a sample"):
        optim.step()


def resume_sharded(weights: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Tensor]:
    """From the plain ``state_dict()``s of one process."""
    model = make_model(torch.float64)
    model.load_state_dict(weights)
    model = fsdp(model)
    optim = vprop.IVON(model.parameters(), num_data=1)
    optim.load_state_dict(state)
    go_on(model, optim, "fsdp", "closure", steps=2, first_step=2)
    return gathered(model, optim)


def test_a_checkpoint_of_one_process_is_spread_when_it_is_loaded(ranks) -> None:
    model, optim = start(None, "IVON", {})
    go_on(model, optim, None, "closure", steps=2)
    for together in ranks(2)(resume_sharded, model.state_dict(), optim.state_dict()):
        assert_equal(together, run(None, "IVON", {}), rtol=1e-9, atol=1e-12)

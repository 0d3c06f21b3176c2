"""Checkpoints of an eigenbasis, and models that change their precision."""

import io
import math

import pytest
import torch
from torch import nn

import vprop
from tests.harness import make_batch, make_model, train


def make(**arguments):
    model = make_model()
    arguments = {"lr": 0.01, "num_data": 200, "batch_size": 12, "structure": "eigenbasis", "basis_every": 2} | arguments
    return model, vprop.Vario(model.parameters(), **arguments)


def test_the_checkpoint_of_another_structure_is_refused():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=2)
    other = vprop.Vario(model.parameters(), num_data=200, batch_size=12)
    message = "group 0 of the checkpoint has structure='eigenbasis', that of this optimizer 'diagonal'. Build"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(optimizer.state_dict())
    old = other.state_dict()
    for group in old["param_groups"]:
        del group["structure"]
    other.load_state_dict(old)  # older than the argument
    with pytest.raises(ValueError, match="group 0 of the checkpoint has structure='diagonal'"):
        optimizer.load_state_dict(old)


@pytest.mark.parametrize(
    ("key", "bad", "pattern"),
    [
        ("left_basis", torch.eye(3), r"'left_basis' of parameter 0 is of shape \(3, 3\), must have \(8, 8\)"),
        ("left_basis", torch.ones(8, 8), r"'left_basis' of parameter 0 is not orthogonal"),
        ("left_average", None, r"'left_average' of parameter 0 is missing, must have \(8, 8\)"),
        ("right_average", torch.full((4, 4), math.nan), r"'right_average' of parameter 0 holds NaN or infinity"),
        ("hess", None, r"the state of parameter 0 has no 'hess'"),
    ],
)
def test_a_broken_checkpoint_is_refused(key, bad, pattern):
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=2)
    saved = optimizer.state_dict()
    entry = {name: value for name, value in saved["state"][0].items() if name != key}
    saved["state"] = saved["state"] | {0: entry if bad is None else entry | {key: bad}}
    with pytest.raises(ValueError, match=pattern):
        optimizer.load_state_dict(saved)


def test_a_run_goes_on_where_it_was_saved():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(None, model=model, optimizer=optimizer, steps=6, first_step=5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make(seed=3)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(None, model=other, optimizer=resumed, steps=6, first_step=5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(torch.equal(value, resumed.state[q][key]) for key, value in optimizer.state[p].items())


@pytest.mark.parametrize("kind", [vprop.Vario, vprop.Vprop, vprop.IVON])
def test_a_run_with_layers_that_join_late_goes_on_where_it_was_saved(kind):
    """Those that get their momentum later are in the same batches as after a checkpoint, with the same roundings."""

    def build():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 3)]
        model, facts = nn.Sequential(*layers), {} if kind is vprop.IVON else {"batch_size": 16}
        betas = (0.9, 0.99999) if kind is vprop.IVON else (0.9, 0.999)
        return model, kind(model.parameters(), num_data=64, structure="eigenbasis", betas=betas, **facts)

    def run(model, optimizer, steps):
        for step in steps:
            model[0].requires_grad_(step >= 3)
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 65, generator=generator), torch.randint(0, 3, (16,), generator=generator)
            optimizer.step(vprop.Objective(model, nn.functional.cross_entropy, x, y))

    (model, optimizer), (other, resumed) = build(), build()
    run(model, optimizer, range(6))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    run(model, optimizer, range(6, 40))
    run(other, resumed, range(6, 40))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# -- a model that changes its precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [vprop.Vprop, vprop.IVON])
def test_a_model_in_another_precision_goes_on(kind, fused):
    """In float64 a run goes on from the float32 state, and back; the step count tells that none was lost."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        model = make_model()
        arguments = {"lr": 0.01, "num_data": 200, "basis_every": 2, "betas": (0.9, 0.99), "seed": 2, "fused": fused}
        optimizer = kind(model.parameters(), structure="eigenbasis", **arguments)
        train(None, model=model, optimizer=optimizer, steps=4)
        model.to(dtype)
        x, y = make_batch(dtype=dtype)
        optimizer.posterior(model).sample(seed=1)
        for _ in range(4):
            with optimizer.sampled_params():
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for p in model.parameters():
            state = optimizer.state[p]
            assert int(state["step"]) == 8
            assert {value.dtype for key, value in state.items() if key != "step"} == {dtype}
        runs.append([p.detach().double() for p in model.parameters()])
        model.float()
        train(None, model=model, optimizer=optimizer, steps=5, first_step=4)
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_evaluation_leaves_a_state_of_another_precision_alone():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=2)
    model.double()
    with optimizer.sampled_params(train=False):
        pass
    assert all(optimizer.state[p]["hess"].dtype == torch.float32 for p in model.parameters())


# -- a checkpoint without bases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "side"), [(0, "left"), (0, "right"), (1, "left"), (2, "right")])
def test_a_checkpoint_without_a_basis_is_refused(number, side):
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=2)
    saved = optimizer.state_dict()
    missing = (f"{side}_basis", f"{side}_average")
    entry = {name: value for name, value in saved["state"][number].items() if name not in missing}
    saved["state"] = saved["state"] | {number: entry}
    with pytest.raises(ValueError, match=f"parameter {number} has neither '{side}_basis' nor '{side}_average'"):
        optimizer.load_state_dict(saved)
    train(None, model=model, optimizer=optimizer, steps=3, first_step=2)  # as it was


@pytest.mark.parametrize(("theirs", "ours"), [(4, 1024), (1024, 4)])
def test_the_checkpoint_says_which_sides_have_a_basis(theirs, ours):
    model, optimizer = make(max_basis_dim=theirs)
    train(None, model=model, optimizer=optimizer, steps=2)
    other, resumed = make(max_basis_dim=ours)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["max_basis_dim"] == theirs
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == resumed.state[q].keys()
    train(None, model=other, optimizer=resumed, steps=3, first_step=2)


def test_a_state_that_has_made_no_step_may_lack_its_bases():
    model, optimizer = make(lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # asks for the state that a checkpoint can be loaded into
    saved = optimizer.state_dict()
    saved["state"] = {
        number: {name: value for name, value in entry.items() if name in ("step", "hess", "momentum")}
        for number, entry in saved["state"].items()
    }
    optimizer.load_state_dict(saved)
    train(None, model=model, optimizer=optimizer, steps=1)
    assert all("left_basis" in optimizer.state[p] for p in model.parameters())


def test_a_raised_limit_is_refused_at_the_step():
    """There are no bases for longer sides, and a checkpoint that asks for them could not be loaded."""
    model, optimizer = make(max_basis_dim=3)
    train(None, model=model, optimizer=optimizer, steps=2)
    optimizer.param_groups[0]["max_basis_dim"] = 8
    with pytest.raises(ValueError, match=r"Invalid max_basis_dim=8: must be less than \d, as it was when the state"):
        train(None, model=model, optimizer=optimizer, steps=1)
    optimizer.param_groups[0]["max_basis_dim"] = 3
    train(None, model=model, optimizer=optimizer, steps=1)
    _, resumed = make(max_basis_dim=3)
    resumed.load_state_dict(optimizer.state_dict())

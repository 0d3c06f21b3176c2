"""torch's generic optimizer checks over every row of the database: state dicts, copies, hooks.

A test that has torch's name does what torch's does; what is different is named in ``test_torch_generic.py``.

A run that is saved and loaded goes on bit for bit in ``test_checkpoint.py``; what is refused is in ``test_loading.py``.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optim.database import every_implementation, every_input, every_optimizer
from tests.optim.generic import Problem, trained


def assert_same(first, second):
    """Equal values all the way down, tensors bit for bit."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


# -- state dicts -----------------------------------------------------------------------------------------------------


def named(problem, names):
    return list(problem.model.named_parameters()) if names else problem.parameters


def without_names(state_dict):
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return state_dict | {"param_groups": groups}


@every_implementation
def test_state_dict_deterministic(case):
    """Two runs have equal ones; loading one does not change it, and the two go on as one. Names are no matter."""
    problem, other = Problem(), Problem()
    optimizer, twin = case(problem.model.named_parameters()), case(other.parameters)
    problem.train(optimizer, 3)
    other.model.load_state_dict(problem.model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(saved)
    assert_same(saved, optimizer.state_dict())
    assert_same(without_names(twin.state_dict()), without_names(optimizer.state_dict()))
    problem.train(optimizer, 2)
    other.train(twin, 2)
    problem.same_weights(other)
    assert_same(without_names(twin.state_dict()), without_names(optimizer.state_dict()))
    # A group that stands there twice has the same words and the same numbers of parameters both times.
    twin.param_groups.extend(twin.param_groups)
    first, second = without_names(twin.state_dict())["param_groups"]
    assert_same(first, second)


@every_implementation
def test_non_empty_state(case):
    """Made by the first step, for every parameter."""
    problem, optimizer = trained(case, steps=0)
    assert not optimizer.state
    problem.train(optimizer, 1)
    for p in problem.parameters:
        assert int(optimizer.state[p]["step"]) == 1
        assert len(optimizer.state[p]) > 1


@every_input
def test_momentum_costs_memory_only_where_there_is_some(case):
    """State per weight: a variance, and a momentum if β₁ > 0. BBVI has what its method keeps."""
    _, optimizer = trained(case, steps=1)
    keys = {key for state in optimizer.state.values() for key in state}
    if case.info.name == "BBVI":
        assert "momentum" not in keys
    else:
        assert ("momentum" in keys) == (optimizer.param_groups[0]["betas"][0] > 0)
    assert "mean" not in keys


@every_input
@pytest.mark.parametrize("names", [False, True])
def test_save_load_equality_with_weights_only(case, names):
    problem = Problem()
    optimizer = case(named(problem, names))
    problem.train(optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


def names_of_arguments(optimizer):
    return [name for name in optimizer.defaults if name not in ("num_data", "curvature", "betas", "mc_samples", "lr")]


@every_optimizer
def test_can_load_older_state_dict(case):
    """Each argument in turn: what a checkpoint does not say is the optimizer's own."""
    _, optimizer = trained(case)
    for name in names_of_arguments(optimizer):
        problem, other = trained(case, steps=1)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            del group[name]
        other.load_state_dict(saved)
        assert_same(other.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])
        problem.train(other, 1)


@every_optimizer
@pytest.mark.parametrize("names", ["", "other."])
@pytest.mark.parametrize("names_of_twin", ["", "other."])
def test_can_load_from_to_named_state_dict(case, names, names_of_twin):
    """A checkpoint's names are taken over, and one without leaves those that are there."""
    problem, other = Problem(), Problem()
    optimizer = case(named(problem, names))
    problem.train(optimizer, 1)
    prefixed = [(names_of_twin + name, p) for name, p in other.model.named_parameters()]
    twin = case(prefixed if names_of_twin else other.parameters)
    twin.load_state_dict(optimizer.state_dict())
    prefix = "" if names else names_of_twin
    expected = [prefix + "weight", prefix + "bias"] if names or names_of_twin else None
    assert twin.state_dict()["param_groups"][0].get("param_names") == expected
    other.train(twin, 1)


@every_input
def test_load_nontensor_step(case):
    """A count of steps that is a number, as older optimizers of torch's have it."""
    problem, optimizer = trained(case)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(saved)
    problem.train(optimizer, 1)
    assert all(int(state["step"]) == 4 for state in optimizer.state.values())


@every_optimizer
def test_the_state_moves_to_the_precision_of_other_parameters(case):
    _, optimizer = trained(case)
    other = Problem(dtype=torch.float64)
    twin = case(other.parameters)
    twin.load_state_dict(optimizer.state_dict())
    for state in twin.state.values():
        assert all(not value.is_floating_point() or value.dtype == torch.float64 for value in state.values())
        assert state["step"].dtype == torch.int64
    other.train(twin, 2)


@every_input
def test_deepcopy_copies_all_public_attrs(case):
    _, optimizer = trained(case)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for one, other in ((optimizer, twin), (twin, optimizer)):
            assert {name for name in vars(one) if name[0] != "_"} <= {name for name in vars(other) if name[0] != "_"}
        assert_same(twin.state_dict(), optimizer.state_dict())
        assert twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]


# -- hooks -----------------------------------------------------------------------------------------------------------


def count_of_steps(optimizer):
    return {int(state["step"]) for state in optimizer.state.values()}


@every_input
@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_pre_hook_and_post_hook(case, when):
    """They see the state before the step, or after it; taken away they are silent."""
    problem, optimizer = trained(case, steps=1)
    seen = []
    handle = getattr(optimizer, f"register_step_{when}_hook")(lambda *_: seen.append(count_of_steps(optimizer)))
    problem.train(optimizer, 2)
    assert seen == ([{1}, {2}] if when == "pre" else [{2}, {3}])
    handle.remove()
    problem.train(optimizer, 1)
    assert len(seen) == 2


@every_input
def test_step_all_hooks(case):
    """Those of all optimizers are outside those of one; another optimizer's are its own."""
    problem, optimizer = trained(case, steps=0)
    other = torch.optim.SGD(problem.parameters)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        problem.train(optimizer, 1)
        assert calls == ["all pre", "pre", "post", "all post"]
        other.step()
        assert calls[4:] == ["all pre", "all post"]
    finally:
        for handle in handles:
            handle.remove()
    problem.train(optimizer, 1)
    assert len(calls) == 6


@every_optimizer
class TestStepHooks:
    def test_one_that_gives_other_arguments(self, case):
        problem, optimizer = trained(case, steps=0)
        steps = []

        def closure_of_another_kind(optimizer, args, kwargs):
            steps.append(args)
            return (optimizer, problem.objective), kwargs

        optimizer.register_step_pre_hook(closure_of_another_kind)
        before = problem.loss()
        for _ in range(5):
            optimizer.step(None)
        assert problem.loss() < before
        assert len(steps) == 5


def leave_a_note(optimizer):
    optimizer.state["note"] = 1


def take_the_note(optimizer, state_dict):
    return state_dict | {"found": state_dict["state"].pop("note", None)}


@every_input
def test_state_dict_pre_hook(case):
    """torch's own check leaves a word in the state, where parameters and tensors are expected."""
    _, optimizer = trained(case, steps=1)
    optimizer.register_state_dict_pre_hook(leave_a_note)
    assert optimizer.state_dict()["state"]["note"] == 1


@every_input
def test_state_dict_post_hook(case):
    _, optimizer = trained(case, steps=1)
    optimizer.register_state_dict_post_hook(take_the_note)
    optimizer.register_state_dict_post_hook(lambda _, saved: None)
    saved = optimizer.state_dict()
    assert saved["found"] is None
    optimizer.load_state_dict(saved)


@every_input
def test_state_dict_pre_post_hook(case):
    _, optimizer = trained(case, steps=1)
    optimizer.register_state_dict_pre_hook(leave_a_note)
    optimizer.register_state_dict_post_hook(take_the_note)
    saved = optimizer.state_dict()
    assert saved["found"] == 1
    assert "note" not in saved["state"]


def set_the_lr(optimizer, state_dict):
    """In place, as the first of torch's hooks does."""
    state_dict["param_groups"][0]["lr"] = 0.002


def another_lr(optimizer, state_dict):
    """In a copy, as the second does."""
    other = copy.deepcopy(state_dict)
    other["param_groups"][0]["lr"] = 0.003
    return other


def note_the_lr(optimizer):
    optimizer.state["note"] = optimizer.param_groups[0]["lr"]


@every_input
def test_load_state_dict_pre_hook_and_prepend(case):
    _, optimizer = trained(case, steps=1)
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(set_the_lr)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(another_lr, prepend=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002


@every_input
def test_load_state_dict_post_hook(case):
    _, optimizer = trained(case, steps=1, lr=0.05)
    optimizer.register_load_state_dict_post_hook(note_the_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["note"] == 0.05


@every_input
def test_load_state_dict_pre_post_hook(case):
    _, optimizer = trained(case, steps=1)
    optimizer.register_load_state_dict_pre_hook(another_lr)
    optimizer.register_load_state_dict_post_hook(note_the_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["note"] == 0.003


@every_optimizer
class TestStateDictHooks:
    def test_one_that_returns_something_else(self, case):
        """Whoever flattens a state dict on the way out restores it on the way in."""
        problem, optimizer = trained(case)
        optimizer.register_state_dict_post_hook(lambda _, saved: {"packed": [saved]})
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["packed"][0])
        packed = copy.deepcopy(optimizer.state_dict())
        assert packed.keys() == {"packed"}
        optimizer.load_state_dict(packed)
        assert_same(optimizer.state_dict(), packed)
        problem.train(optimizer, 1)

    @pytest.mark.parametrize("prepend", [False, True])
    def test_after_loading_in_their_order(self, case, prepend):
        _, optimizer = trained(case)
        seen = []
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("first", len(o.state))))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("second", len(o.state))), prepend=prepend)
        optimizer.load_state_dict(optimizer.state_dict())
        # All of the state is there when they run.
        assert seen == ([("second", 2), ("first", 2)] if prepend else [("first", 2), ("second", 2)])

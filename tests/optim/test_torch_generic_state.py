"""torch's generic optimizer checks over every optimizer of the table: state dicts, copies, hooks.

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

from tests.optim.generic import EVERY_CASE, EVERY_OPTIMIZER, Problem, trained

every_case = pytest.mark.parametrize("case", EVERY_CASE)
every_optimizer = pytest.mark.parametrize("case", EVERY_OPTIMIZER)


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


@every_case
def test_the_state_dict_is_deterministic(case):
    """Two runs have equal ones; loading one does not change it, and the two go on as one."""
    (problem, optimizer), (other, twin) = trained(case), trained(case, steps=0)
    other.model.load_state_dict(problem.model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(saved)
    assert_same(saved, optimizer.state_dict())
    assert_same(twin.state_dict(), optimizer.state_dict())
    problem.train(optimizer, 2)
    other.train(twin, 2)
    problem.same_weights(other)
    assert_same(twin.state_dict(), optimizer.state_dict())


@every_case
def test_state_is_made_by_the_first_step_for_every_parameter(case):
    problem, optimizer = trained(case, steps=0)
    assert not optimizer.state
    problem.train(optimizer, 1)
    for p in problem.parameters:
        assert int(optimizer.state[p]["step"]) == 1
        assert len(optimizer.state[p]) > 1


@every_case
def test_what_it_saves_are_numbers_words_and_tensors(case):
    """A file that ``torch.load(weights_only=True)`` reads, equal to what was saved."""
    _, optimizer = trained(case)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


def names_of_arguments(optimizer):
    return [name for name in optimizer.defaults if name not in ("num_data", "curvature", "betas", "mc_samples", "lr")]


@every_optimizer
def test_older_checkpoints_without_an_argument_load(case):
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
def test_names_travel_with_the_state_dict(case):
    problem = Problem()
    named = case(problem.model.named_parameters())
    problem.train(named, 1)
    assert named.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    other = Problem()
    twin = case([(f"other.{name}", p) for name, p in other.model.named_parameters()])
    twin.load_state_dict(named.state_dict())
    assert twin.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@every_optimizer
def test_from_names_to_none_and_back(case):
    """As in torch: a checkpoint's names are taken over, and one without leaves those that are there."""
    problem, unnamed = trained(case)
    named = case(problem.model.named_parameters())
    named.load_state_dict(unnamed.state_dict())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    unnamed.load_state_dict(named.state_dict())
    assert unnamed.param_groups[0]["param_names"] == ["weight", "bias"]
    problem.train(unnamed, 1)


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


@every_case
def test_copies_have_all_public_attributes(case):
    _, optimizer = trained(case)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for one, other in ((optimizer, twin), (twin, optimizer)):
            assert {name for name in vars(one) if name[0] != "_"} <= {name for name in vars(other) if name[0] != "_"}
        assert_same(twin.state_dict(), optimizer.state_dict())
        assert twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]


# -- hooks -----------------------------------------------------------------------------------------------------------


@every_optimizer
class TestStepHooks:
    def test_before_and_after_in_their_order(self, case):
        problem, optimizer = trained(case)
        calls = []
        steps = [int(state["step"]) for state in optimizer.state.values()]

        def now():
            return [int(state["step"]) for state in optimizer.state.values()] == steps

        handles = [
            optimizer.register_step_pre_hook(lambda *_: calls.append(("pre", now()))),
            optimizer.register_step_post_hook(lambda *_: calls.append(("post", now()))),
            register_optimizer_step_pre_hook(lambda *_: calls.append(("all pre", now()))),
            register_optimizer_step_post_hook(lambda *_: calls.append(("all post", now()))),
        ]
        try:
            problem.train(optimizer, 1)
        finally:
            for handle in handles:
                handle.remove()
        assert sorted(calls) == [("all post", False), ("all pre", True), ("post", False), ("pre", True)]
        problem.train(optimizer, 1)
        assert len(calls) == 4

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


@every_optimizer
class TestStateDictHooks:
    def test_before_saving(self, case):
        _, optimizer = trained(case)
        optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.param_groups[0].update(lr=0.002))
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.002

    def test_after_saving(self, case):
        _, optimizer = trained(case)
        optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"extra": 1})
        optimizer.register_state_dict_post_hook(lambda _, saved: None)
        saved = optimizer.state_dict()
        assert saved["extra"] == 1
        optimizer.load_state_dict(saved)

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
    def test_before_loading_in_their_order(self, case, prepend):
        _, optimizer = trained(case)
        saved = optimizer.state_dict()

        def times(factor):
            def hook(_, state_dict):
                groups = [group | {"lr": group["lr"] * factor + 1} for group in state_dict["param_groups"]]
                return state_dict | {"param_groups": groups}

            return hook

        optimizer.register_load_state_dict_pre_hook(times(2))
        optimizer.register_load_state_dict_pre_hook(times(3), prepend=prepend)
        optimizer.load_state_dict(saved)
        once, then = (3, 2) if prepend else (2, 3)
        assert optimizer.param_groups[0]["lr"] == pytest.approx((0.05 * once + 1) * then + 1)

    @pytest.mark.parametrize("prepend", [False, True])
    def test_after_loading_in_their_order(self, case, prepend):
        _, optimizer = trained(case)
        seen = []
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("first", len(o.state))))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("second", len(o.state))), prepend=prepend)
        optimizer.load_state_dict(optimizer.state_dict())
        # All of the state is there when they run.
        assert seen == ([("second", 2), ("first", 2)] if prepend else [("first", 2), ("second", 2)])

"""load_state_dict is all or nothing: what does not fit is refused first, and a refusal leaves the optimizer alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import vprop
from tests.harness import assert_same_run, closure_step, make_batch, make_model, train
from tests.table import TABLE, Case, cases
from vprop import IVON, VON, VONG, Vadam, Vprop
from vprop.baselines import Newton


def case_of(info) -> Case:
    return Case(info, next(iter(info.configurations.values())))


CASES = {info.name: case_of(info) for info in TABLE}


def all_of(optimizer):
    """Everything that a refusal must leave alone, as values that can be compared."""
    groups = [{key: repr(value) for key, value in group.items()} for group in optimizer.param_groups]
    state = {id(p): {key: repr(value) for key, value in entry.items()} for p, entry in optimizer.state.items()}
    identities = [id(group) for group in optimizer.param_groups], id(optimizer.state), id(optimizer._sampling)
    return groups, state, identities, sorted(optimizer.defaults)


def refuses(optimizer, checkpoint, match, error=ValueError):
    before = all_of(optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(checkpoint)
    assert all_of(optimizer) == before


def spoil_group(name, value):
    return lambda saved: saved["param_groups"][0].update({name: value})


def spoil_state(number, key, value):
    return lambda saved: saved["state"][number].update({key: value})


SPOILT = {
    "a hyperparameter that is not allowed": (spoil_group("num_data", -3), r"Invalid num_data=-3"),
    "no number": (spoil_group("lr", "fast"), r"Invalid lr='fast'"),
    "no groups": (lambda saved: saved.pop("param_groups"), r"the checkpoint has no 'param_groups', only \['state'\]"),
    "no state": (lambda saved: saved.pop("state"), r"the checkpoint has no 'state'"),
    "groups that are none": (lambda saved: saved.update(param_groups=[0]), r"must be a list of dicts"),
    "a state that is none": (
        lambda saved: saved["state"].update({0: None}),
        r"'state' of the checkpoint must be a dict",
    ),
    "no step": (lambda saved: saved["state"][0].pop("step"), r"the state of parameter 0 has no 'step', only"),
    "a broken step": (spoil_state(0, "step", torch.tensor(1.5)), r"'step' of parameter 0 is .*whole number >= 0"),
    "a negative step": (spoil_state(1, "step", -1), r"'step' of parameter 1 is -1, must be a whole number"),
    "a method that is another": (spoil_group("variational_method", "Adam"), r"this is a checkpoint of Adam"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("name", CASES)
def test_a_refused_checkpoint_changes_nothing(name, spoilt):
    case = CASES[name]
    saved = copy.deepcopy(train(case, steps=2)[1].state_dict())
    spoil, match = SPOILT[spoilt]
    spoil(saved)
    model, optimizer = train(case, steps=1, seed=3)
    refuses(optimizer, saved, match)
    twin = train(case, steps=1, seed=3)
    for run in (twin, (model, optimizer)):
        train(case, model=run[0], optimizer=run[1], first_step=1, steps=1)
    assert_same_run(twin, (model, optimizer))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_a_state_that_is_not_finite_is_refused(name, value):
    optimizer = train(CASES[name], steps=2)[1]
    saved = copy.deepcopy(optimizer.state_dict())
    key = next(key for key in ("hess", "std") if key in saved["state"][0])
    saved["state"][0][key].view(-1)[1] = value
    refuses(optimizer, saved, rf"'{key}' of parameter 0 holds NaN or infinity")


@pytest.mark.parametrize("name", CASES)
def test_a_state_without_its_variance_is_refused(name):
    optimizer = train(CASES[name], steps=2)[1]
    saved = copy.deepcopy(optimizer.state_dict())
    key = next(key for key in ("hess", "std") if key in saved["state"][0])
    del saved["state"][0][key]
    refuses(optimizer, saved, rf"no '{key}'|one 'hess' of shape \(67, 67\) in the state, but there is none")
    saved["state"][0][key] = [1.0]
    refuses(optimizer, saved, rf"'{key}' of parameter 0 is a list, must be a tensor")


def test_a_variance_below_zero_is_refused():
    optimizer = train(IVON, num_data=50, steps=2)[1]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["hess"][0, 0] = -1 / 100  # δ is 1/50, so this is a narrow prior's
    optimizer.load_state_dict(saved)
    saved["state"][2]["hess"][0, 0] = -1.0
    refuses(optimizer, saved, r"'hess' of parameter 2 makes a variance that is negative")


def test_what_is_no_state_dict_is_a_type_error():
    optimizer = train(Vprop, num_data=50)[1]
    refuses(optimizer, None, r"got NoneType, must be what optimizer\.state_dict\(\) returned", TypeError)


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("name", CASES)
def test_a_hook_that_raises_changes_nothing(name, when):
    saved = train(CASES[name], steps=2)[1].state_dict()
    optimizer = train(CASES[name], steps=1)[1]

    def complain(optimizer, *rest):
        optimizer.param_groups[0]["lr"] = 77.0
        raise KeyError("from a hook")

    getattr(optimizer, f"register_load_state_dict_{when}_hook")(complain)
    refuses(optimizer, saved, "from a hook", KeyError)


def test_a_refusal_leaves_the_held_sample_in_the_weights():
    model, optimizer = train(Vprop, num_data=50, steps=1)
    mean = model[0].weight.detach().clone()
    optimizer.hold_sample()
    sample = model[0].weight.detach().clone()
    refuses(optimizer, {"state": {}, "param_groups": []}, r"the checkpoint has 0 parameter groups")
    torch.testing.assert_close(model[0].weight.detach(), sample, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(model[0].weight, mean, atol=1e-3)
    optimizer.discard_samples()


# -- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", CASES)
@pytest.mark.parametrize("ours", CASES)
def test_only_the_same_method_goes_on_from_a_checkpoint(ours, theirs):
    saved = train(CASES[theirs], steps=2)[1].state_dict()
    optimizer = train(CASES[ours], steps=1)[1]
    if ours == theirs:
        optimizer.load_state_dict(saved)
    else:
        refuses(optimizer, saved, rf"this is a checkpoint of {theirs}, the optimizer is {ours}.*as_prior\(\)")


def test_other_defaults_are_no_other_method():
    """Newton is VON with other defaults, and hyperparameters come from the checkpoint; so with one's own subclasses."""

    class Logged(Vprop):
        def step(self, closure=None):
            return super().step(closure)

    Logged([nn.Parameter(torch.zeros(1))], num_data=1).load_state_dict(
        Vprop([nn.Parameter(torch.zeros(1))], num_data=50, mc_samples=3).state_dict()
    )
    saved = train(VON, num_data=50, steps=2)[1].state_dict()
    optimizer = train(Newton, num_data=50, steps=1)[1]
    optimizer.load_state_dict(saved)
    assert optimizer.mc_samples == 1


def without_method(saved):
    for group in saved["param_groups"]:
        del group["variational_method"]
    for state in saved["state"].values():
        state.pop("shape", None)
    return saved


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_from_before_methods_were_recorded(name):
    case = CASES[name]
    run = train(case, steps=2)
    model, optimizer = copy.deepcopy(run[0]), None
    optimizer = case(model.parameters())
    optimizer.load_state_dict(without_method(copy.deepcopy(run[1].state_dict())))
    assert optimizer.param_groups[0].keys() == run[1].param_groups[0].keys()
    for model_, optimizer_ in (run, (model, optimizer)):
        train(case, model=model_, optimizer=optimizer_, first_step=2, steps=1)
    assert_same_run(run, (model, optimizer))


@pytest.mark.parametrize(("theirs", "ours"), [("Vprop", "VON"), ("VON", "Vprop"), ("BBVI", "IVON"), ("IVON", "BBVI")])
def test_without_a_recorded_method_the_state_itself_must_fit(theirs, ours):
    saved = without_method(copy.deepcopy(train(CASES[theirs], steps=2)[1].state_dict()))
    refuses(train(CASES[ours], steps=1)[1], saved, r"load_state_dict\(\): .*(hess|std|shape)")


@pytest.mark.parametrize("constructor", [VON, VONG])
def test_a_matrix_over_parameters_of_other_shapes_is_refused(constructor):
    """Two models of four weights each: the matrix has the same shape, and its rows are other weights."""
    x = torch.ones(4, 1)
    theirs = nn.Linear(1, 2)
    saved = constructor(theirs.parameters(), num_data=10)
    saved.step(vprop.Objective(theirs, F.mse_loss, x, torch.ones(4, 2)))
    optimizer = constructor(nn.Linear(3, 1).parameters(), num_data=10)
    refuses(optimizer, saved.state_dict(), r"parameter 0 .* has shape \(2, 1\) in the checkpoint and \(1, 3\) here")


# -- keys of the groups ----------------------------------------------------------------------------------------------


def reloaded(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "load_state_dict": reloaded,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", cases())
def test_groups_keep_exactly_their_keys(case, way):
    optimizer = train(case, steps=1)[1]
    before, defaults = list(optimizer.param_groups[0]), list(optimizer.defaults)
    again = WAYS[way](optimizer)
    assert sorted(again.param_groups[0]) == sorted(before)
    assert list(again.defaults) == defaults


def test_a_distributed_checkpoint_loads_after_a_copy_a_resume_and_lr_find(tmp_path):
    model, optimizer = train(Vprop, num_data=50, steps=2)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other, copied = copy.deepcopy(train(Vprop, num_data=50, steps=1))
    copied.load_state_dict(copied.state_dict())
    vprop.lr_find(copied, other, F.cross_entropy, [make_batch()], steps=10, lrs=[0.1])
    weights, state = get_state_dict(other, copied)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(other, copied, model_state_dict=weights, optim_state_dict=state)
    assert_same_run((model, optimizer), (other, copied))


def test_a_distributed_checkpoint_from_before_methods_were_recorded(tmp_path):
    model, optimizer = train(Vprop, num_data=50, steps=2)
    weights, state = get_state_dict(model, optimizer)
    for group in state["param_groups"]:
        del group["variational_method"]
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other, resumed = train(Vprop, num_data=1, steps=1)
    weights, state = get_state_dict(other, resumed)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    assert_same_run((model, optimizer), (other, resumed))
    assert resumed.param_groups[0]["num_data"] == 50


def test_a_distributed_checkpoint_of_another_method_is_refused(tmp_path):
    """Vadam has no argument that IVON has not, so nothing but the recorded method tells them apart."""
    model, optimizer = train(IVON, num_data=50, steps=2)
    _, state = get_state_dict(model, optimizer)
    checkpoint.save({"optimizer": state}, checkpoint_id=tmp_path)
    other, adam = train(Vadam, num_data=50, steps=1)
    _, state = get_state_dict(other, adam)
    checkpoint.load({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="this is a checkpoint of IVON, the optimizer is Vadam"):
        set_state_dict(other, adam, model_state_dict={}, optim_state_dict=state)


# -- what hooks do, and what older checkpoints hold ------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(at_most_samples=1))
@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda n: torch.tensor(float(n))])
def test_a_step_count_that_is_a_number(case, kind):
    run = train(case, steps=2)
    saved = copy.deepcopy(run[1].state_dict())
    for state in saved["state"].values():
        state["step"] = kind(int(state["step"]))
    run[1].load_state_dict(saved)
    assert all(state["step"].dtype == torch.int64 for state in run[1].state.values())
    train(case, model=run[0], optimizer=run[1], first_step=2, steps=1)
    assert_same_run(train(case, steps=3), run)


@pytest.mark.parametrize("name", CASES)
def test_what_hooks_change_is_kept(name):
    saved = train(CASES[name], steps=2)[1].state_dict()
    model, optimizer = train(CASES[name], steps=1)
    key = next(key for key in ("hess", "std") if key in saved["state"][0])

    def before(_, state_dict):
        first = state_dict["state"][0]
        changed = first | {key: 2 * first[key], "note": "from a hook"}
        return state_dict | {"state": state_dict["state"] | {0: changed}}

    def after(optimizer):
        optimizer.state[model[0].weight][key].mul_(3)
        optimizer.state[model[0].bias]["step"] = torch.tensor(40)
        optimizer.param_groups[0]["lr"] = 0.125

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model[0].weight][key], 6 * saved["state"][0][key])
    assert optimizer.state[model[0].weight]["note"] == "from a hook"
    assert int(optimizer.state[model[0].bias]["step"]) == 40
    assert optimizer.param_groups[0]["lr"] == 0.125
    closure_step(optimizer, model, [make_batch()])


def test_loading_leaves_the_checkpoint_alone_and_shares_nothing_with_it():
    lr = torch.tensor(0.25)
    _, optimizer = train(Vprop, num_data=50, steps=2, lr=lr)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    model = make_model()
    other = Vprop(model.parameters(), num_data=1)
    other.load_state_dict(saved)
    train(Vprop, model=model, optimizer=other, steps=2)
    other.param_groups[0]["lr"].fill_(9.0)
    assert float(lr) == 0.25
    assert repr(saved) == repr(kept)

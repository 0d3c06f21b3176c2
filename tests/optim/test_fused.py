"""Kernels in the optimizers: the same run as without them, whatever is done to parameters and state in between."""

from __future__ import annotations

import copy
import os
import pickle
import signal

import pytest
import torch
from torch import nn

from tests.harness import assert_same_run, backward, closure_step, make_batch, make_model
from tests.table import cases
from vprop import IVON, VON, Vprop
from vprop.baselines import BBVI
from vprop.kernels import cpu
from vprop.structures.packs import Pack

pytestmark = pytest.mark.skipif(not cpu.available(), reason="built without compiled kernels")

ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def run(make, edit=None, *, steps=5, **arguments):
    """Train, with something done to model and optimizer before each step."""
    model = make_model()
    optimizer = make(model.parameters(), **arguments)
    for step in range(steps):
        if edit is not None:
            edit(model, optimizer, step)
        closure_step(optimizer, model, [make_batch(seed=step)])
    return model, optimizer


def move(model, optimizer, step):
    if step == 2:
        for p in model.parameters():
            p.data = p.data.clone()


def forget_state(model, optimizer, step):
    if step == 2:
        optimizer.state[model[0].weight] = {}


def replace_state(model, optimizer, step):
    if step == 2:
        state = optimizer.state[model[0].weight]
        state["hess"], state["step"] = state["hess"] * 2, torch.tensor(7)


def write_into_state(model, optimizer, step):
    if step == 2:
        state = optimizer.state[model[0].weight]
        state["hess"].mul_(2)
        state["step"].fill_(7)


def freeze(model, optimizer, step):
    model[0].bias.requires_grad_(step not in (1, 2))
    if step in (1, 2):
        model[0].bias.grad = None


def change_momentum(model, optimizer, step):
    if step in (2, 4):
        optimizer.param_groups[0]["betas"] = (0.9, 0.99) if step == 2 else (0.0, 0.99)


def change_prior(model, optimizer, step):
    if step in (1, 3):
        lists = [torch.full_like(p, 2.0) for p in model.parameters()]
        optimizer.param_groups[0]["prior_precision"] = lists if step == 1 else 3.0


def reload(model, optimizer, step):
    if step == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_layout(model, optimizer, step):
    if step == 2:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()


def replace_group(model, optimizer, step):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 2 * optimizer.defaults["lr"] / (step + 1)}


EDITS = [
    move, forget_state, replace_state, write_into_state, freeze, change_momentum, change_prior, reload, other_layout,
    replace_group,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("case", cases(any_loop=True, has_hess=True))
def test_the_same_run_as_without_kernels(case, edit):
    kernels, portable = run(case, edit), run(case, edit, fused=False)
    assert kernels[1]._structure._packs.packs
    assert not portable[1]._structure._packs.packs
    assert_same_run(portable, kernels, **ROUNDING)


@pytest.mark.parametrize("case", cases(any_loop=True, has_hess=True))
def test_parameters_that_take_part_only_sometimes(case):
    """In some steps, and with several samples in some samples of a step."""
    runs = []
    for arguments in ({}, {"fused": False}):
        a, b, c = (nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5, 2))
        optimizer, calls = case([a, b, c], **arguments), []
        for _ in range(8):

            def closure(a=a, b=b, c=c, optimizer=optimizer, calls=calls):
                optimizer.zero_grad()
                calls.append(None)
                used = [a] + [b] * (len(calls) % 2) + [c] * (len(calls) % 3 > 0)
                loss = sum((p - 0.3).square().sum() for p in used)
                loss.backward()
                return loss

            optimizer.step(closure)
        runs.append([t for p in (a, b, c) for t in (p.detach(), *optimizer.state[p].values())])
    torch.testing.assert_close(*runs, **ROUNDING)


@pytest.mark.parametrize("make_gradient", [lambda g: g.t().contiguous().t(), lambda g: g.double().float()[:, :]])
def test_gradients_of_any_layout(make_gradient):
    runs = []
    for arguments in ({}, {"fused": False}):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, **arguments)
        for step in range(3):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                backward(model, [make_batch(seed=step)])
            model[0].weight.grad = make_gradient(model[0].weight.grad)
            optimizer.step()
        runs.append((model, optimizer))
    assert_same_run(runs[1], runs[0], **ROUNDING)


def test_weights_that_are_moved_while_they_hold_a_sample():
    model = make_model()
    optimizer, before = Vprop(model.parameters(), num_data=100), [p.detach().clone() for p in model.parameters()]
    with optimizer.sampled_params():
        for p in model.parameters():
            p.data = p.data.clone()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_count_their_own_steps(duplicate):
    model, optimizer = run(Vprop, steps=2, num_data=100)
    twin = duplicate(optimizer)
    closure_step(optimizer, model, [make_batch()])
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert {int(state["step"]) for state in twin.state.values()} == {2}


def test_a_group_edited_between_the_samples_of_a_pair():
    """The first gradient was kept for a kernel, which can no longer use it."""
    runs = []
    for arguments in ({}, {"fused": False}):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2, centered=True, antithetic=True, **arguments)
        for sample in (0, 1):
            with optimizer.sampled_params(sample):
                optimizer.zero_grad()
                backward(model, [make_batch(seed=1)])
        optimizer.param_groups[0]["temperature"] = 0.5
        optimizer.step()
        runs.append((model, optimizer))
    assert_same_run(runs[1], runs[0], **ROUNDING)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 5), ("antithetic", True), ("maximize", True), ("num_data", 7), ("prior_precision", 9.0)],
)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("optimizer_class", [IVON, Vprop])
def test_what_is_edited_after_a_sample_was_drawn_counts_from_the_next_step(name, value, fused, optimizer_class):
    runs = []
    for early in (False, True):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), num_data=100, mc_samples=2, betas=(0.0, 0.9), fused=fused)
        for step in range(3):
            for sample in (0, 1):
                with optimizer.sampled_params(sample):
                    backward(model, [make_batch(seed=step)])
                if step == 1 and sample == 0 and early:
                    optimizer.param_groups[0][name] = value
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.param_groups[0][name] = value
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.parametrize("where", ["perturb", "step"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_the_mean(monkeypatch, where, when):
    """Ctrl-C while a kernel runs comes through when it is done, and noted."""
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100, lr=0.0)
    closure_step(optimizer, model, [make_batch()])
    before, work = [p.detach().clone() for p in model.parameters()], getattr(cpu, where)

    def interrupted(*arguments):
        if when == "before":
            os.kill(os.getpid(), signal.SIGINT)
        work(*arguments)
        if when == "after":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cpu, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        closure_step(optimizer, model, [make_batch()])
    monkeypatch.undo()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)
    closure_step(optimizer, model, [make_batch()])


def test_an_interrupt_when_the_step_was_counted_leaves_the_mean(monkeypatch):
    """The sample in the weights is found by the number of its step."""
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100, lr=0.0)
    closure_step(optimizer, model, [make_batch()])
    before, count = [p.detach().clone() for p in model.parameters()], Pack.count_step

    def interrupted(*arguments):
        count(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pack, "count_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        closure_step(optimizer, model, [make_batch()])
    monkeypatch.undo()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    closure_step(optimizer, model, [make_batch()])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["rows", "columns", "channels_last"])
def test_an_interrupt_leaves_the_mean_of_coarse_weights(monkeypatch, seed, layout):
    """Half of the samples round to the same bfloat16 number as the mean, so that one weight does not tell."""
    start = torch.linspace(0.5, 1.5, 96, dtype=torch.bfloat16).view(2, 3, 4, 4)
    if layout == "columns":
        start = start.reshape(96, 1)
    elif layout == "channels_last":
        start = start.contiguous(memory_format=torch.channels_last)
    scalar, weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16)), nn.Parameter(start.clone())
    optimizer = Vprop([scalar, weight], num_data=1_000_000, seed=seed)
    work = cpu.perturb

    def interrupted(*arguments):
        work(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu, "perturb", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.hold_sample()
    assert torch.equal(weight, start)
    assert scalar.item() == 1.0


def test_a_failure_in_the_update_leaves_the_mean(monkeypatch):
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    closure_step(optimizer, model, [make_batch()])
    before = [p.detach().clone() for p in model.parameters()]

    def fails(*arguments):
        raise RuntimeError("no launch")

    monkeypatch.setattr(cpu, "step", fails)
    with pytest.raises(RuntimeError, match="no launch"):
        closure_step(optimizer, model, [make_batch()])
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def edit_seed(group, model):
    group["seed"] = 5


def edit_temperature(group, model):
    group["temperature"] = 0.1


def edit_prior(group, model):
    group["prior_precision"] = [torch.full_like(p, 7.0) for p in model.parameters()]


@pytest.mark.parametrize("edit", [edit_seed, edit_temperature, edit_prior])
@pytest.mark.parametrize("prior", ["number", "list"])
@pytest.mark.parametrize("out", ["evaluation", "step"])
def test_a_group_edited_while_its_sample_is_in_the_weights(edit, prior, out):
    """What comes out is what went in."""
    model = make_model()
    precision = 2.0 if prior == "number" else [torch.full_like(p, 2.0) for p in model.parameters()]
    optimizer = Vprop(model.parameters(), num_data=100, lr=0.0, prior_precision=precision)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.attach(model)
    backward(model, [make_batch()])
    edit(optimizer.param_groups[0], model)
    if out == "step":
        optimizer.step()
    else:
        model.eval()(make_batch()[0])
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)


def exchanged(tensors, i, value):
    tensors[i] = torch.full_like(tensors[i], value)


def moved(tensors, i, value):
    tensors[i].data = torch.full_like(tensors[i], value)


def filled(tensors, i, value):
    tensors[i].fill_(value)


@pytest.mark.parametrize("change", [exchanged, moved, filled])
@pytest.mark.parametrize("prior", ["prior_mean", "prior_precision"])
@pytest.mark.parametrize("rescale_lr", [False, True])
@pytest.mark.parametrize("fused", [None, False])
def test_priors_that_are_changed_in_their_list_count(change, prior, rescale_lr, fused):
    """As with a list that is new from the start."""
    runs = []
    for anew in (True, False):
        model = make_model()
        lists = {name: [torch.ones_like(p) for p in model.parameters()] for name in ("prior_mean", "prior_precision")}
        optimizer = IVON(model.parameters(), num_data=100, rescale_lr=rescale_lr, fused=fused, **lists)
        for seed in range(4):
            if seed == 2 and anew:
                group = optimizer.param_groups[0]
                group[prior] = [torch.full_like(p, 1.0 if i else 30.0) for i, p in enumerate(model.parameters())]
            elif seed == 2:
                change(optimizer.param_groups[0][prior], 0, 30.0)
            closure_step(optimizer, model, [make_batch(seed=seed)])
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("place", ["before", "after"])
def test_frozen_parameters_that_join_a_group_move_the_others_numbers(fused, place):
    """A parameter's number addresses its noise; packs that are kept must not keep the old one."""
    runs = []
    for anew in (True, False):
        model, frozen = make_model(), nn.Parameter(torch.ones(2), requires_grad=False)
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
        optimizer = Vprop(groups, num_data=100, fused=fused)
        closure_step(optimizer, model, [make_batch()])
        optimizer.param_groups[0]["params"].insert(0 if place == "before" else 2, frozen)
        if anew:
            optimizer.load_state_dict(optimizer.state_dict())
        closure_step(optimizer, model, [make_batch(seed=1)])
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_a_failing_pack_leaves_the_mean_in_all_of_them(monkeypatch):
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    optimizer = Vprop(groups, num_data=100, lr=0.0)
    before, work, calls = [p.detach().clone() for p in model.parameters()], cpu.step, []
    optimizer.attach(model)
    backward(model, [make_batch()])

    def fails_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no launch")
        work(*arguments)

    monkeypatch.setattr(cpu, "step", fails_second)
    with pytest.raises(RuntimeError, match="no launch"):
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=1e-5, atol=1e-6)


class TestArguments:
    def test_asked_for(self):
        optimizer = run(IVON, num_data=100, fused=True)[1]
        assert len(optimizer._structure._packs.packs) == 1

    @pytest.mark.parametrize("arguments", [{"fused": False}, {"foreach": True}, {"foreach": False}])
    def test_not_wanted(self, arguments):
        assert not run(Vprop, num_data=100, **arguments)[1]._structure._packs.packs

    @pytest.mark.parametrize("make", [VON, BBVI])
    def test_no_kernel_for_the_method(self, make):
        with pytest.raises(ValueError, match=rf"Invalid fused=True: must be None or False for {make.__name__}"):
            make(make_model().parameters(), num_data=100, fused=True)

    def test_no_kernel_for_the_parameters(self):
        with pytest.raises(ValueError, match=r"Invalid fused=True: .* Parameter 0 of the group is Parameter of .*64"):
            Vprop(make_model(torch.float64).parameters(), num_data=100, fused=True)

    def test_no_kernel_on_this_machine(self, monkeypatch):
        monkeypatch.setenv("VPROP_NO_KERNELS", "1")
        with pytest.raises(ValueError, match=r"Invalid fused=True: .* compiled part"):
            Vprop(make_model().parameters(), num_data=100, fused=True)
        assert not run(Vprop, num_data=100)[1]._structure._packs.packs


def test_float64_and_float32_in_one_group():
    wide, narrow = nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(torch.ones(4))
    optimizer = Vprop([wide, narrow], num_data=10, lr=0.1)
    for _ in range(3):
        optimizer.step(lambda: (optimizer.zero_grad(), (wide.square().sum() + narrow.square().sum()).backward()))
    assert [len(pack.members) for pack in optimizer._structure._packs.packs] == [1]
    assert (wide < 1).all()
    assert (narrow < 1).all()

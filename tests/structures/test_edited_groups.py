"""Groups that are edited between steps: another structure, another prior, a group that goes."""

import pytest
import torch
from torch import nn

import vprop
from tests.harness import LOOPS, assert_same_run, make_batch, make_model, train

ARGUMENTS = {"lr": 0.05, "num_data": 200, "basis_every": 2, "seed": 3}


def closure_of(model, optimizer, calls=None):
    x, y = make_batch()

    def closure():
        if calls is not None:
            calls.append(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def counts(model, optimizer):
    return [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in model.parameters()]


def split(model, *structures):
    """Groups of make_model(): Linear(4, 8), Tanh, Linear(8, 3)."""
    return [
        {"params": list(layer.parameters()), "structure": structure}
        for layer, structure in zip((model[0], model[2]), structures, strict=True)
    ]


# -- the structure of a group ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("diagonal", "diagonal"), ("eigenbasis", "eigenbasis")),
        (("diagonal", "diagonal"), ("eigenbasis", "diagonal")),
        (("eigenbasis", "diagonal"), ("diagonal", "diagonal")),
    ],
)
def test_a_structure_edited_before_the_first_step_counts(loop, before, after):
    runs = []
    for edited in (True, False):
        model = make_model()
        optimizer = vprop.Vprop(split(model, *(before if edited else after)), **ARGUMENTS)
        for group, structure in zip(optimizer.param_groups, after, strict=True):
            group["structure"] = structure
        train(None, loop, model=model, optimizer=optimizer, steps=2)
        runs.append((model, counts(model, optimizer)))
    assert runs[0][1] == [2, 2, 2, 2]
    for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_posterior_of_an_edited_group_does_not_lose_the_step():
    model = make_model()
    optimizer = vprop.Vprop(split(model, "diagonal", "diagonal"), **ARGUMENTS)
    optimizer.param_groups[0]["structure"] = "eigenbasis"
    optimizer.posterior(model)
    optimizer.step(closure_of(model, optimizer))
    assert counts(model, optimizer) == [1, 1, 1, 1]


def test_a_structure_edited_between_block_and_step_is_told_and_not_half_done():
    model = make_model()
    optimizer = vprop.Vprop(model.parameters(), **ARGUMENTS)
    with optimizer.sampled_params():
        closure_of(model, optimizer)()
    for state in optimizer.state.values():
        state.clear()
    optimizer.param_groups[0]["structure"] = "eigenbasis"
    optimizer.marginals()
    with pytest.raises(RuntimeError, match="sample"):
        optimizer.step()
    train(None, model=model, optimizer=optimizer, steps=1)
    assert counts(model, optimizer) == [1, 1, 1, 1]


@pytest.mark.parametrize("structures", [("eigenbasis", "diagonal"), ("diagonal", "eigenbasis")])
def test_the_others_go_on_when_a_group_is_deleted(structures):
    model = make_model()
    optimizer = vprop.Vprop(split(model, *structures), **ARGUMENTS)
    closure, calls = closure_of(model, optimizer), []
    for _ in range(2):
        optimizer.step(closure)
    first, last = ([p.detach().clone() for p in layer.parameters()] for layer in (model[0], model[2]))
    del optimizer.param_groups[0]
    optimizer.step(closure_of(model, optimizer, calls))
    assert len(calls) == 1
    assert counts(model, optimizer) == [2, 2, 3, 3]
    assert all(torch.equal(p, old) for p, old in zip(model[0].parameters(), first, strict=True))
    assert not any(torch.equal(p, old) for p, old in zip(model[2].parameters(), last, strict=True))


def test_groups_in_another_order_keep_their_structures():
    model = make_model()
    optimizer = vprop.Vprop(split(model, "eigenbasis", "diagonal"), **ARGUMENTS)
    optimizer.step(closure_of(model, optimizer))
    optimizer.param_groups.reverse()
    optimizer.step(closure_of(model, optimizer))
    assert counts(model, optimizer) == [2, 2, 2, 2]


def test_parameters_that_change_the_group_keep_their_structure():
    model = make_model()
    optimizer = vprop.Vprop(split(model, "eigenbasis", "diagonal"), **ARGUMENTS)
    optimizer.step(closure_of(model, optimizer))
    first, last = optimizer.param_groups
    first["params"], last["params"] = last["params"], first["params"]
    with pytest.raises(ValueError, match="Invalid structure='eigenbasis': must be 'diagonal', as it was when"):
        optimizer.step(closure_of(model, optimizer))


# -- what the constructor refuses is refused later ---------------------------------------------------------------------


@pytest.mark.parametrize("trained", [True, False])
def test_a_prior_for_each_weight_is_refused_in_an_eigenbasis(trained):
    model = make_model()
    optimizer = vprop.Vprop(model.parameters(), structure="eigenbasis", **ARGUMENTS)
    if trained:
        optimizer.step(closure_of(model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["prior_precision"] = [torch.full_like(p, 3.0) for p in model.parameters()]
    with pytest.raises(ValueError, match="Invalid prior_precision='one for each weight': must be one number"):
        optimizer.step(closure_of(model, optimizer))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[0]["prior_precision"] = 3.0
    optimizer.step(closure_of(model, optimizer))


@pytest.mark.parametrize("fused", [True, False])
def test_prior_means_in_another_precision(fused):
    runs = []
    for dtype in (torch.float32, torch.float64):
        model = make_model()
        optimizer = vprop.Vprop(model.parameters(), structure="eigenbasis", fused=fused, **ARGUMENTS)
        optimizer.param_groups[0]["prior_mean"] = [torch.full_like(p, 0.5, dtype=dtype) for p in model.parameters()]
        for _ in range(3):
            optimizer.step(closure_of(model, optimizer))
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("kind", "name"), [(vprop.Vprop, "eigen"), (vprop.Vprop, None), (vprop.IVON, "eigen"), (vprop.IVON, "full")]
)
def test_a_structure_that_there_is_not(kind, name):
    model = make_model()
    with pytest.raises(ValueError, match="Invalid structure") as refused:
        kind(model.parameters(), **(ARGUMENTS | {"structure": name}))
    optimizer = kind(model.parameters(), **ARGUMENTS)
    optimizer.param_groups[0]["structure"] = name
    for ask in (lambda: optimizer.step(closure_of(model, optimizer)), lambda: optimizer.posterior(model)):
        with pytest.raises(ValueError, match="Invalid structure") as later:
            ask()
        assert str(later.value) == str(refused.value)
    optimizer.param_groups[0]["structure"] = "eigenbasis"
    optimizer.step(closure_of(model, optimizer))
    assert counts(model, optimizer) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "value"), [("basis_every", 0), ("temperature", 0.0), ("prior_mean", [torch.zeros(1)]), ("num_data", -5)]
)
def test_entries_are_checked_as_in_the_constructor_before_the_step(name, value):
    model = make_model()
    optimizer = vprop.Vprop(split(model, "eigenbasis", "diagonal"), **ARGUMENTS)
    optimizer.step(closure_of(model, optimizer))
    former, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
    for _ in range(2):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            optimizer.step(closure_of(model, optimizer))
    assert counts(model, optimizer) == [1, 1, 1, 1]
    optimizer.param_groups[0][name] = former
    optimizer.step(closure_of(model, optimizer))


def test_a_momentum_that_is_switched_off_leaves_the_loops_the_same_bit_for_bit():
    runs = []
    for loop in ("closure", "context"):
        model = make_model()
        optimizer = vprop.IVON(model.parameters(), lr=0.05, num_data=200, betas=(0.8, 0.99))
        for betas in ((0.8, 0.99), (0.0, 0.9)):
            optimizer.param_groups[0]["betas"] = betas
            train(None, loop, model=model, optimizer=optimizer, steps=3)
        runs.append((model, optimizer))
    assert_same_run(*runs)


class Incomparable:
    def __eq__(self, other):
        raise KeyError("==")


def test_a_group_that_cannot_even_be_checked_is_not_added():
    model = make_model()
    optimizer = vprop.Vprop(model[0].parameters(), **ARGUMENTS)
    with pytest.raises(KeyError):
        optimizer.add_param_group({"params": model[2].parameters(), "noise": Incomparable()})
    with pytest.raises(ValueError, match=r"Invalid foreach=tensor\(.*\): must be None, True or False"):
        optimizer.add_param_group({"params": model[2].parameters(), "foreach": torch.ones(2)})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.step(closure_of(model, optimizer))
    assert counts(model, optimizer) == [1, 1, 1, 1]

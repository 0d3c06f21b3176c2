"""Where the state of an eigenbasis lies: captured and compiled steps, tensors that move, frozen parameters."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vprop
from tests.harness import make_batch, make_model
from tests.random_matrices import random
from vprop.structures.eigenbasis import Eigenbasis


class NoQuestions(TorchDispatchMode):
    """An error for what would ask the device for a number, which no graph can."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [vprop.Vario, vprop.Vprop, vprop.IVON])
def test_a_captured_step_leaves_the_bases_to_refresh_bases(kind, monkeypatch):
    """With one after every step, the run is the same as without capturing. Here nothing is recorded, only looked at."""
    monkeypatch.setattr(Eigenbasis, "report_unusable", lambda self, deferred: None)  # on a GPU it looks later
    results = []
    for captured in (False, True):
        model = make_model()
        facts = {} if kind is vprop.IVON else {"batch_size": 12}
        optimizer = kind(
            model.parameters(), lr=0.01, num_data=200, structure="eigenbasis", basis_every=1, capturable=True, **facts
        )
        x, y = make_batch()
        for step in range(6):
            monkeypatch.setattr(Eigenbasis, "_is_capturing", lambda self, now=captured and step > 1: now)
            optimizer.zero_grad()
            addresses = [v.data_ptr() for p in model.parameters() for v in optimizer.state[p].values()]
            with NoQuestions() if captured and step > 1 else nullcontext():
                with optimizer.sampled_params():
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            if captured and step > 1:
                with nullcontext() if step == 3 else NoQuestions():
                    optimizer.refresh_bases(solve=None if step == 3 else False)  # the fourth is by eigenvectors
                assert addresses == [v.data_ptr() for p in model.parameters() for v in optimizer.state[p].values()]
        results.append([v for p in model.parameters() for v in (p.detach(), *optimizer.state[p].values())])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)


def test_what_a_graph_cannot_hold_is_an_error(monkeypatch):
    weights = [nn.Parameter(random(3, 4)), nn.Parameter(random(3, 4))]
    optimizer = vprop.Vario(weights, num_data=20, batch_size=4, structure="eigenbasis", capturable=True)
    with optimizer.sampled_params():
        weights[0].grad = random(3, 4)
        with pytest.raises(RuntimeError, match=r"refresh_bases\(\) in the middle of a step"):
            optimizer.refresh_bases()
    monkeypatch.setattr(Eigenbasis, "_is_capturing", lambda self: True)
    with pytest.raises(RuntimeError, match="In a CUDA graph all parameters of a group"):
        optimizer.step()


def test_refresh_bases_is_for_all_structures():
    model = make_model()
    optimizer = vprop.Vprop(
        [{"params": [model[0].weight], "structure": "eigenbasis"}, {"params": [model[0].bias]}], num_data=9
    )
    optimizer.refresh_bases()  # before the first step there is nothing to follow
    assert torch.equal(optimizer.state[model[0].weight]["left_basis"], torch.eye(8))
    vprop.Vprop(model.parameters(), num_data=9).refresh_bases()


def test_a_state_that_moves_is_found_again():
    """Kernels know tensors by their addresses; whoever replaces one is followed."""
    results = []
    for moves in (False, True):
        weight = nn.Parameter(random(3, 4).float())
        optimizer = vprop.Vario([weight], lr=0.02, num_data=20, batch_size=4, structure="eigenbasis", basis_every=2)
        kept = []
        for step in range(6):
            with optimizer.sampled_params():
                weight.grad = random(3, 4, seed=step).float()
            optimizer.step()
            if moves:
                state = optimizer.state[weight]
                kept.append(dict(state))
                for key in ("hess", "momentum", "left_basis"):
                    state[key] = state[key].clone()
                    kept[-1][key].fill_(math.nan)
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_compiled_step_is_the_same(samples, monkeypatch):
    """Bases are refreshed, and sizes of the weights followed, where no addresses are known. Compiling takes long.

    In float64: other memory has other roundings, of which near eigenvalues in float32 make other eigenvectors.
    """

    def trained(compiled):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        optimizer = vprop.Vario(
            layer.parameters(),
            lr=0.1,
            num_data=50,
            batch_size=8,
            mc_samples=samples,
            noise_limit=0.1,
            structure="eigenbasis",
            basis_every=5,
            fused=False,
        )
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)

        def closure():
            optimizer.zero_grad()
            loss = (layer(x) - x[:, :2].sin()).square().mean()
            loss.backward()
            return loss

        for _ in range(18):  # sizes are looked at in every sixteenth
            optimizer.step(closure)
        return {"weight": layer.weight.detach(), **optimizer.state[layer.weight]}

    eager, compiled = trained(False), trained(True)
    assert eager.keys() == compiled.keys()
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_do_not_hold_the_memory_of_the_others():
    """State is shared between matrices; who leaves takes a copy, unless the memory is in use."""
    weights = [nn.Parameter(random(3, 4, seed=i).float()) for i in range(6)]
    optimizer = vprop.Vario(weights, lr=0.02, num_data=20, batch_size=4, structure="eigenbasis", basis_every=2)

    def step_without(frozen):
        for i in frozen:
            weights[i].requires_grad_(False)
        with optimizer.sampled_params():
            for weight in weights:
                weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        optimizer.step()
        pieces = [value.untyped_storage() for state in optimizer.state.values() for value in state.values()]
        return sum({piece.data_ptr(): piece.nbytes() for piece in pieces}.values())

    first = step_without([])
    assert [step_without([i]) for i in (2, 0, 4, 1)] == [first] * 4
    weights[2].requires_grad_(True)
    assert step_without([]) == first


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_memory_of_a_parameter_that_is_removed_is_freed(gone):
    weights = [nn.Parameter(random(12, 12, seed=i).float()) for i in range(3)]
    optimizer = vprop.Vario(weights, num_data=20, batch_size=4, structure="eigenbasis", basis_every=2)

    def step():
        with optimizer.sampled_params():
            for weight in weights:
                weight.grad = torch.ones_like(weight)
        optimizer.step()

    step()
    weights = [weight for i, weight in enumerate(weights) if i != gone]
    (left,) = set(optimizer.param_groups[0]["params"]) - set(weights)
    optimizer.param_groups[0]["params"] = weights
    del optimizer.state[left]
    step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    assert sum(held.values()) == sum(value.nbytes for value in tensors)


def test_what_others_keep_in_the_state_is_left_alone():
    weight = nn.Parameter(random(3, 4).float())
    optimizer = vprop.Vario([weight], num_data=20, batch_size=4, structure="eigenbasis")
    for _ in range(2):
        with optimizer.sampled_params():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.state[weight]["note"] = "a hook's"
    assert optimizer.state[weight]["note"] == "a hook's"
    assert int(optimizer.state[weight]["step"]) == 2

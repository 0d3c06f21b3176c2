"""What the state is kept in is not what is computed with: coarser state, and finer, in the diagonal structure."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch

from tests.harness import closure_step, make_batch, make_model
from vprop import IVON, Vadam, Vprop
from vprop.kernels import cpu
from vprop.structures import Diagonal, TensorSpec

PATHS = [False, pytest.param(True, marks=pytest.mark.skipif(not cpu.available(), reason="no compiled kernels"))]
METHODS = {
    "Vprop": (Vprop, {}),
    "Vprop, momentum": (Vprop, {"betas": (0.9, 0.9), "batch_size": 12, "init_steps": 3}),
    "Vprop, a pair": (Vprop, {"mc_samples": 2, "antithetic": True, "centered": True}),
    "Vprop, folded": (Vprop, {"mc_samples": 3, "betas": (0.9, 0.9)}),
    "Vprop, root": (Vprop, {"batch_size": 12, "preconditioner": "root", "betas": (0.9, 0.9), "noise_limit": 0.2}),
    "IVON": (IVON, {"betas": (0.9, 0.9)}),
    "Vadam": (Vadam, {}),
}


def with_state_in(optimizer_type, dtype):
    """The optimizer with curvature and momentum kept in another dtype, which is all that has to be said."""

    class Kept(Diagonal):
        state_spec: ClassVar = Diagonal.state_spec | {
            "hess": TensorSpec(needed=True, dtype=dtype),
            "momentum": TensorSpec(dtype=dtype),
        }

    return type(optimizer_type.__name__, (optimizer_type,), {"structure": Kept})


def trained(optimizer_type, arguments, dtype=torch.float32, *, rounded_to=None, steps=6):
    """A run; after each step the state can be rounded, as it is when it is written into another dtype."""
    model = make_model().to(dtype)
    optimizer = optimizer_type(model.parameters(), num_data=100, **arguments)
    for step in range(steps):
        x, y = make_batch(seed=step)
        closure_step(optimizer, model, [(x.to(dtype), y.to(dtype) if y.is_floating_point() else y)])
        for state in optimizer.state.values() if rounded_to else ():
            for key in {"hess", "momentum"} & set(state):
                state[key].copy_(state[key].to(rounded_to))
    return model, optimizer


def tensors_of(model, optimizer):
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach()
        found |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return found


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_state_is_float32_state_rounded_when_it_is_written(method, weights, fused):
    optimizer_type, arguments = METHODS[method]
    arguments = {"hess_init": 0.3, **arguments, "fused": fused}  # which bfloat16 has not
    coarse = trained(with_state_in(optimizer_type, torch.bfloat16), arguments, weights)
    rounded = trained(with_hess_at_bfloat16(optimizer_type), arguments, weights, rounded_to=torch.bfloat16)
    assert bool(coarse[1]._structure._packs.packs) == fused
    ours, theirs = tensors_of(*coarse), tensors_of(*rounded)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        is_kept = name.endswith((".hess", ".momentum"))
        assert tensor.dtype == (torch.bfloat16 if is_kept else theirs[name].dtype), name
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
    marginal = next(iter(coarse[1].marginals()))
    assert marginal.variance.dtype == marginal.hess.dtype == torch.float32


def with_hess_at_bfloat16(optimizer_type):
    """With float32 state that starts at a bfloat16 number, as the coarse one does."""

    class Rounded(Diagonal):
        def new_state(self, member):
            state = super().new_state(member)
            state["hess"] = state["hess"].bfloat16().float()
            return state

    return type(optimizer_type.__name__, (optimizer_type,), {"structure": Rounded})


@pytest.mark.parametrize("method", METHODS)
def test_what_kernels_do_not_take_is_done_without_them(method):
    """And right: float64 holds every float32 number, so that the run is the plain one, to the bit."""
    optimizer_type, arguments = METHODS[method]
    wide_type = with_state_in(optimizer_type, torch.float64)
    _, asked = trained(wide_type, {**arguments, "fused": True})
    assert not asked._structure._packs.packs
    wide, plain = (trained(each, {**arguments, "fused": False}) for each in (wide_type, optimizer_type))
    ours, theirs = tensors_of(*wide), tensors_of(*plain)
    assert next(iter(wide[1].state.values()))["hess"].dtype == torch.float64
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name


@pytest.mark.parametrize("fused", PATHS)
def test_checkpoints_keep_the_dtype(fused):
    optimizer_type, arguments = with_state_in(Vprop, torch.bfloat16), {"betas": (0.9, 0.9), "fused": fused}
    model, optimizer = trained(optimizer_type, arguments)
    other = make_model()
    other.load_state_dict(model.state_dict())
    resumed = optimizer_type(other.parameters(), num_data=100, **arguments)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in ((model, optimizer), (other, resumed)):
        closure_step(one[1], one[0], [make_batch(seed=9)])
    ours, theirs = tensors_of(model, optimizer), tensors_of(other, resumed)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name

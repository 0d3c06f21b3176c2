"""Under autocast, which is meant for the model, the eigenbasis structure computes what it computes without."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import vprop
from vprop.functional import eigenbasis

KINDS = [torch.bfloat16, torch.float16]


def maybe_autocast(dtype):
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def make(kind=vprop.Vprop, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3))
    optimizer = kind(model.parameters(), num_data=100, structure="eigenbasis", basis_every=1, seed=5, **arguments)
    return model, optimizer


def set_gradients(model, seed):
    """Gradients that do not depend on autocast: those of a model would."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) + p.detach()


def trained(loop, dtype, steps=3, **arguments):
    model, optimizer = make(**arguments)
    handle = optimizer.attach(model) if loop == "attach" else None
    for i in range(steps):
        with maybe_autocast(dtype):
            if loop == "closure":
                optimizer.step(lambda seed=i: set_gradients(model, seed))
            elif loop == "context":
                with optimizer.sampled_params():
                    set_gradients(model, i)
                optimizer.step()
            else:
                model(torch.zeros(2, 24))
                set_gradients(model, i)
                optimizer.step()
    if handle is not None:
        handle.remove()
    return model, optimizer


def require_same(first, second):
    for key, value in first.items():
        assert value.dtype == second[key].dtype, key
        torch.testing.assert_close(value, second[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("loop", ["closure", "context", "attach"])
@pytest.mark.parametrize(
    "arguments",
    [{"fused": True}, {"fused": False}, {"kind": vprop.IVON}, {"betas": (0.9, 0.99)}],
    ids=["kernels", "torch", "IVON", "momentum"],
)
def test_steps(loop, arguments, dtype):
    (model, optimizer), (other, under) = (trained(loop, kind, **arguments) for kind in (None, dtype))
    require_same(model.state_dict(), other.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        require_same(optimizer.state[p], under.state[q])


@pytest.mark.parametrize("dtype", KINDS)
def test_questions(dtype):
    model, optimizer = trained("closure", None)
    found = []
    for kind in (None, dtype):
        optimizer._snapshots = 0
        with maybe_autocast(kind):
            posterior = optimizer.posterior(model)
            values = {f"variance {name}": value for name, value in posterior.variance.items()}
            for i, marginal in enumerate(optimizer.marginals()):
                values |= {f"marginal {i}": marginal.variance, f"hess {i}": marginal.hess}
            drawn = posterior.sample(seed=1)
            values |= {f"sample {name}": value for name, value in drawn.items()}
            values |= {"log_prob": posterior.log_prob({name: mean + 0.1 for name, mean in posterior.mean.items()})}
            values |= {f"diagonal {name}": value for name, value in posterior.as_diagonal().variance.items()}
            values |= {"covariance": posterior.covariance_of("1.bias")}
        found.append(values)
    require_same(*found)


@pytest.mark.parametrize("dtype", KINDS)
def test_checkpoints(dtype):
    """A basis of a checkpoint is not orthogonal in half precision."""
    _, optimizer = trained("closure", None)
    _, other = make()
    with maybe_autocast(dtype):
        other.load_state_dict(optimizer.state_dict())
    for p, q in zip(optimizer.state, other.state, strict=True):
        require_same(optimizer.state[p], other.state[q])


@pytest.mark.parametrize("dtype", KINDS)
def test_functions_of_matrices(dtype):
    generator = torch.Generator().manual_seed(0)
    x, basis = torch.randn(2, 6, 6, generator=generator), torch.linalg.qr(torch.randn(2, 6, 6, generator=generator)).Q
    square = x @ x.mT
    functions = {
        "rotated": lambda: eigenbasis.rotated(x, basis, basis),
        "rotated_back": lambda: eigenbasis.rotated_back(x, left=basis, right=None),
        "diagonal_of_rotated_back": lambda: eigenbasis.diagonal_of_rotated_back(x, basis, basis),
        "projected": lambda: eigenbasis.projected(x, None, basis),
        "turned": lambda: eigenbasis.turned(basis, square, 1e-7),
        "solved": lambda: eigenbasis.solved(basis, square, 1e-7),
        "orthogonal": lambda: eigenbasis.orthogonal(basis * 1.01),
        "gram": lambda: eigenbasis.gram(x),
    }
    plain = {name: function() for name, function in functions.items()}
    with maybe_autocast(dtype):
        require_same(plain, {name: function() for name, function in functions.items()})
        assert torch.is_autocast_enabled("cpu")


def test_a_device_without_autocast():
    x = torch.empty(3, 3, device="meta")
    assert eigenbasis.gram(x).shape == (3, 3)

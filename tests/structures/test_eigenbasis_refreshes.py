"""How bases follow the gradients, and what gradients they leave out."""

import math

import pytest
import torch
from torch import nn

import vprop
from tests.random_matrices import DOUBLE, random


@pytest.mark.parametrize(("rows", "expected"), [((3, 4, 5, 6), [2] * 11), ((3, 3, 3, 3), [4, 0, 0] + [4, 4, 0, 0] * 2)])
def test_refreshes_take_turns(rows, expected):
    """Of the sides of several matrices, each step has its share; small ones of one shape go together."""
    weights = [nn.Parameter(random(count, 4, seed=i).float()) for i, count in enumerate(rows)]
    optimizer = vprop.Vprop(weights, lr=0.1, num_data=20, structure="eigenbasis", basis_every=4)
    changed = []
    for _ in range(12):
        before = [
            optimizer.state[w].get(f"{side}_basis", torch.zeros(0)).clone()
            for w in weights
            for side in ("left", "right")
        ]
        with optimizer.sampled_params():
            optimizer.zero_grad()
            sum((w.square().sum(0) * torch.arange(1.0, 5.0)).sum() for w in weights).backward()
        optimizer.step()
        after = [optimizer.state[w][f"{side}_basis"] for w in weights for side in ("left", "right")]
        if before[0].numel():
            changed.append(sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    assert changed == expected


def test_what_is_kept_in_a_basis_turns_with_it():
    """The curvature by the projection, the rest exactly: the momentum in the coordinates of the weights stays."""
    weight = nn.Parameter(random(5, 3))
    optimizer = vprop.Vario([weight], lr=0.0, num_data=20, batch_size=4, structure="eigenbasis", basis_every=1)
    for step in range(3):
        with optimizer.sampled_params():
            weight.grad = random(5, 3, seed=step)
        optimizer.step()
    state = optimizer.state[weight]
    expected = torch.zeros(5, 3, dtype=DOUBLE)
    for step in range(3):
        expected = 0.9 * expected + 0.1 * random(5, 3, seed=step)
    back = state["left_basis"] @ state["momentum"] @ state["right_basis"].mT
    torch.testing.assert_close(back, expected)
    average = sum((1 - 0.999) * 0.999 ** (2 - s) * random(5, 3, seed=s) @ random(5, 3, seed=s).mT for s in range(3))
    torch.testing.assert_close(state["left_basis"] @ state["left_average"] @ state["left_basis"].mT, average)
    # A step before the last refresh the right side was turned with the first two gradients only, as was the left.
    assert float(state["hess"].sum()) == pytest.approx(4 * float(_debiased_square_sum()), rel=1e-9)


def _debiased_square_sum():
    """Rotations keep sums of squares, and projections sums of curvatures."""
    weights = [(1 - 0.999) * 0.999 ** (2 - s) for s in range(3)]
    squares = [random(5, 3, seed=s).square().sum() for s in range(3)]
    return sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    """In the averages it counts as none, so that the next refresh has something to go by. 1e30² is beyond float32."""
    weights = [nn.Parameter(random(3, 4, seed=i).float()) for i in range(2)]
    optimizer = vprop.Vario(weights, lr=0.01, num_data=20, batch_size=4, structure="eigenbasis", basis_every=1)
    for step in range(4):
        with optimizer.sampled_params():
            for i, w in enumerate(weights):
                w.grad = random(3, 4, seed=10 * step + i).float()
        optimizer.step()
    kept = {key: value.clone() for key, value in optimizer.state[weights[0]].items()}
    mean, other = weights[0].detach().clone(), weights[1].detach().clone()
    with optimizer.sampled_params():
        for i, w in enumerate(weights):
            w.grad = random(3, 4, seed=50 + i).float()
        weights[0].grad[1, 2] = bad
    with pytest.warns(RuntimeWarning, match="gradient elements were NaN or infinite"):
        optimizer.step()
    torch.testing.assert_close(weights[0].detach(), mean, rtol=0, atol=1e-6)
    assert not torch.equal(weights[1], other)
    state = optimizer.state[weights[0]]
    left, right = (
        0.999 * old @ kept[f"{side}_average"] @ old.mT for side in ("left", "right") for old in [kept[f"{side}_basis"]]
    )
    torch.testing.assert_close(state["left_basis"] @ state["left_average"] @ state["left_basis"].mT, left)
    torch.testing.assert_close(state["right_basis"] @ state["right_average"] @ state["right_basis"].mT, right)
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.parametrize("fused", [None, False])
def test_squares_whose_sum_over_samples_is_not_finite_count_as_none(fused):
    """Of each of four samples (1.8·10¹⁹)² is within float32, which their sum is not."""
    weight = nn.Parameter(random(3, 4).float())
    arguments = {"mc_samples": 4, "structure": "eigenbasis", "basis_every": 1, "fused": fused}
    optimizer = vprop.Vario([weight], lr=0.01, num_data=20, batch_size=4, **arguments)
    for step in range(3):
        for sample in range(4):
            with optimizer.sampled_params(sample):
                weight.grad = random(3, 4, seed=4 * step + sample).float()
                weight.grad[0, 0] = 1.8e19 if step == 1 else 1.0
        optimizer.step()
    values = [weight.detach(), *optimizer.state[weight].values()]
    assert all(bool(torch.isfinite(value).all()) for value in values)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-25])
def test_degenerate_averages(value):
    """No gradient at all, the same one each time, and one whose squares vanish: no basis, one direction, nothing."""
    weight = nn.Parameter(torch.ones(6, 5))
    optimizer = vprop.Vprop([weight], lr=0.1, num_data=20, structure="eigenbasis", basis_every=1, hess_init=0.1)
    for _ in range(20):
        with optimizer.sampled_params():
            weight.grad = torch.full((6, 5), value)
        optimizer.step()
    state = optimizer.state[weight]
    assert all(bool(torch.isfinite(entry).all()) for entry in [weight.detach(), *state.values()])
    for side in ("left", "right"):
        basis = state[f"{side}_basis"]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)

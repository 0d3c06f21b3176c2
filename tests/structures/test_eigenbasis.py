"""The eigenbasis structure against closed forms, against the diagonal, and what it refuses."""

import io
import math
import os
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vprop
from tests.harness import make_batch, make_model, train
from vprop import kernels, noise
from vprop.functional import eigenbasis
from vprop.kernels import cpu
from vprop.structures.eigenbasis import Eigenbasis

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def orthogonal(size, seed):
    return torch.linalg.qr(random(size, size, seed=seed)).Q


# -- the exact posterior -----------------------------------------------------------------------------------------------


@pytest.fixture
def exact_noise(monkeypatch):
    """ε of the samples 0, 1, … is ±√D·e₀, ±√D·e₁, …: the mean over 2D of them has the exact second moments."""

    def normals_like(parameters, draws, *, portable=False):
        for i, (p, draw) in enumerate(zip(parameters, draws, strict=True)):
            eps = torch.zeros_like(p)
            eps.view(-1)[draw.sample] = math.sqrt(p.numel())
            yield i, eps

    monkeypatch.setattr(noise, "normals_like", normals_like)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_linear_regression_with_several_outputs_is_exact(exact_noise, temperature):
    """Three outputs with correlated noise, four inputs: the Hessian is Λ⊗XᵀX/N, and so is the posterior's precision."""
    count, outputs, inputs, prior = 50, 3, 4, 2.0
    x = random(count, inputs) @ random(inputs, inputs, seed=1)
    factor = random(outputs, outputs, seed=2)
    noise_precision = factor @ factor.mT + torch.eye(outputs, dtype=DOUBLE)
    y = x @ random(inputs, outputs, seed=3) + random(count, outputs, seed=4)
    weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=DOUBLE))
    optimizer = vprop.IVON(
        [weight],
        lr=1.0,
        num_data=count,
        temperature=temperature,
        prior_precision=prior,
        mc_samples=2 * weight.numel(),
        antithetic=True,
        betas=(0.0, 0.5),
        structure="eigenbasis",
        basis_every=1,
        basis_beta=0.5,
    )

    def closure():
        optimizer.zero_grad()
        residual = y - x @ weight.mT
        loss = 0.5 * ((residual @ noise_precision) * residual).sum(-1).mean()
        loss.backward()
        return loss

    for _ in range(120):
        optimizer.step(closure)
    precision = torch.kron(noise_precision, x.mT @ x) / temperature + prior * torch.eye(weight.numel(), dtype=DOUBLE)
    mean = torch.linalg.solve(precision, (noise_precision @ y.mT @ x).flatten() / temperature)
    model = nn.Module()
    model.weight = weight
    posterior = optimizer.posterior(model)
    covariance = torch.linalg.inv(precision)
    torch.testing.assert_close(posterior.mean["weight"].flatten(), mean, rtol=0, atol=1e-8)
    error = posterior.covariance_of("weight") - covariance
    assert float(error.abs().max()) < 1e-6 * float(covariance.diagonal().min())
    # A diagonal cannot: here it would be off by more than the smallest variance.
    assert float((covariance - covariance.diagonal().diag()).abs().max()) > float(covariance.diagonal().min())


# -- one step ----------------------------------------------------------------------------------------------------------


def test_steps_are_the_formula():
    """Vario's equations, written down once more, in given bases; momentum and curvature are of rotated coordinates."""
    weight, others = nn.Parameter(random(3, 4)), [nn.Parameter(torch.zeros(n, dtype=DOUBLE)) for n in range(2, 7)]
    mean, size = weight.detach().clone(), float(weight.detach().square().mean().sqrt())
    arguments = {"num_data": 40, "batch_size": 8, "prior_precision": 3.0, "temperature": 0.5, "betas": (0.8, 0.9)}
    # Of the sixth shape the first refreshes are in steps 11 and 12. The others have no gradient.
    optimizer = vprop.Vario(
        [*others, weight], lr=0.1, structure="eigenbasis", noise_limit=0.3, hess_init=0.7, basis_every=100, **arguments
    )
    left, right = orthogonal(3, 1), orthogonal(4, 2)
    with optimizer.sampled_params():
        state = optimizer.state[weight]
    state["left_basis"].copy_(left)
    state["right_basis"].copy_(right)
    optimizer.discard_samples()
    matrix = random(12, 12, seed=5)
    matrix = 0.01 * matrix @ matrix.mT
    hess, momentum = torch.full((3, 4), 0.7, dtype=DOUBLE), torch.zeros(3, 4, dtype=DOUBLE)
    ess, damping = 80.0, 3.0 / 80
    floor = 1 / (ess * (0.3 * size) ** 2)
    for step in range(1, 4):
        with optimizer.sampled_params():
            theta = weight.detach().clone()
            weight.grad = (matrix @ theta.flatten()).view(3, 4)
        (_, eps) = next(noise.normals_like([weight], [noise.Draw(0, 5, step - 1)]))
        sigma = (ess * (hess + damping).clamp_min(floor)).rsqrt()
        torch.testing.assert_close(theta, mean + left @ (sigma * eps) @ right.mT)
        rotated = left.mT @ weight.grad @ right
        hess = hess + (1 - 0.9) / (1 - 0.9**step) * (8 * rotated.square() - hess)
        momentum = 0.8 * momentum + 0.2 * rotated
        center = left.mT @ mean @ right
        variance = 1 / (ess * (hess + damping).clamp_min(floor))
        divisor = (hess / 8 + damping**2 * (center.square() + variance)).sqrt() + 1e-8
        mean = mean - 0.1 * left @ ((momentum / (1 - 0.8**step) + damping * center) / divisor) @ right.mT
        optimizer.step()
        torch.testing.assert_close(weight.detach(), mean)
        torch.testing.assert_close(state["hess"], hess)
        torch.testing.assert_close(state["momentum"], momentum)
    torch.testing.assert_close(state["left_basis"], left)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (vprop.Vprop, {"betas": (0.9, 0.99), "prior_precision": 3.0, "temperature": 0.5, "clip_radius": 0.2}),
        (vprop.Vprop, {"mc_samples": 2, "antithetic": True, "centered": True}),
        (vprop.Vprop, {"mc_samples": 3, "centered": True, "hess_floor": 0.5}),
        (vprop.Vario, {"batch_size": 12, "maximize": True}),
        (vprop.Vario, {"batch_size": 6, "mc_samples": 2, "noise_limit": 0.4}),
        (vprop.IVON, {"betas": (0.9, 0.9), "rescale_lr": True, "hess_init": 0.3}),
    ],
)
def test_without_bases_it_is_the_diagonal(kind, arguments):
    """All scales, N, M, τ, λ and the floors, are then those that are tested there."""
    runs = []
    for more in ({"fused": False}, {"structure": "eigenbasis", "max_basis_dim": 1}):
        model, optimizer = train(kind, model=make_model().double(), lr=0.02, num_data=200, **arguments, **more)
        runs.append([p.detach() for p in model.parameters()])
        runs[-1] += [m.variance for m in optimizer.marginals()] + [m.hess for m in optimizer.marginals()]
    for diagonal, other in zip(*runs, strict=True):
        torch.testing.assert_close(other, diagonal, rtol=1e-10, atol=1e-13)


def test_a_rotation_of_the_inputs_is_followed():
    """Training on x·O is training on x with weights that are turned: with the bases turned too, the run is the same."""
    x, y = random(20, 4), random(20, 3, seed=1)
    turn, results = orthogonal(4, 7), []
    for rotate in (False, True):
        weight = nn.Parameter(torch.zeros(3, 4, dtype=DOUBLE))
        optimizer = vprop.Vprop([weight], lr=0.1, num_data=20, structure="eigenbasis", basis_every=1, basis_beta=0.9)
        inputs = x @ turn if rotate else x
        for step in range(6):
            with optimizer.sampled_params():
                if step == 0:
                    optimizer.state[weight]["right_basis"].copy_(turn.mT if rotate else torch.eye(4, dtype=DOUBLE))
            optimizer.discard_samples()
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (0.5 * (inputs @ weight.mT - y).square().sum(-1).mean()).backward()
            optimizer.step()
        results.append(weight.detach() @ turn.mT if rotate else weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


# -- refreshes ---------------------------------------------------------------------------------------------------------


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


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "limit", "sides"),
    [
        ((3, 4), 10, {"left": 3, "right": 4}),
        ((3, 4), 3, {"left": 3}),
        ((7,), 10, {"left": 7}),
        ((7,), 6, {}),
        ((1, 6), 10, {"right": 6}),
        ((), 10, {}),
        ((0, 3), 10, {}),
        ((4, 2, 3, 3), 20, {"left": 4, "right": 18}),
        ((4, 2, 3, 3), 17, {"left": 4}),
    ],
)
def test_which_sides_have_a_basis(shape, limit, sides):
    weight = nn.Parameter(torch.ones(shape))
    optimizer = vprop.Vprop([weight], num_data=10, structure="eigenbasis", max_basis_dim=limit)
    for _ in range(2):
        with optimizer.sampled_params():
            weight.grad = torch.full(shape, 0.1)
        optimizer.step()
    state = optimizer.state[weight]
    assert {key: tuple(value.shape) for key, value in state.items() if "basis" in key} == {
        f"{side}_basis": (length, length) for side, length in sides.items()
    }
    assert {key.split("_")[0] for key in state if "average" in key} == set(sides)


def test_a_convolution_whose_channels_come_last():
    """Memory in another order, the same matrix."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(random(4, 2, 3, 3).to(memory_format=layout))
        optimizer = vprop.Vario([weight], lr=0.01, num_data=20, batch_size=4, structure="eigenbasis", basis_every=1)
        for step in range(4):
            with optimizer.sampled_params():
                weight.grad = random(4, 2, 3, 3, seed=step).to(memory_format=layout) + weight.detach()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)


def test_matrices_of_one_shape_are_handled_together_and_alike():
    results = []
    for foreach in (True, False):
        weights = [nn.Parameter(random(3, 4, seed=i)) for i in range(5)]
        optimizer = vprop.Vario(
            weights, lr=0.01, num_data=20, batch_size=4, structure="eigenbasis", basis_every=2, foreach=foreach
        )
        for step in range(5):
            with optimizer.sampled_params():
                for i, w in enumerate(weights):
                    w.grad = random(3, 4, seed=10 * step + i) if (step, i) != (2, 3) else None
            optimizer.step()
        results.append([w.detach() for w in weights] + [optimizer.state[w]["hess"] for w in weights])
    for together, alone in zip(*results, strict=True):
        torch.testing.assert_close(together, alone)


@pytest.mark.skipif(not cpu.available(), reason="vprop was installed without its compiled part")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (vprop.Vario, {"batch_size": 4, "prior_precision": 3.0}),
        (vprop.Vario, {"batch_size": 4, "mc_samples": 2, "antithetic": True, "clip_radius": 0.5, "hess_floor": 1.0}),
        (vprop.Vprop, {"betas": (0.9, 0.99), "temperature": 0.5}),
        (vprop.Vprop, {"mc_samples": 2, "antithetic": True, "centered": True}),
        (vprop.Vprop, {"batch_size": 4, "init_steps": 3, "maximize": True}),
        (vprop.IVON, {"betas": (0.9, 0.9), "rescale_lr": True}),
        (vprop.IVON, {"mc_samples": 2, "antithetic": True, "preconditioner": "root", "batch_size": 4}),
    ],
)
def test_kernels_do_the_same(kind, arguments, monkeypatch):
    """Samples and steps in rotated coordinates by the kernels of the diagonal, against torch's own operations."""
    calls = []
    step_, perturb = cpu.step, cpu.perturb
    monkeypatch.setattr(cpu, "step", lambda *a: (calls.append("step"), step_(*a)))
    monkeypatch.setattr(cpu, "perturb", lambda *a: (calls.append("perturb"), perturb(*a)))
    results = []
    for fused in (True, False):
        weights = [nn.Parameter(random(3, 4, seed=i).float()) for i in range(3)] + [nn.Parameter(random(5).float())]
        facts = {"lr": 0.02, "num_data": 20, "structure": "eigenbasis", "basis_every": 3}
        facts["prior_mean"] = [torch.full_like(w, 0.1) for w in weights]
        optimizer = kind(weights, fused=fused, **facts, **arguments)
        for step in range(5):
            for sample in range(optimizer.mc_samples):
                with optimizer.sampled_params(sample):
                    for i, w in enumerate(weights):
                        w.grad = random(*w.shape, seed=100 * step + i).float() + w.detach()
            optimizer.step()
        state = [v.float() for w in weights for k, v in optimizer.state[w].items() if k in ("hess", "momentum", "step")]
        results.append([w.detach() for w in weights] + state)
        clipped = sum(int(count) for counts in optimizer._structure.clipped.values() for count, _ in counts)
        results[-1].append(torch.tensor(float(clipped)))
        assert (set(calls) == {"step", "perturb"}) == fused
        calls.clear()
    for by_kernels, portable in zip(*results, strict=True):
        torch.testing.assert_close(by_kernels, portable, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "arguments"), [(vprop.Vario, {"batch_size": 4}), (vprop.IVON, {})])
def test_the_kernels_of_gpus_do_the_same(kind, arguments, monkeypatch):
    """In Triton's interpreter, where there is no GPU."""
    pytest.importorskip("triton", reason="the kernels of GPUs are written in Triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is for machines without a GPU")
    from vprop.kernels import cuda

    monkeypatch.setattr(kernels, "takes", lambda p: True)
    monkeypatch.setattr(kernels, "backend_for", lambda device: cuda)
    results = []
    for more in ({}, {"capturable": True}, {"fused": False}):
        weights = [nn.Parameter(random(3, columns, seed=columns).float()) for columns in (4, 4, 5)]
        optimizer = kind(weights, lr=0.02, num_data=20, structure="eigenbasis", basis_every=2, **arguments, **more)
        for step in range(2):
            with optimizer.sampled_params():
                for i, w in enumerate(weights):
                    w.grad = random(*w.shape, seed=10 * step + i).float() + w.detach()
            optimizer.step()
        results.append([w.detach() for w in weights] + [optimizer.state[w]["hess"] for w in weights])
    for by_kernels, capturable, portable in zip(*results, strict=True):
        torch.testing.assert_close(by_kernels, portable, rtol=2e-4, atol=2e-5)
        assert torch.equal(by_kernels, capturable)


# -- steps that a CUDA graph could hold --------------------------------------------------------------------------------


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
    """Bases are refreshed, and sizes of the weights followed, where no addresses are known. Compiling takes long."""

    def trained(compiled):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.Linear(3, 2, bias=False)
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
        x = torch.linspace(-1, 1, 24).view(8, 3)

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
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-5)


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


# -- checkpoints -------------------------------------------------------------------------------------------------------


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


def test_estimators_that_look_into_the_objective_are_refused():
    class Curious(vprop.Vprop):
        def _curvature(self, group):
            return vprop.curvature.Hutchinson()

    model = make_model()
    optimizer = Curious(model.parameters(), num_data=200, structure="eigenbasis")
    x, y = make_batch()
    with pytest.raises(ValueError, match="Hutchinson sees the curvature of each weight in the objective"):
        optimizer.step(vprop.Objective(model, nn.functional.cross_entropy, x, y))


def test_the_diagnosis_reads_it():
    model, optimizer = make(prior_precision="auto")
    train(None, model=model, optimizer=optimizer, steps=30)
    assert optimizer.param_groups[0]["prior_precision"] != 1.0
    assert str(optimizer.diagnose())


def test_matrix_shapes():
    assert eigenbasis.matrix_shape(torch.Size([2, 3, 4])) == (2, 12)


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

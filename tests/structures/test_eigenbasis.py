"""The eigenbasis structure against closed forms, against the diagonal, and what it refuses."""

import math
import os

import pytest
import torch
from torch import nn

import vprop
from tests.harness import make_batch, make_model, train
from tests.random_matrices import DOUBLE, orthogonal, random
from vprop import kernels, noise
from vprop.functional import eigenbasis
from vprop.kernels import cpu

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


# -- what it refuses, and what it says ---------------------------------------------------------------------------------


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
    model = make_model()
    arguments = {"lr": 0.01, "num_data": 200, "batch_size": 12, "prior_precision": "auto"}
    optimizer = vprop.Vario(model.parameters(), structure="eigenbasis", basis_every=2, **arguments)
    train(None, model=model, optimizer=optimizer, steps=30)
    assert optimizer.param_groups[0]["prior_precision"] != 1.0
    assert str(optimizer.diagnose())


def test_matrix_shapes():
    assert eigenbasis.matrix_shape(torch.Size([2, 3, 4])) == (2, 12)

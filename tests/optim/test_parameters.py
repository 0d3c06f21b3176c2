"""Kinds of parameter: absent, frozen, late, tied, empty, strided, coarse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import assert_same_run, backward, make_batch, make_model, train
from tests.table import TABLE, cases
from vprop import Vprop


def step(optimizer, loss_function):
    def closure():
        optimizer.zero_grad()
        loss = loss_function()
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_a_parameter_without_gradient_stays(case):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = case([used, unused])
    for _ in range(3):
        step(optimizer, lambda: used.square().sum())
    torch.testing.assert_close(unused.detach(), torch.linspace(-1, 1, 5), rtol=1e-6, atol=1e-6)
    assert int(optimizer.state[used]["step"]) == 3
    assert int(optimizer.state[unused]["step"]) == 0 if unused in optimizer.state else case.mc_samples == 0


@pytest.mark.parametrize("case", cases())
def test_a_frozen_parameter_is_a_constant(case):
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = case(model.parameters())
    with optimizer.sampled_params():
        assert torch.equal(model[0].weight, before)
    optimizer.discard_samples()
    train(case, model=model, optimizer=optimizer, steps=2)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert "0.weight" not in optimizer.posterior(model).mean
    model[0].weight.requires_grad_(True)
    train(case, model=model, optimizer=optimizer, steps=2)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("case", cases())
def test_a_group_added_later_trains_with_its_own_hyperparameters(case):
    model = make_model()
    optimizer = case(model[0].parameters())
    train(case, model=model, optimizer=optimizer, steps=2)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5, "prior_precision": 7.0})
    train(case, model=model, optimizer=optimizer, first_step=2, steps=2)
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [4, 4, 2, 2]
    prior = optimizer.posterior(model).prior.precision
    assert float(prior["2.weight"]) == 7.0
    with pytest.raises(ValueError, match="Invalid lr=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": -1})
    assert len(optimizer.param_groups) == 2


def test_groups_equal_separate_hyperparameters():
    """One optimizer with two groups does to each what its own hyperparameters say."""
    w, v = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = Vprop(
        [{"params": [w], "lr": 0.1, "num_data": 10}, {"params": [v], "lr": 0.3, "prior_precision": 5.0}],
        num_data=20,
        mc_samples=0,
    )
    step(optimizer, lambda: (w + v).square().sum())
    for p, lr, num_data, precision in [(w, 0.1, 10, 1.0), (v, 0.3, 20, 5.0)]:
        hess = 0.999 * 1.0 + 0.001 * num_data * 4.0**2
        delta = precision / num_data
        expected = 1 - lr * (4.0 + delta) / (hess + delta)
        torch.testing.assert_close(p.detach(), torch.full((2,), expected, dtype=torch.float64))


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_tied_weights_are_one_parameter(case):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(self.encode(x).tanh())

    model, (x, _) = Tied(), make_batch()
    optimizer = case(model.parameters())
    for _ in range(3):
        step(optimizer, lambda: F.mse_loss(model(x), x))
    assert model.decode.weight is model.encode.weight
    posterior = optimizer.posterior(model)
    assert list(posterior.mean) == ["encode.weight"]
    weights = posterior.sample(seed=0)["encode.weight"]
    expected = (x @ weights.T).tanh() @ weights.T
    torch.testing.assert_close(posterior.predict(x, num_samples=1).samples[0].shape, expected.shape)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.functional_call(model, {"encode.weight": weights}, x), expected)


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
class TestRefused:
    def test_an_empty_list(self, info):
        with pytest.raises(ValueError, match="empty parameter list"):
            info.build([], num_data=10)

    def test_complex(self, info):
        with pytest.raises(ValueError, match=r"complex parameters are not supported.*view_as_real"):
            info.build([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], num_data=10)

    def test_sparse(self, info):
        sparse = nn.Parameter(torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match=r"sparse parameters are not supported.*to_dense"):
            info.build([sparse], num_data=10)

    def test_sparse_gradients(self, info):
        if info.build([nn.Parameter(torch.zeros(1))], num_data=1).needs_objective:
            return  # looks at the objective first
        embedding = nn.Embedding(5, 2, sparse=True)
        optimizer = info.build(embedding.parameters(), num_data=10)
        with pytest.raises(RuntimeError, match=r"sparse gradient, which is not supported.*sparse=False"):
            step(optimizer, lambda: embedding(torch.tensor([1, 2])).sum())

    def test_integers(self, info):
        with pytest.raises(ValueError, match=r"dtype torch\.int64: must be a floating-point dtype"):
            info.build([nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)], num_data=10)


def test_an_empty_group_beside_a_full_one():
    w = nn.Parameter(torch.ones(2))
    optimizer = Vprop([{"params": []}, {"params": [w]}], num_data=10)
    step(optimizer, lambda: w.square().sum())
    assert (w < 1).all()


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_shapes_and_strides_do_not_matter(case):
    """Zero-dimensional, empty, transposed and channels_last parameters follow their contiguous twins bit for bit."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 4, 4, generator=generator)
    matrix = torch.randn(5, 3, generator=generator)
    strided = [
        nn.Parameter(torch.tensor(0.7)),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(matrix.t()),
        nn.Parameter(image.contiguous(memory_format=torch.channels_last)),
        nn.Parameter(matrix.expand(2, 5, 3).contiguous()[:, ::2]),
    ]
    contiguous = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in strided]
    assert not strided[2].is_contiguous()
    assert not strided[3].is_contiguous()
    assert not strided[4].is_contiguous()
    optimizers = [case(strided), case(contiguous)]
    for _ in range(3):
        for optimizer, parameters in zip(optimizers, (strided, contiguous), strict=True):
            step(
                optimizer,
                lambda parameters=parameters: sum((p.sin() * (i + 1)).sum() for i, p in enumerate(parameters)),
            )
    for p, q in zip(strided, contiguous, strict=True):
        assert torch.equal(p, q)
        if p.numel():
            states = optimizers[0].state[p], optimizers[1].state[q]
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert strided[2].stride() == matrix.t().stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestCoarseWeights:
    @pytest.mark.parametrize("case", cases(has_hess=True))
    def test_mean_and_curvature_are_float32_and_move(self, case, dtype):
        model, optimizer = train(case, model=make_model(dtype), steps=5, lr=1e-4)
        for p in model.parameters():
            state = optimizer.state[p]
            assert p.dtype == dtype
            assert state["hess"].dtype == state["mean"].dtype == torch.float32
            assert (state["hess"] != 1.0).all()
            assert torch.equal(state["mean"].to(dtype), p)

    def test_steps_too_small_for_the_weights_add_up_in_the_mean(self, dtype):
        w = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = Vprop([w], lr=1e-5, num_data=10, mc_samples=0, betas=(0.0, 0.0), prior_precision=1e-6)
        for _ in range(50):
            w.grad = torch.full_like(w, 0.1)
            optimizer.step()
        expected = 1 - 50 * 1e-5 * 0.1 / (10 * 0.1**2)
        torch.testing.assert_close(optimizer.state[w]["mean"], torch.full((4,), expected), rtol=1e-3, atol=0)

    def test_the_mean_comes_back_exactly(self, dtype):
        model = make_model(dtype)
        optimizer = Vprop(model.parameters(), num_data=100)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with optimizer.sampled_params():
            pass
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_weights_that_somebody_else_wrote_count(self, dtype):
        w = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = Vprop([w], lr=0.0, num_data=10, mc_samples=0)
        w.grad = torch.ones_like(w)
        optimizer.step()
        with torch.no_grad():
            w[1] = 5.0
        optimizer.step()
        assert w.tolist() == [1.0, 5.0, 1.0]
        assert optimizer.state[w]["mean"].tolist() == [1.0, 5.0, 1.0]


def test_mixed_dtypes_in_one_optimizer():
    parameters = [nn.Parameter(torch.ones(6, dtype=d)) for d in (torch.float64, torch.float32, torch.bfloat16)]
    optimizer = Vprop(parameters, num_data=10, lr=0.1)
    for _ in range(3):
        step(optimizer, lambda: sum((p.double() * 0.1).square().sum() for p in parameters))
    assert [optimizer.state[p]["hess"].dtype for p in parameters] == [torch.float64, torch.float32, torch.float32]
    assert all((p < 1).all() for p in parameters)


def test_momentum_switched_on_later_starts_at_the_gradient():
    """β₁ from 0 to 0.9 after ten steps: the first debiased average is the gradient itself; and off again drops it."""
    w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Vprop([w], lr=0.1, num_data=10, mc_samples=0, prior_precision=0.0)
    moves = []
    for step_number in range(12):
        if step_number == 10:
            optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        if step_number == 11:
            optimizer.param_groups[0]["betas"] = (0.0, 0.999)
        w.grad = torch.full_like(w, 0.1)
        before = w.detach().clone()
        optimizer.step()
        moves.append(float((before - w.detach())[0]) * float(optimizer.state[w]["hess"][0]))
    assert moves == pytest.approx([0.1 * 0.1] * 12)
    assert "momentum" not in optimizer.state[w]


def test_one_element_lr_with_a_zero_dimensional_parameter():
    w = nn.Parameter(torch.tensor(1.0))
    rate = torch.tensor([0.1])
    optimizer = Vprop([w], lr=rate, num_data=10)
    step(optimizer, lambda: w.square())
    assert w < 1
    rate.zero_()  # still the user's tensor
    before = w.item()
    step(optimizer, lambda: w.square())
    assert w.item() == pytest.approx(before, abs=1e-6)


def test_a_group_added_after_a_prior_per_weight_has_the_usual_prior():
    w, v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = Vprop([w], num_data=10, prior_mean=[torch.ones(2)], prior_precision=[torch.full((2,), 3.0)])
    optimizer.add_param_group({"params": [v]})
    assert optimizer.param_groups[1]["prior_mean"] is None
    assert optimizer.param_groups[1]["prior_precision"] == 1.0


@pytest.mark.parametrize("choice", [{"foreach": True}, {"fused": False}, {}], ids=["foreach", "bundles", "kernels"])
@pytest.mark.parametrize("case", cases(any_loop=True, has_hess=True))
def test_implementations_agree(case, choice):
    """Parameters of different shapes, strides, dtypes and ages, with a prior per weight, together and one at a time.

    The portable path to the last bit, kernels to rounding.
    """
    runs = []
    for arguments in ({"foreach": False}, choice):
        generator = torch.Generator().manual_seed(0)
        shapes = [(3, 4), (), (0,), (2, 3, 4, 4), (7,), (5,)]
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors[0] = tensors[0].t()
        tensors[3] = tensors[3].contiguous(memory_format=torch.channels_last)
        tensors[5] = tensors[5].double()
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        coarse = nn.Parameter(torch.randn(6, generator=generator).to(torch.bfloat16))
        prior = {
            "prior_mean": [torch.randn(p.shape, generator=generator) for p in parameters],
            "prior_precision": [torch.rand(p.shape, generator=generator) + 0.5 for p in parameters],
        }
        optimizer = case([{"params": parameters, **prior}, {"params": [coarse]}], **arguments)
        for number in range(4):
            taking_part = parameters[: 2 if number == 1 else None]  # the others have fewer steps behind them
            step(optimizer, lambda ps=[*taking_part, coarse]: sum((p.double() * 1.3).sin().sum() for p in ps))
        runs.append([*parameters, coarse] + [t for p in parameters for t in optimizer.state[p].values()])
    assert len(runs[0]) == len(runs[1])
    tolerance = {"rtol": 0, "atol": 0} if choice else {"rtol": 2e-5, "atol": 2e-6}
    for one_at_a_time, together in zip(*runs, strict=True):
        torch.testing.assert_close(together, one_at_a_time, **tolerance)


def test_maximize_is_the_negated_loss():
    runs = []
    for maximize in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=50, maximize=maximize, mc_samples=2)
        for _ in range(3):

            def closure(model=model, optimizer=optimizer, sign=-1 if maximize else 1):
                optimizer.zero_grad()
                x, y = make_batch()
                (sign * F.cross_entropy(model(x), y)).backward()

            optimizer.step(closure)
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_named_parameters_as_torch_takes_them():
    model, other = make_model(), make_model()
    optimizer, reference = Vprop(model.named_parameters(), num_data=50), Vprop(other.parameters(), num_data=50)
    for current, own in ((model, optimizer), (other, reference)):
        step(own, lambda current=current: backward_loss(current))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def backward_loss(model):
    x, y = make_batch()
    return F.cross_entropy(model(x), y)


def test_gradient_is_read_in_step_only():
    """Whatever lies in p.grad at step() counts, as with every torch optimizer."""
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=50)
    with optimizer.sampled_params():
        backward(model, [make_batch()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)

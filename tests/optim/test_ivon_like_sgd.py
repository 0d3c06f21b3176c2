"""IVON with SGD's arguments: steps, decay and noise are what they are said to be."""

import math

import pytest
import torch

from vprop import IVON

FORGOTTEN = 1.1e-5
"""Of h in a step, where gradients say that it is zero: 1−β₂. So much longer is the next step."""


def trained(make, steps=12):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = make([weight])
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = 0.5 * (weight * torch.tensor([1.0, 2.0, 0.5])).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return weight.detach()


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_without_momentum_and_with_little_noise_it_is_sgd(temperature):
    def ours(params):
        options = {"num_data": 50, "momentum": 0.0, "weight_decay": 0.3, "sigma": 1e-7, "temperature": temperature}
        return IVON.like_sgd(params, 0.1, **options)

    expected = trained(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.3))
    torch.testing.assert_close(trained(ours), expected, rtol=0.0, atol=12 * FORGOTTEN)


def test_a_constant_gradient_moves_it_as_far_as_sgd():
    """After the start, which the average of the gradients forgets."""
    moved = []
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        lambda params: IVON.like_sgd(params, 0.01, num_data=50, momentum=0.9, weight_decay=0.0, sigma=1e-6),
    ):
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = make([weight])
        places = []
        for _ in range(201):

            def closure(weight=weight, optimizer=optimizer):
                optimizer.zero_grad()
                (loss := weight.sum()).backward()
                return loss

            optimizer.step(closure)
            places.append(weight.detach().clone())
        moved.append(places[-1] - places[-2])
    torch.testing.assert_close(moved[1], moved[0], rtol=201 * FORGOTTEN, atol=0.0)


@pytest.mark.parametrize(("num_data", "temperature"), [(100, 1.0), (5000, 1.0), (5000, 0.01)])
def test_sigma_is_the_standard_deviation_of_the_weights(num_data, temperature):
    layer = torch.nn.Linear(3, 2)
    optimizer = IVON.like_sgd(layer.parameters(), num_data=num_data, sigma=0.02, temperature=temperature)
    for variance in optimizer.posterior(layer).variance.values():
        torch.testing.assert_close(variance.sqrt(), torch.full_like(variance, 0.02))


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("held", [False, True])
def test_noise_and_steps_grow_as_h_forgets_its_start_unless_a_floor_holds_them(held, temperature):
    ess, sigma, steps = 50 / temperature, 0.01, 1000
    floor = {"hess_floor": 1 / (ess * sigma**2)} if held else {}
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = IVON.like_sgd(
        [weight], 0.1, num_data=50, weight_decay=0.0, sigma=sigma, temperature=temperature, momentum=0.0, **floor
    )
    for _ in range(steps):
        with optimizer.sampled_params():
            weight.grad = torch.zeros_like(weight)  # the data say nothing
        optimizer.step()
    grown = 1.0 if held else math.exp(steps / 100_000)
    variance = next(iter(optimizer.posterior(torch.nn.ParameterList([weight])).variance.values()))
    torch.testing.assert_close(variance.sqrt(), torch.full_like(weight, sigma * grown**0.5).detach(), rtol=1e-5, atol=0)
    before = weight.detach().clone()
    with optimizer.sampled_params():
        weight.grad = torch.full_like(weight, 1e-9)
    optimizer.step()
    torch.testing.assert_close(before - weight.detach(), torch.full_like(before, 1e-10 * grown), rtol=1e-4, atol=0)


def test_groups_have_sgds_arguments_too():
    """A head with a rate of its own, norms without decay: the groups are those that a call for each would make."""
    layer, others = torch.nn.Linear(3, 2), {"num_data": 100, "lr": 0.1}
    entries = [
        {"lr": 0.01, "weight_decay": 0, "sigma": 0.02},
        {"momentum": 0.5, "num_data": 50, "temperature": 0.1},
    ]
    groups = ({"params": [p], **entry} for p, entry in zip(layer.parameters(), entries, strict=True))
    optimizer = IVON.like_sgd(groups, **others)
    for group, entry in zip(optimizer.param_groups, entries, strict=True):
        [alone] = IVON.like_sgd(group["params"], **(others | entry)).param_groups
        assert group == alone
    sigmas = [float(m.variance.sqrt().mean()) for m in optimizer.marginals()]
    assert sigmas == pytest.approx([0.02, 0.008])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sigma": 0.0}, ValueError, "sigma"),
        ({"sigma": 1.0, "weight_decay": 0.01}, ValueError, "prior's standard deviation, which is .* = 1 here"),
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"betas": (0.9, 0.999)}, TypeError, "betas: like_sgd"),
        ({"nois": 1}, TypeError, "nois"),
        ({"num_data": 0}, ValueError, "num_data"),
        ({"lr": -1.0}, ValueError, r"lr=-1\.0: must be"),
        ({"lr": "0.1"}, ValueError, r"lr='0\.1': must be"),
    ],
)
def test_what_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        IVON.like_sgd(torch.nn.Linear(3, 2).parameters(), **{"num_data": 100, **options})


def test_the_number_of_data_is_asked_for():
    with pytest.raises(TypeError, match="'num_data'"):
        IVON.like_sgd(torch.nn.Linear(3, 2).parameters())

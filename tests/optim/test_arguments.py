"""Hyperparameters as they are given. Every bad one, with its message: ``test_errors`` in test_torch_generic.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vprop
from tests.table import TABLE


def parameters():
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
def test_num_data_is_required(info):
    with pytest.raises(TypeError, match="num_data"):
        info.build(parameters())


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
def test_numpy_numbers_are_numbers(info):
    import numpy as np

    arguments = {"lr": np.float64(0.1), "num_data": np.int64(10), "seed": np.int64(3), "mc_samples": np.int64(1)}
    group = info.build(parameters(), **arguments).param_groups[0]
    assert {name: group[name] for name in arguments} == arguments
    assert [type(group[name]) for name in arguments] == [float, int, int, int]


def test_prior_tensors_are_copied():
    from vprop import Vprop

    means = [torch.zeros(2), torch.zeros(1)]
    optimizer = Vprop(parameters(), num_data=10, prior_mean=means)
    means[0].fill_(9.0)
    assert optimizer.param_groups[0]["prior_mean"][0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        (None, r"got None, must be tensors or parameter groups\. Pass model\.parameters\(\)"),
        (nn.Linear(2, 1), r"got a model, must be .* Pass model\.parameters\(\)\."),
        (nn.Linear, r"got the class Linear, must be .* Build the model"),
        (nn.Linear(2, 1).parameters, r"got <bound method .* \(with the parentheses\)"),
        ("model.pt", r"got 'model\.pt', must be"),
    ],
    ids=["None", "model", "class", "method", "path"],
)
def test_what_is_no_parameters(info, params, pattern):
    with pytest.raises(TypeError, match=rf"{info.name}\(params\): {pattern}"):
        info.build(params, num_data=10)


def test_priors_that_require_a_gradient_are_copied_without_it():
    from vprop import Vprop

    params = parameters()  # weights of a trained model as the prior's mean
    optimizer = Vprop(params, num_data=10, prior_mean=params, prior_precision=[p.detach() + 1 for p in params])
    prior = optimizer.param_groups[0]["prior_mean"]
    assert not any(mean.requires_grad for mean in prior)
    assert prior[0].data_ptr() != params[0].data_ptr()


@pytest.mark.parametrize("kind", ["meta", "sparse", "int64", "complex64"])
def test_matrices_that_are_no_precision(kind):
    from vprop import VON

    matrices = {
        "meta": torch.eye(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "int64": torch.eye(3, dtype=torch.int64),
        "complex64": torch.eye(3, dtype=torch.complex64),
    }
    with pytest.raises(ValueError, match=rf"Invalid prior_precision: .*{kind}.*, must be a dense tensor of real"):
        VON(parameters(), num_data=10, prior_precision=matrices[kind])


def test_a_tensor_is_no_prior_precision_of_a_diagonal():
    from vprop import Vprop

    with pytest.raises(ValueError, match=r"Invalid prior_precision=tensor\(2\.\): must be .* Pass a float\."):
        Vprop(parameters(), num_data=10, prior_precision=torch.tensor(2.0))


def test_float64_weights_have_the_range_of_float64():
    from vprop import Vprop

    weights = [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert Vprop(weights, num_data=1e50).param_groups[0]["num_data"] == 1e50
    with pytest.raises(ValueError, match=r"Invalid num_data/temperature=inf: .* where float64 can"):
        Vprop(weights, num_data=1e300, temperature=1e-300)


def test_a_number_that_python_refuses_to_write():
    from vprop import Vprop

    with pytest.raises(ValueError, match=r"Invalid num_data=an integer of thousands of digits: must be a finite"):
        Vprop(parameters(), num_data=10**5000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("num_data", -5),
        ("prior_precision", -3.0),
        ("prior_precision", torch.eye(3, dtype=torch.float64)),
        ("prior_mean", [torch.zeros(2)]),
        ("noise_limit", 0.0),
    ],
)
def test_a_group_is_edited_into_what_the_constructor_refuses(name, value):
    """Samples of such a width would leave NaN in the weights, and a negative prior precision no sign at all."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = vprop.Vario([weight], num_data=10, batch_size=5)
    group = optimizer.param_groups[0]
    usual, group[name] = group[name], value
    with pytest.raises(ValueError, match=f"Invalid {name}"), optimizer.sampled_params():
        pass
    assert torch.equal(weight, torch.ones(3))
    group[name] = usual
    with optimizer.sampled_params():
        weight.square().sum().backward()
    optimizer.step()


def test_a_prior_of_another_precision_set_later_is_as_one_of_the_constructor():
    weight = nn.Parameter(torch.ones(3))
    optimizer = vprop.Vprop([weight], num_data=10)
    optimizer.param_groups[0]["prior_precision"] = [torch.full((3,), 5.0, dtype=torch.float64)]
    optimizer.marginals()
    (precision,) = optimizer.param_groups[0]["prior_precision"]
    assert precision.dtype == torch.float32

"""Hyperparameters as they are given. Every bad one, with its message: ``test_errors`` in test_torch_generic.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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

"""Every bad hyperparameter: argument, value, what is allowed, remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.table import SHARED_BAD_ARGUMENTS, TABLE

ROWS = [(info, *bad) for info in TABLE for bad in SHARED_BAD_ARGUMENTS + info.bad_arguments]


def parameters():
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]


@pytest.mark.parametrize(("info", "arguments", "pattern"), ROWS, ids=lambda value: str(value)[:40])
def test_bad_arguments(info, arguments, pattern):
    with pytest.raises(ValueError, match=pattern) as caught:
        info.build(parameters(), **({"num_data": 100} | arguments))
    text = str(caught.value)
    assert text.rstrip().endswith((".", ")")), "the message ends with a remedy, a full sentence"
    with pytest.raises(ValueError, match=pattern):  # the same check for a group's own value
        info.build([{"params": parameters(), **arguments}], num_data=100)


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

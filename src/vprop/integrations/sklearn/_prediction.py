"""Outputs of the networks under weights drawn from the posterior."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vprop.replica import Replica


@torch.no_grad()
def sampled_outputs(posterior: Any, x: Tensor, draws: int, seed: int) -> Tensor:
    """(draws, members, rows, outputs) in float64, whatever the precision of the weights.

    In float64 the prediction of a row does not depend, to more digits than anybody prints, on the rows beside it.
    """
    x, outputs, network = x.double(), [], Replica(posterior.model).eval()
    for draw in range(draws):
        network.load({name: weight.double() for name, weight in posterior.sample(seed=seed + draw).items()})
        outputs.append(network(x))
    return torch.stack(outputs)


def draws_for(samples: int, members: int) -> int:
    """How many draws of all members make at least ``samples`` samples of the output."""
    return math.ceil(samples / members)

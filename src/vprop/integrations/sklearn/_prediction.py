"""Outputs of the networks under weights drawn from the posterior."""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from vprop.integrations._prediction import sampled_outputs
from vprop.posterior import Posterior


def stacked_outputs(posterior: Posterior, x: Tensor, draws: int, seed: int) -> Tensor:
    """(draws, members, rows, outputs) in float64, whatever the precision of the weights.

    In float64 the prediction of a row does not depend, to more digits than anybody prints, on the rows beside it.
    """
    # Draw k is posterior.sample(seed=seed + k), whatever the number of draws.
    models = (posterior.sampled_models(1, seed + draw, dtype=torch.float64) for draw in range(draws))
    return torch.stack(list(sampled_outputs(chain.from_iterable(models), x.double())))


def draws_for(samples: int, members: int) -> int:
    """How many draws of all members make at least ``samples`` samples of the output."""
    return math.ceil(samples / members)

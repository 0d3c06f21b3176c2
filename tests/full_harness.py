"""What the tests of full-covariance optimizers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.harness import make_batch
from vprop import Objective


def objective_of(model, seed=1):
    return Objective(model, F.cross_entropy, *make_batch(dtype=next(model.parameters()).dtype, seed=seed))


def take_steps(model, optimizer, count=1):
    for seed in range(count):
        optimizer.step(objective_of(model, seed))


def hess_of(optimizer):
    """H, which lies with the first parameter that has a state."""
    (matrix,) = [state["hess"] for state in optimizer.state.values() if "hess" in state]
    return matrix


def sample_of(model, optimizer):
    """The weights of the coming step's first sample, as one vector."""
    with optimizer.sampled_params():
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.discard_samples()
    return weights


def random_spd(size, seed=0):
    factor = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T / size + torch.eye(size, dtype=torch.float64)

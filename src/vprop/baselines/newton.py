"""Newton's method on the mean, with the prior: what VON becomes without sampling and without averaging."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.optim import VON
from vprop.optim.hyperparameters import with_hyperparameters
from vprop.optim.hyperparameters.shared import (
    Averages,
    Data,
    HessianRows,
    MatrixPrecision,
    MatrixSize,
    Scales,
    Sign,
)


class NewtonArguments(Data, MatrixPrecision, Averages, Scales, Sign, HessianRows, MatrixSize, total=False):
    """Of Newton: those of VON that have nothing to do with samples."""


@with_hyperparameters(betas={"default": (0.0, 0.0)})
class Newton(VON):
    """μ ← μ − lr·(∇²ℓ(μ) + δI)⁻¹(∇ℓ(μ) + δ(μ−m₀)): VON with ``mc_samples=0`` and β₂ = 0.

    At its end the posterior is the Laplace approximation. With ``betas=(0, β₂)`` it is the *online* Newton method,
    which averages the Hessians of the mini-batches: H ← β₂·H + (1−β₂)·∇²ℓ(μ). ``step`` needs a
    :class:`vprop.Objective`.
    """

    def __init__(self, params: ParamsT, lr: float | Tensor = 1.0, **hyperparameters: Unpack[NewtonArguments]) -> None:
        super().__init__(params, lr, mc_samples=0, **hyperparameters)

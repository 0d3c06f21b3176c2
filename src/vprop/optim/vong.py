"""VONG: the natural-gradient step with outer products of gradients and a full covariance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, from_gradients
from vprop.optim.hyperparameters import SharedByFull, with_hyperparameters
from vprop.optim.hyperparameters.shared import MatrixSize, SampledFisher
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import Full


class VONGArguments(SharedByFull, SampledFisher, MatrixSize, total=False):
    """Of VONG."""


@with_hyperparameters()
class VONG(VariationalOptimizer):
    r"""Gaussian variational inference with a full covariance from gradients alone.

        θₖ = μ + L⁻ᵀεₖ/√ess,  LLᵀ = H + δI,  εₖ ~ N(0, I)  k = 1…K, K = ``mc_samples``
        Ĥ  = ess · mean over k of ∇ℓ(θₖ)∇ℓ(θₖ)ᵀ             plain
             ess · covariance over k of ∇ℓ(θₖ)              ``centered=True``
             M · mean over k of g̃ₖg̃ₖᵀ                       ``sampled_fisher=True``: g̃ on M labels drawn from the model
        H  ← β₂·H + (1−β₂)·Ĥ
        μ  ← μ − lr·(H + δI)⁻¹(m̂ + δ(μ−m₀))                 m̂ the mean over k of ∇ℓ(θₖ), with momentum if β₁ > 0

    in the notation of :class:`vprop.Vprop`, whose arguments it shares; the posterior is N(μ, (ess·(H+δI))⁻¹). Centred,
    E[Ĥ] = ess·HΣH on a quadratic, whose fixed point is the Hessian up to λ: with ``mc_samples=2, antithetic=True,
    centered=True`` it finds the full covariance from gradients. For up to a few thousand parameters: memory grows with
    the square of their number.

    >>> import vprop
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)
    >>> pairs = {"mc_samples": 2, "antithetic": True, "centered": True}
    >>> optimizer = VONG(model.parameters(), lr=0.5, num_data=50, betas=(0.0, 0.9), **pairs)
    >>> for _ in range(50):
    ...     loss = optimizer.step(vprop.Objective(model, torch.nn.functional.mse_loss, x, y))
    >>> bool(loss < 0.1)
    True
    """

    structure = Full

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[VONGArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return from_gradients(
            torch.outer,
            centered=group["centered"],
            antithetic=group["antithetic"],
            sampled_fisher=group["sampled_fisher"],
        )

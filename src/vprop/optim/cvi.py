"""CVI: the natural-gradient step with the exact Hessian diagonal."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, HessianDiagonal
from vprop.optim.hyperparameters import Shared, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.shared import HessianRows
from vprop.optim.optimizer import VariationalOptimizer


class CVIArguments(Shared, HessianRows, total=False):
    """Of CVI."""


@with_hyperparameters(centered=not_centered("CVI", "whose curvature has nothing to centre"))
class CVI(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with the exact Hessian diagonal (the paper's CVI; diagonal VON).

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)           k = 1…K, K = ``mc_samples`` (10 in the paper; 0: θ = μ)
        h  ← β₂·h + (1−β₂)·mean over k of diag ∇²ℓ(θₖ)     and not below 0, where the loss is not convex
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/(h+δ)                    m̂ the mean over k of ∇ℓ(θₖ), with momentum if β₁ > 0

    in the notation of :class:`vprop.Vprop`, whose arguments it shares. There is no bias from squared gradients or
    mini-batches, at the price of second derivatives: ``step`` needs a :class:`vprop.Objective`. In chains of linear
    layers and elementwise functions they cost about two gradients per output unit, elsewhere per weight.

    >>> import vprop
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)
    >>> optimizer = CVI(model.parameters(), lr=0.5, num_data=50, betas=(0.0, 0.9))
    >>> for _ in range(50):
    ...     loss = optimizer.step(vprop.Objective(model, torch.nn.functional.mse_loss, x, y))
    >>> bool(loss < 0.1)
    True
    """

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[CVIArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return HessianDiagonal(group["chunk_size"])

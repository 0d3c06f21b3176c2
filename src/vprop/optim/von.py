"""VON: the natural-gradient step with the exact Hessian and a full covariance."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, Hessian
from vprop.optim.hyperparameters import SharedByFull, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.shared import HessianRows, MatrixSize
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import Full


class VONArguments(SharedByFull, HessianRows, MatrixSize, total=False):
    """Of VON."""


@with_hyperparameters(centered=not_centered("VON", "whose curvature has nothing to centre"))
class VON(VariationalOptimizer):
    r"""Gaussian variational inference with a full covariance and the exact Hessian: variational online Newton.

        θₖ = μ + L⁻ᵀεₖ/√ess,  LLᵀ = H + δI,  εₖ ~ N(0, I)  k = 1…K, K = ``mc_samples``
        H  ← β₂·H + (1−β₂)·mean over k of ∇²ℓ(θₖ)          its positive part where H + δI is indefinite
        μ  ← μ − lr·(H + δI)⁻¹(m̂ + δ(μ−m₀))                m̂ the mean over k of ∇ℓ(θₖ), with momentum if β₁ > 0

    in the notation of :class:`vprop.Vprop`, whose arguments it shares; the posterior is N(μ, (ess·(H+δI))⁻¹). With
    ``mc_samples=0`` it is the online Newton method. For up to a few thousand parameters: memory grows with the square
    of their number. ``step`` needs a :class:`vprop.Objective`.

    >>> import vprop
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)
    >>> optimizer = VON(model.parameters(), lr=0.5, num_data=50, betas=(0.0, 0.9))
    >>> for _ in range(50):
    ...     loss = optimizer.step(vprop.Objective(model, torch.nn.functional.mse_loss, x, y))
    >>> bool(loss < 0.1)
    True
    >>> optimizer.posterior(model).covariance.shape
    torch.Size([3, 3])
    """

    structure = Full

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[VONArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return Hessian(group["chunk_size"])

"""VON: the natural-gradient step with the exact Hessian and a full covariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from vprop.curvature import CurvatureEstimator, Hessian
from vprop.optim._arguments import NOT_HYPERPARAMETERS
from vprop.optim.auto_prior import PriorPrecision
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import Full


class VON(VariationalOptimizer):
    r"""Gaussian variational inference with a full covariance and the exact Hessian: variational online Newton.

        θₖ = μ + L⁻ᵀεₖ/√ess,  LLᵀ = H + δI,  εₖ ~ N(0, I)  k = 1…K, K = ``mc_samples``
        H  ← β₂·H + (1−β₂)·mean over k of ∇²ℓ(θₖ)          its positive part where H + δI is indefinite
        μ  ← μ − lr·(H + δI)⁻¹(m̂ + δ(μ−m₀))                m̂ the mean over k of ∇ℓ(θₖ), with momentum if β₁ > 0

    in the notation of :class:`vprop.Vprop`, whose arguments it shares; the posterior is N(μ, (ess·(H+δI))⁻¹). With
    ``mc_samples=0`` it is the online Newton method. For up to a few thousand parameters: memory grows with the square
    of their number. ``step`` needs a :class:`vprop.Objective`.

    Args:
        prior_precision: as for Vprop; or a matrix over all weights, which ``posterior.as_prior()`` makes.
        chunk_size: rows of the Hessian computed at a time.
        max_parameters: the largest matrix you agree to.
        centered: not for VON, whose curvature has nothing to centre.

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
    _can_center = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        num_data: float,
        prior_precision: PriorPrecision | Tensor = 1.0,
        prior_mean: Sequence[Tensor] | None = None,
        betas: tuple[float, float] = (0.0, 0.999),
        mc_samples: int = 1,
        antithetic: bool = False,
        centered: bool = False,
        temperature: float = 1.0,
        hess_init: float = 1.0,
        clip_radius: float = float("inf"),
        seed: int = 0,
        noise: str = "shared",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        chunk_size: int = 32,
        max_parameters: int = 5000,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in NOT_HYPERPARAMETERS}
        super().__init__(params, defaults)

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return Hessian(group["chunk_size"])

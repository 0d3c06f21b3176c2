"""VOGN: the natural-gradient step with per-example squared gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from vprop.curvature import CurvatureEstimator, PerExampleGaussNewton
from vprop.optim._arguments import NOT_HYPERPARAMETERS
from vprop.optim.auto_prior import PriorPrecision
from vprop.optim.optimizer import VariationalOptimizer


class VOGN(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with the Gauss–Newton diagonal (Khan et al., 2018).

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)                          k = 1…K, K = ``mc_samples`` (K = 0: θ = μ)
        h  ← β₂·h + (1−β₂)·mean over k and over examples i of ∇ℓᵢ(θₖ)²    ℓᵢ the loss of example i
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/(h+δ)                                   m̂ the mean over k of ∇ℓ(θₖ), with momentum

    in the notation of :class:`vprop.Vprop`, whose arguments it shares. ``step`` needs a :class:`vprop.Objective`, whose
    model treats examples alone: no BatchNorm in training mode. The loss must be the mean of the examples' own (not
    ``reduction="sum"``), which is checked; class weights and ignored labels of torch's losses are weights of that mean,
    and of the one of ∇ℓᵢ². What ``torch.func`` cannot run (recurrent layers on a CPU) is differentiated one example
    after the other, which is slow.

    Args:
        chunk_size: examples differentiated at a time; bounds the memory to that many gradients. ``None``: as many as
            make 2²⁵ numbers (128 MiB), and at least 32.
        centered: not for VOGN, whose curvature has nothing to centre.

    >>> import vprop
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)
    >>> optimizer = VOGN(model.parameters(), lr=0.5, num_data=50, betas=(0.0, 0.9))
    >>> for _ in range(50):
    ...     loss = optimizer.step(vprop.Objective(model, torch.nn.functional.mse_loss, x, y))
    >>> bool(loss < 0.1)
    True
    """

    _can_center = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        num_data: float,
        prior_precision: PriorPrecision = 1.0,
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
        chunk_size: int | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in NOT_HYPERPARAMETERS}
        super().__init__(params, defaults)

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return PerExampleGaussNewton(group["chunk_size"])

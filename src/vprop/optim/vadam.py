"""Vadam: variational inference with the update of Adam."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, MeanSquare
from vprop.optim.hyperparameters import Floored, not_centered, rate, with_hyperparameters
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import VADAM, Rule


@with_hyperparameters(
    lr={"words": "step size on the scale of Adam's.", "check": rate(0.001)},
    betas={"default": (0.9, 0.999)},
    hess_init={
        "default": 0.0,
        "words": "h before the first step; 0 as in the paper, so that the first samples are drawn from the prior.",
    },
    centered=not_centered("Vadam", "whose curvature is the plain square"),
)
class Vadam(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with the step of Adam (Khan et al., 2018).

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)           k = 1…K, K = ``mc_samples`` (K = 0: θ = μ)
        h  ← β₂·h + (1−β₂)·mean over k of ∇ℓ(θₖ)²          no factor ess
        m  ← β₁·m + (1−β₁)·(mean over k of ∇ℓ(θₖ) + δ(μ−m₀))
        μ  ← μ − lr·m̂/(√ĥ+δ)                              m̂ = m/(1−β₁ᵗ), ĥ = h/(1−β₂ᵗ)

    in the notation of :class:`vprop.Vprop`, whose arguments it shares. Unlike there, the mean's step divides by the
    *root* of the average square, as Adam does, so that ``lr`` is Adam's too; and the prior's pull is inside the
    momentum average.

    The square of a *mini-batch mean* of gradients stands for the curvature: for a batch of M examples it is about
    M times too small (and ess times smaller than Vprop's), so the posterior is too wide, for large batches almost the
    prior. Choose ``prior_precision`` large enough that the prior's noise lets the model learn; for variances that can
    be trusted use centred :class:`vprop.Vprop` or antithetic :class:`vprop.IVON`.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = Vadam([weight], lr=0.05, num_data=100, prior_precision=10.0)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = 0.5 * (weight - torch.tensor([1.0, -1.0])).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(300):
    ...     loss = optimizer.step(closure)
    >>> bool((weight - torch.tensor([1.0, -1.0])).abs().max() < 0.3)
    True
    """

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.001, **hyperparameters: Unpack[Floored]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return MeanSquare()

    def _rule(self, group: dict[str, Any]) -> Rule:
        return VADAM

"""IVON: the natural-gradient step with curvature from gradients and noise, and no clamp."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, Price
from vprop.optim.hyperparameters import Hyperparameter, Shared, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import flag, start_that_stays
from vprop.optim.hyperparameters.shared import Bases
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import RIEMANNIAN, RateFactor, Rule


class IVONArguments(Shared, Bases, total=False):
    """Of IVON."""

    rescale_lr: Annotated[
        bool,
        Hyperparameter(
            "multiply ``lr`` by hess_init+δ, so that the first step is ``lr`` times a plain gradient; with "
            '``preconditioner="identity"`` it is that already, and nothing is multiplied.',
            False,
            flag,
        ),
    ]


@with_hyperparameters(
    betas={"default": (0.9, 0.99999)},
    hess_init={"words": "h before the first step. With the long average it is the noise of most of the training."},
    init_steps={"words": "not for IVON, whose average has a further term.", "fits": start_that_stays},
    centered=not_centered("IVON", "whose curvature is no spread"),
)
class IVON(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference by an improved variational online Newton step (Shen et al., 2024).

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)                  k = 1…K, K = ``mc_samples``
        ĥ  = mean over k of ∇ℓ(θₖ)·(θₖ−μ)/σ²                      σ² = 1/(ess·(h+δ))
        h  ← β₂·h + (1−β₂)·ĥ + ½(1−β₂)²(h−ĥ)²/(h+δ)                which keeps h+δ > 0
        m  ← β₁·m + (1−β₁)·mean over k of ∇ℓ(θₖ),  m̂ = m/(1−β₁ᵗ)
        μ  ← μ − α·clip((m̂ + δ(μ−m₀))/(h+δ))                      α = lr, or lr·(hess_init+δ) with ``rescale_lr``

    in the notation of :class:`vprop.Vprop`, whose arguments it shares. ĥ is unbiased for E_q[diag ∇²ℓ], at the cost
    of one gradient and, from a single sample, very noisy: hence the long average (β₂ = 0.99999), within which h stays
    near ``hess_init`` for some ten thousand steps. ``mc_samples=2, antithetic=True`` takes the curvature from the
    *difference* of two gradients on one mini-batch, whose common part, all of the mini-batch's noise, cancels; with it
    a shorter average will do (β₂ = 0.999).

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = IVON([weight], lr=0.1, num_data=100, mc_samples=2, antithetic=True, betas=(0.9, 0.99))
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = 0.5 * (weight - torch.tensor([1.0, -1.0])).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(200):
    ...     loss = optimizer.step(closure)
    >>> bool((weight - torch.tensor([1.0, -1.0])).abs().max() < 0.3)
    True
    """

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[IVONArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return Price()

    def _rule(self, group: dict[str, Any]) -> Rule:
        return RIEMANNIAN

    def _rate_factor(self, group: dict[str, Any], ess: float) -> RateFactor:
        if not group["rescale_lr"] or group["preconditioner"] == "identity":
            return 1.0
        precision, start = group["prior_precision"], group["hess_init"]
        if isinstance(precision, list):
            return lambda damping: start + damping
        return start + precision / ess

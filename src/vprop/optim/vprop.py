"""Vprop: variational inference with the update of RMSprop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, from_gradients
from vprop.optim.hyperparameters import Shared, with_hyperparameters
from vprop.optim.hyperparameters.shared import STRUCTURES, Bases, MatrixSize, SampledFisher
from vprop.optim.optimizer import VariationalOptimizer


class VpropArguments(Shared, SampledFisher, Bases, MatrixSize, total=False):
    """Of Vprop."""


@with_hyperparameters(structure=STRUCTURES)
class Vprop(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with the cost of RMSprop (Khan et al., 2017).

    The loss ℓ is a mean over the mini-batch; N is ``num_data``, λ ``prior_precision``, m₀ ``prior_mean``, τ
    ``temperature``; ess = N/τ and δ = λ/ess. One step is

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)           k = 1…K, K = ``mc_samples`` (K = 0: θ = μ)
        ĝ  = mean over k of ∇ℓ(θₖ)
        ĥ  = ess · mean over k of ∇ℓ(θₖ)²                  plain: Vprop-0, Vprop-1, Vprop-K
             ess · spread over k of ∇ℓ(θₖ)                 ``centered=True``
             M · mean over k of g̃ₖ²                        ``sampled_fisher=True``: g̃ on M labels drawn from the model
        h  ← β₂·h + (1−β₂)·ĥ
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/(h+δ)                    m̂ = ĝ, or its debiased average when β₁ > 0

    and the posterior is q = N(μ, 1/(ess·(h+δ))). In the paper's letters s = N·h, α = lr, β = 1−β₂.

    A gradient element that is NaN or infinite is left out: its mean and curvature keep their values, and a
    warning says so (on CPU in that step; on other devices, where looking would stall the queue, when
    :meth:`posterior` or :meth:`state_dict` is called).

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = Vprop([weight], lr=0.5, num_data=100)
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

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[VpropArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return from_gradients(
            torch.outer if group["structure"] == "full" else torch.mul,
            centered=group["centered"],
            antithetic=group["antithetic"],
            sampled_fisher=group["sampled_fisher"],
        )

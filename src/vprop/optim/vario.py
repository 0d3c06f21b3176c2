"""Vario: the recommended optimizer. Adam's step or SGD's, a posterior for mini-batches and networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, SquaredGradient
from vprop.optim.hyperparameters import Shared, not_centered, rate, with_hyperparameters
from vprop.optim.hyperparameters.declaration import REQUIRED
from vprop.optim.hyperparameters.shared import STRUCTURES, Bases, MatrixSize
from vprop.optim.optimizer import VariationalOptimizer


class VarioArguments(Shared, Bases, MatrixSize, total=False):
    """Of Vario."""


@with_hyperparameters(
    lr={
        "words": "step size, as for Adam. Best with a short warm-up and a cosine that ends at zero.",
        "check": rate(0.003),
    },
    betas={"default": (0.9, 0.999)},
    batch_size={"default": REQUIRED},
    init_steps={"default": 0.0},
    preconditioner={"default": "root"},
    noise_limit={"default": 0.2},
    structure=STRUCTURES,
    centered=not_centered("Vario", "whose curvature is the plain square"),
)
class Vario(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference for networks, with the step and the step sizes of Adam.

        σ² = 1/(ess·max(h+δ, f)),  f = 1/(ess·(κ·rms)²)         κ = ``noise_limit``, rms of a parameter's weights
        θₖ = μ + σ·εₖ,  εₖ ~ N(0, I)                            k = 1…K, K = ``mc_samples``
        h  ← h + wₜ·(M·mean over k of ∇ℓ(θₖ)² − h)               M = ``batch_size``, wₜ = (1−β₂)/(1−β₂ᵗ)
        m  ← β₁·m + (1−β₁)·mean over k of ∇ℓ(θₖ),  m̂ = m/(1−β₁ᵗ)
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/√(h/M + δ²((μ−m₀)²+σ²))       √(h/M) is the size of a mini-batch's gradient

    in the notation of :class:`vprop.Vprop`, whose arguments it shares; it is ``Vprop`` with other defaults, which are
    chosen so that ``lr`` is all that is left to choose:

    - M·ĝ² is the scale of the curvature on mini-batches, where the paper's N·ĝ² is N/M times too large.
    - The average of the curvature forgets its start, as Adam's does.
    - σ is at most a share κ of the size of a layer's weights. Where the data say more than that, σ is what they say;
      for the others, in a network most of them, a noise that the layers behind can bear, in place of the prior's.
    - The step divides by the root, as transformers want it, and takes Adam's ``lr``. Networks that are trained by SGD,
      as convolutional ones with BatchNorm are, can have its step: ``preconditioner="identity"`` is SGD with momentum,
      whose ``lr`` is SGD's divided by 1−β₁, and a weight decay w is ``prior_precision`` = w·N.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Vario([weight], lr=0.05, num_data=100, batch_size=100)
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

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.003, **hyperparameters: Unpack[VarioArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return SquaredGradient(torch.outer if group["structure"] == "full" else torch.mul)

"""VOGN: the natural-gradient step with per-example squared gradients."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, PerExampleGaussNewton
from vprop.optim.hyperparameters import Hyperparameter, Shared, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import at_least_one, or_none
from vprop.optim.optimizer import VariationalOptimizer


class VOGNArguments(Shared, total=False):
    """Of VOGN."""

    chunk_size: Annotated[
        int | None,
        Hyperparameter(
            "examples differentiated at a time; bounds the memory to that many gradients. ``None``: as many as make "
            "2²⁵ numbers (128 MiB), and at least 32.",
            None,
            or_none(at_least_one),
        ),
    ]


@with_hyperparameters(centered=not_centered("VOGN", "whose curvature has nothing to centre"))
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

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[VOGNArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return PerExampleGaussNewton(group["chunk_size"])

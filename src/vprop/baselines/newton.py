"""Newton's method on the mean, with the prior: what VON becomes without sampling and without averaging."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import ParamsT

from vprop.optim import VON


class Newton(VON):
    """μ ← μ − lr·(∇²ℓ(μ) + δI)⁻¹(∇ℓ(μ) + δ(μ−m₀)): VON with ``mc_samples=0`` and β₂ = 0.

    At its end the posterior is the Laplace approximation. With ``betas=(0, β₂)`` it is the *online* Newton method,
    which averages the Hessians of the mini-batches: H ← β₂·H + (1−β₂)·∇²ℓ(μ). ``step`` needs a
    :class:`vprop.Objective`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        num_data: float,
        prior_precision: float | Sequence[Tensor] | Tensor = 1.0,
        prior_mean: Sequence[Tensor] | None = None,
        betas: tuple[float, float] = (0.0, 0.0),
        temperature: float = 1.0,
        hess_init: float = 1.0,
        clip_radius: float = float("inf"),
        seed: int = 0,
        maximize: bool = False,
        chunk_size: int = 32,
        max_parameters: int = 5000,
    ) -> None:
        super().__init__(
            params,
            lr,
            num_data=num_data,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            betas=betas,
            mc_samples=0,
            temperature=temperature,
            hess_init=hess_init,
            clip_radius=clip_radius,
            seed=seed,
            maximize=maximize,
            chunk_size=chunk_size,
            max_parameters=max_parameters,
        )

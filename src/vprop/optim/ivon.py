"""IVON: the natural-gradient step with curvature from gradients and noise, and no clamp."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Self, Unpack

from vprop.curvature import CurvatureEstimator, Price
from vprop.optim._arguments import checked_params
from vprop.optim.hyperparameters import Hyperparameter, Shared, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import flag, not_negative, number, positive, start_that_stays
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


IVON_BETAS = (0.9, 0.99999)
SGD_CHECKS = {
    "momentum": number("a number in [0, 1)", lambda value: 0 <= value < 1, "SGD's usual one is 0.9."),
    "weight_decay": not_negative("SGD's usual ones are 5e-4 and 1e-3."),
    "sigma": positive("It is the standard deviation of the weights; 0.008 is a first try."),
}
"""Of what :meth:`IVON.like_sgd` takes in place of arguments of the class."""


def _without(names: Collection[str], entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name not in names}


def curvature_for(sigma: float, weight_decay: float, ess: float) -> float:
    """The h that makes σ = 1/√(ess·(h+δ)), where δ is the weight decay."""
    widest = 1 / math.sqrt(ess * weight_decay) if weight_decay else math.inf
    if not sigma < widest:
        raise ValueError(
            f"Invalid sigma: {sigma!r}. Must be below the prior's standard deviation, which is "
            f"1/√(num_data·weight_decay/temperature) = {widest:.3g} here."
        )
    return 1 / (ess * sigma**2) - weight_decay


@with_hyperparameters(
    betas={"default": IVON_BETAS},
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

    @classmethod
    def like_sgd(
        cls,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        sigma: float = 0.008,
        **hyperparameters: Unpack[IVONArguments],
    ) -> Self:
        r"""For networks that SGD trains well, convolutional ones say: its steps, and noise of size ``sigma``.

        ``lr``, ``momentum`` and ``weight_decay`` mean what they mean for :class:`torch.optim.SGD`, and steps are SGD's
        but for the first ones, since the average of the gradients forgets its start. With ess = N/τ this is

            α = lr/(1−β₁),  β₁ = momentum,  λ = weight_decay·ess,  hess_init + δ = 1/(ess·sigma²),  rescale_lr=True

        ``sigma`` is the standard deviation of every weight at the start. Good ones were a tenth to a fifth of the size
        of the weights, more with few data. Where the data say little about a weight, h is after t steps down to
        β₂ᵗ = exp(−t/100,000) of its start, so that σ has grown by exp(t/200,000) and steps by exp(t/100,000): by 1.2
        and 1.5 times in 39,000 steps. In longer trainings ``hess_floor=1/(ess·sigma²)`` holds both where they were.
        ``num_data`` and further arguments are those of the class. All of them can be set per group. The optimizer is
        then one like any other: a rate that is set later, by hand or in a group that is added, is α.

        >>> import torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = IVON.like_sgd(layer.parameters(), lr=0.1, num_data=1000, sigma=0.01)
        >>> optimizer.posterior(layer).variance["bias"].sqrt()
        tensor([0.0100, 0.0100])
        """
        given: dict[str, Any] = {"temperature": 1.0, **hyperparameters}
        if "num_data" not in given:
            return cls(params, lr, **hyperparameters)  # says what is missing
        sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "sigma": sigma}
        usual = sgd | {name: given[name] for name in ("num_data", "temperature")}
        arguments = given | cls._from_sgd(given | sgd)
        if not isinstance(params, Tensor):  # which torch refuses
            params = [
                entry if not isinstance(entry, dict) else _without(SGD_CHECKS, entry) | cls._from_sgd(usual | entry)
                for entry in checked_params(params, cls.__name__)
            ]
        return cls(params, **arguments)

    @classmethod
    def _from_sgd(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """What the arguments of :meth:`like_sgd`, or the entries of a group, are as arguments of the class."""
        for name in {"betas", "hess_init", "prior_precision", "rescale_lr"} & set(facts):
            raise TypeError(f"{name}: like_sgd() sets it itself, from lr, momentum, weight_decay and sigma.")
        known = {name: cls._hyperparameters[name].check for name in ("lr", "num_data", "temperature")}
        for name, check in (known | SGD_CHECKS).items():  # before others are computed from them
            check(name, facts)
        ess, momentum, decay = facts["num_data"] / facts["temperature"], facts["momentum"], facts["weight_decay"]
        return {
            "lr": facts["lr"] / (1 - momentum),
            "betas": (momentum, IVON_BETAS[1]),
            "prior_precision": decay * ess,
            "hess_init": curvature_for(facts["sigma"], decay, ess),
            "rescale_lr": True,
        }

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

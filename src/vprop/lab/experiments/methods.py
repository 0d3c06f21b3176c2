"""The methods that are compared, each with its grid of step sizes. Every grid has the same number of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vprop import CVI, VOGN, VON, VONG, Vprop
from vprop.baselines import BBVI

Kind = Literal["posterior", "point", "dropout"]
Group = Literal["paper", "ours", "extra"]
Setting = dict[str, float]
Build = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """A method as it appears in figures and tables."""

    name: str
    label: str
    group: Group
    build: Build
    """(parameters, num_data, prior_precision, seed, hess_init, **setting) → optimizer"""
    grid: tuple[Setting, ...]
    gradients: int = 1
    """Gradient evaluations of the batch per step: as many passes when counted fairly."""
    kind: Kind = "posterior"
    dropout: float = 0.0
    networks_only: bool = False
    full_covariance: bool = False

    @property
    def score_name(self) -> str:
        """What its step sizes are chosen by: training data only, for every method."""
        return "training ELBO" if self.kind == "posterior" else "training log joint"


def _natural(optimizer: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    """A natural-gradient optimizer of this library."""

    def build(
        params: Iterable[Tensor],
        num_data: int,
        prior_precision: float,
        seed: int,
        hess_init: float,
        *,
        lr: float,
        beta2: float,
        beta1: float = 0.0,
    ) -> torch.optim.Optimizer:
        return optimizer(
            params,
            lr=lr,
            num_data=num_data,
            prior_precision=prior_precision,
            betas=(beta1, beta2),
            hess_init=hess_init,
            seed=seed,
            **fixed,
        )

    return build


def _bbvi(
    method: str,
    params: Iterable[Tensor],
    num_data: int,
    prior_precision: float,
    seed: int,
    hess_init: float,
    *,
    lr: float,
    beta2: float = 0.999,
) -> BBVI:
    return BBVI(
        params,
        lr=lr,
        num_data=num_data,
        prior_precision=prior_precision,
        hess_init=hess_init,
        seed=seed,
        method=method,
        betas=(0.9, beta2),
    )


def _rmsprop(
    momentum: float,
    params: Iterable[Tensor],
    num_data: int,
    prior_precision: float,
    seed: int,
    hess_init: float,
    *,
    lr: float,
    beta2: float,
) -> torch.optim.RMSprop:
    return torch.optim.RMSprop(params, lr=lr, alpha=beta2, weight_decay=prior_precision / num_data, momentum=momentum)


def _grid(lrs: Iterable[float], beta2s: Iterable[float] = (0.9, 0.99)) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "beta2": beta2} for beta2 in beta2s for lr in lrs)


_NATURAL_GRID = _grid((0.03, 0.1, 0.3, 1.0))
_RMSPROP_GRID = _grid((0.001, 0.003, 0.01, 0.03))
_PAIR = {"mc_samples": 2, "antithetic": True, "centered": True}

METHODS = [
    Method("bbvi", "BBVI", "paper", partial(_bbvi, "sgd"),
           tuple({"lr": lr} for lr in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0))),
    Method("cvi-10", "CVI-10", "paper", _natural(CVI, mc_samples=10), _NATURAL_GRID, gradients=10),
    Method("vprop-2", "Vprop-2", "paper", _natural(Vprop, mc_samples=2), _NATURAL_GRID, gradients=2),
    Method("vprop-1", "Vprop-1", "paper", _natural(Vprop), _NATURAL_GRID),
    Method("vprop-0", "Vprop-0", "paper", _natural(Vprop, mc_samples=0), _NATURAL_GRID),
    Method("rmsprop", "RMSprop", "paper", partial(_rmsprop, 0.0), _RMSPROP_GRID, kind="point"),
    Method("vprop-2-centered", "Vprop-2, centred", "ours", _natural(Vprop, **_PAIR), _NATURAL_GRID, gradients=2),
    Method("von-10", "VON-10", "ours", _natural(VON, mc_samples=10, chunk_size=128), _NATURAL_GRID, gradients=10,
           full_covariance=True),
    Method("vong-2-centered", "VONG-2, centred", "ours", _natural(VONG, **_PAIR), _NATURAL_GRID, gradients=2,
           full_covariance=True),
    Method("vong-2", "VONG-2", "extra", _natural(VONG, mc_samples=2), _NATURAL_GRID, gradients=2, full_covariance=True),
    Method("vogn-10", "VOGN-10", "extra", _natural(VOGN, mc_samples=10, chunk_size=4096), _NATURAL_GRID, gradients=10),
    Method("vprop-2-fisher", "Vprop-2, sampled Fisher", "extra", _natural(Vprop, mc_samples=2, sampled_fisher=True),
           _NATURAL_GRID, gradients=4),
    Method("bbvi-rmsprop", "BBVI with RMSprop", "extra", partial(_bbvi, "rmsprop"), _RMSPROP_GRID),
    Method("bbvi-adam", "BBVI with Adam", "extra", partial(_bbvi, "adam"), _RMSPROP_GRID),
    Method("vprop-1-momentum", "Vprop-1 with momentum", "extra", partial(_natural(Vprop), beta1=0.9), _NATURAL_GRID),
    Method("rmsprop-momentum", "RMSprop with momentum", "extra", partial(_rmsprop, 0.9), _RMSPROP_GRID, kind="point"),
    Method("mc-dropout", "MC dropout", "extra", partial(_rmsprop, 0.0), _RMSPROP_GRID, kind="dropout", dropout=0.1,
           networks_only=True),
]  # fmt: skip

BY_NAME = {method.name: method for method in METHODS}

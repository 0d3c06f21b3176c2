"""MeanField: the natural-gradient step with whichever curvature estimator one likes."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Required, Unpack

from vprop.checks import invalid
from vprop.curvature import NAMES, CurvatureEstimator, by_name
from vprop.optim.hyperparameters import Hyperparameter, Shared, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import at_least_one, flag, or_none, start_that_stays
from vprop.optim.optimizer import VariationalOptimizer
from vprop.structures import NATURAL, RIEMANNIAN, Rule


def _estimator(name: str, group: dict[str, Any]) -> None:
    if not isinstance(group[name], CurvatureEstimator) and group[name] not in NAMES:
        raise invalid(
            name,
            group[name],
            f"one of {NAMES}, or an estimator of vprop.curvature",
            "'centered' with mc_samples=2, antithetic=True is a good first try.",
        )


class MeanFieldArguments(Shared, total=False):
    """Of MeanField."""

    curvature: Required[
        Annotated[
            str | CurvatureEstimator,
            Hyperparameter(
                "a name from the table, or an estimator of :mod:`vprop.curvature`, one of your own included.",
                check=_estimator,
            ),
        ]
    ]
    riemannian: Annotated[
        bool,
        Hyperparameter(
            "keep the precision positive as IVON does, by a further term in the average, and not by keeping h ≥ 0. For "
            'estimators that can be negative ("price", "hutchinson", "hessian"), whose noise a clamp would bias '
            "upwards where the curvature is small.",
            False,
            flag,
        ),
    ]
    chunk_size: Annotated[
        int | None,
        Hyperparameter(
            "of the estimators that work in chunks; ``None`` for their defaults.", None, or_none(at_least_one)
        ),
    ]


@with_hyperparameters(
    init_steps={"fits": start_that_stays}, centered=not_centered("MeanField", 'where ``curvature="centered"`` says it')
)
class MeanField(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with any estimator of the curvature: the grid that the others are from.

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)           k = 1…K, K = ``mc_samples`` (K = 0: θ = μ)
        h  ← β₂·h + (1−β₂)·ĥ                               ĥ by ``curvature``
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/(h+δ)                    m̂ the mean over k of ∇ℓ(θₖ), with momentum if β₁ > 0

    in the notation of :class:`vprop.Vprop`, whose arguments it shares.

    | ``curvature`` | unbiased for | needs | the same as |
    | --- | --- | --- | --- |
    | ``"squared_gradient"`` | ess·E[ĝ²] | a gradient | ``Vprop`` |
    | ``"centered"`` | ess·Var_q[ĝ] of the mini-batch | K ≥ 2 gradients | ``Vprop(centered=True)`` |
    | ``"price"`` | E_q[diag ∇²ℓ] | K ≥ 1 gradients | ``IVON`` with ``riemannian=True`` |
    | ``"gauss_newton"`` | the empirical Fisher's diagonal | an objective | ``VOGN`` |
    | ``"sampled_fisher"`` | the Fisher's diagonal | an objective | ``Vprop(sampled_fisher=True)`` |
    | ``"hutchinson"`` | E_q[diag ∇²ℓ] | an objective | |
    | ``"hessian"`` | E_q[diag ∇²ℓ], exact at each sample | an objective | ``CVI`` |

    A checkpoint holds the name of ``curvature`` only: an optimizer that loads it keeps the estimator it was built with.

    >>> import vprop
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)
    >>> curvature = vprop.curvature.Hutchinson(probes=2)
    >>> optimizer = MeanField(model.parameters(), lr=0.5, num_data=50, curvature=curvature, betas=(0.0, 0.9))
    >>> for _ in range(50):
    ...     loss = optimizer.step(vprop.Objective(model, torch.nn.functional.mse_loss, x, y))
    >>> bool(loss < 0.1)
    True
    """

    _kept_when_loading = ("curvature",)

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 0.1, **hyperparameters: Unpack[MeanFieldArguments]
    ) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        curvature = group["curvature"]
        if isinstance(curvature, CurvatureEstimator):
            return curvature
        return by_name(curvature, antithetic=group["antithetic"], chunk_size=group["chunk_size"])

    def _rule(self, group: dict[str, Any]) -> Rule:
        return RIEMANNIAN if group["riemannian"] else NATURAL

    def state_dict(self) -> dict[str, Any]:
        """As torch's; an estimator is saved by its name, so that the file holds nothing but numbers and words."""
        handle = self.register_state_dict_post_hook(_name_estimators, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()


def _name_estimators(_: Optimizer, saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        if isinstance(group["curvature"], CurvatureEstimator):
            group["curvature"] = type(group["curvature"]).__name__

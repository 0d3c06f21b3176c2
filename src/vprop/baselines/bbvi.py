"""Black-box variational inference: stochastic gradients of the ELBO in μ and σ."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, NoiseProduct
from vprop.functional import black_box, diagonal
from vprop.optim._arguments import refuse_sharded_parameters
from vprop.optim._diagonal import DiagonalOptimizer
from vprop.optim._loading import StateForm
from vprop.optim._members import Member, mean_of
from vprop.optim._written import Written
from vprop.optim.hyperparameters import Hyperparameter, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import not_negative, one_of, or_none
from vprop.optim.hyperparameters.shared import Averages, Data, Implementation, Precision, Samples, Scales, Sign
from vprop.precision import compute_dtype

_METHODS = ("sgd", "rmsprop", "adam")
_REMEDY = "Leave it out for the default."


class BBVIArguments(Data, Precision, Averages, Samples, Scales, Sign, Implementation, total=False):
    """Of BBVI: the shared ones without ``noise``, and its own."""

    method: Annotated[
        str, Hyperparameter('"sgd", "rmsprop" or "adam".', "sgd", one_of(_METHODS, "'sgd' takes constant steps."))
    ]
    lr_std: Annotated[
        float | None,
        Hyperparameter(
            "step for σ; ``None`` is ``lr``.", None, or_none(not_negative(_REMEDY, "None or a finite number >= 0"))
        ),
    ]
    eps: Annotated[float, Hyperparameter("added to the root of the mean square.", 1e-8, not_negative(_REMEDY))]


@with_hyperparameters(
    lr={"words": "step for μ."},
    betas={"default": (0.9, 0.999), "words": 'of "adam"; "rmsprop" uses the second.'},
    hess_init={"words": "σ starts at 1/√(ess·(hess_init+δ))."},
    clip_radius={"words": "bound on each element of a direction, before ``lr`` and ``lr_std``."},
    foreach={"words": "makes no difference here."},
    centered=not_centered("BBVI", "which has no curvature"),
)
class BBVI(DiagonalOptimizer):
    r"""Diagonal Gaussian variational inference by plain, RMSprop or Adam steps in μ and σ: what Vprop is compared with.

    With L the negative ELBO, ess = N/τ and δ = λ/ess

        G_μ = ∇_μ L/ess = mean over k of ĝₖ + δ(μ−m₀)
        G_σ = ∇_σ L/ess = mean over k of ĝₖεₖ + δσ − 1/(ess·σ)
        "sgd":      μ ← μ − lr·G_μ,  σ ← σ − lr_std·G_σ          constant steps, as the paper plots it
        "rmsprop":  the same with G/(√v+eps), v ← β₂v + (1−β₂)G²
        "adam":     the same with Adam's debiased averages

    and σ stays between half and twice its old value, so that 1/σ can do no harm. Beside μ it keeps σ, and two
    (RMSprop) or four (Adam) tensors of averages: 2, 4 and 6 numbers per weight, against the 2 of Vprop.
    """

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.01, **hyperparameters: Unpack[BBVIArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse_sharded_parameters(group, "BBVI")

    _has_kernels = False
    _state_form = StateForm(
        needed=("std",),
        like_parameter=("std", "mean", "mean_square_avg", "std_square_avg", "mean_avg", "std_avg"),
        positive=("std",),
        may_be_anything=("mean",),
    )

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return NoiseProduct()

    def _new_state(self, member: Member) -> dict[str, Tensor]:
        state = super()._new_state(member)
        # σ takes the place of h: the same memory, and no division to get it back.
        state["std"] = diagonal.variance(state.pop("hess"), member.ess, member.damping).sqrt()
        return state

    def _make_state(self) -> None:
        for member in self._members():
            state = self._state(member)
            for name in ("mean", "std"):
                _direction(name, torch.zeros_like(state["std"]), state, member.group)

    def _address(
        self, member: Member, state: dict[str, Tensor], sample: int, evaluation_draw: int | None, mean: Tensor | None
    ) -> Written:
        precision = state["std"].square().reciprocal()
        written = super()._address(member, state | {"hess": precision}, sample, evaluation_draw, mean)
        written.ess, written.damping = 1.0, 0.0
        return written

    def _variance(self, member: Member, state: dict[str, Tensor]) -> Tensor:
        return state["std"].square()

    def _update(self) -> None:
        self._leave()
        for member in self._members():
            folded = self._ledger.folded.pop(member.p, None)
            if folded is None:
                continue
            state = self._state(member)
            state["step"] += 1
            mean, std, ess, group = mean_of(member.p, state), state["std"], member.ess, member.group
            grads = {
                "mean": black_box.mean_gradient(mean, folded.grad, member.damping, member.prior_mean),
                "std": black_box.std_gradient(std, folded.product, ess, member.damping),
            }
            # The square as well: an infinite average would make the weight NaN one step later.
            usable = torch.isfinite(grads["mean"].square()) & torch.isfinite(grads["std"].square())
            lr_std = group["lr"] if group["lr_std"] is None else group["lr_std"]
            directions = {
                name: _direction(name, torch.where(usable, grad, 0), state, group) for name, grad in grads.items()
            }
            new_mean = mean - group["lr"] * directions["mean"]
            usable = usable & torch.isfinite(new_mean)
            new_mean = torch.where(usable, new_mean, mean)
            new_std = torch.where(usable, black_box.bounded(std - lr_std * directions["std"], std), std)
            member.p.copy_(new_mean)
            if "mean" in state:
                state["mean"].copy_(new_mean)
            std.copy_(new_std)
            self._count_unusable((~usable).sum())


def _direction(name: str, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """The step's direction, with the averages of ``method`` for this variational parameter kept in the state."""
    method, betas, eps, radius = group["method"], group["betas"], group["eps"], group["clip_radius"]
    if method == "sgd":
        return grad.clamp(-radius, radius)
    square = state.setdefault(f"{name}_square_avg", torch.zeros_like(grad, dtype=compute_dtype(grad)))
    if method == "rmsprop":
        direction, new_square = black_box.rmsprop_direction(grad, square, betas[1], eps)
    else:
        average = state.setdefault(f"{name}_avg", torch.zeros_like(square))
        step = state["step"].to(grad.dtype)
        direction, new_average, new_square = black_box.adam_direction(grad, average, square, step, betas, eps)
        average.copy_(new_average)
    square.copy_(new_square)
    return direction.clamp(-radius, radius)

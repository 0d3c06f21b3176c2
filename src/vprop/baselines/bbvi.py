"""Black-box variational inference: stochastic gradients of the ELBO in μ and σ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from vprop.curvature import CurvatureEstimator, NoiseProduct
from vprop.functional import black_box, diagonal
from vprop.optim.hyperparameters import Hyperparameter, not_centered, with_hyperparameters
from vprop.optim.hyperparameters.checks import not_negative, one_of, or_none
from vprop.optim.hyperparameters.shared import Averages, Data, Implementation, Precision, Samples, Scales, Sign
from vprop.optim.optimizer import VariationalOptimizer
from vprop.precision import compute_dtype
from vprop.structures import Diagonal, GroupStep, Member, Plan, Structure, TensorSpec
from vprop.structures.base import MEAN
from vprop.structures.checks import refuse_sharded_parameters
from vprop.structures.members import State, mean_of

_METHODS = ("sgd", "rmsprop", "adam")
_REMEDY = "Leave it out for the default."


class MeanAndStd(Diagonal):
    """μ and σ themselves, with gradient steps in both: σ takes the place of h."""

    has_kernels = False
    state_spec: ClassVar[Mapping[str, TensorSpec]] = {
        "std": TensorSpec(needed=True, positive=True),
        "mean": MEAN,
        **{f"{name}_{average}": TensorSpec() for name in ("mean", "std") for average in ("square_avg", "avg")},
    }

    def new_state(self, member: Member) -> State:
        """The same memory as h, and no division to get σ back."""
        state, p = Structure.new_state(self, member), member.p
        start = torch.full_like(p, member.group["hess_init"], dtype=compute_dtype(p), requires_grad=False)
        state["std"] = diagonal.variance(start, member.ess, member.damping).sqrt()
        return state

    def make_state(self) -> None:
        """With the averages of the method."""
        for member in self.members:
            state = self.state_of(member)
            for name in ("mean", "std"):
                _direction(name, torch.zeros_like(state["std"]), state, member.group)

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:
        """σ is looked at by itself."""

    def _width(self, member: Member, state: State) -> tuple[Tensor, float, float | Tensor, float | Tensor]:
        return state["std"].square().reciprocal(), 1.0, 0.0, 0.0

    def _variance(self, member: Member, state: State) -> Tensor:
        return state["std"].square()

    def update(self, plan: Plan | None) -> None:
        """Steps along the gradients of the ELBO."""
        if plan is not None:
            plan.take_out()
        for member in self.members:
            folded = self._folded.pop(member.p, None)
            if folded is None:
                continue
            state = self.state_of(member)
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
            self.count_unusable((~usable).sum())


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
class BBVI(VariationalOptimizer):
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

    structure = MeanAndStd

    def __init__(self, params: ParamsT, lr: float | Tensor = 0.01, **hyperparameters: Unpack[BBVIArguments]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse_sharded_parameters(group, "BBVI")

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return NoiseProduct()


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

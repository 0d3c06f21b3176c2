"""Leave-one-out from a posterior: what would be otherwise without an example, with no training again.

The posterior N(μ, P⁻¹) minimizes Σᵢ cᵢℓᵢ(θ) + prior in the variational sense, cᵢ = 1/τ for a plain mean
(:mod:`vprop.posterior._examples`). Near μ example i has the gradient gᵢ = Jᵀe and the curvature JᵀΛJ, so the natural
parameters P and Pμ hold cᵢJᵀΛJ and cᵢ(JᵀΛJμ − Jᵀe) of it. Taken out,

    (P − cᵢJᵀΛJ)(μ' − μ) = cᵢJᵀe            and, with Σ = P⁻¹ and S = JΣJᵀ the covariance of its outputs (Woodbury),

    μ' − μ = ΣJᵀa,   a = cᵢ(I − cᵢΛS)⁻¹e        change of the weights
    f' − f = Sa                               change of its own outputs
    ‖μ' − μ‖²_P = aᵀSa                          in units of the posterior's standard deviation
    ℓᵢ(f') − ℓᵢ(f)                            change of its own loss

so all that is needed of a structure is a product with Σ. For a linear model with Gaussian noise v this is exact: cS/v
is the leverage h and f' − y = (f − y)/(1 − h). The eigenvalues of cᵢΛS are leverages too, between 0 and 1 where P holds
the example; those above 0.999 (P is an estimate) count as 0.999. A diagonal Σ has no correlations, and S from it no
meaning as a share of 1, so that there the first-order a = cᵢe is used: sizes are then rough, and ranks are what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.checks import invalid, is_number
from vprop.objective import LossFunction
from vprop.posterior._examples import ExampleReader, Examples, losses_of
from vprop.precision import widest

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

MOST_LEVERAGE = 0.999
"""An example that decides its own outputs alone would change them without bound."""


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """What would change without each example. Tensors have the examples first, in the order of the data."""

    weight_change: Tensor
    """‖μ' − μ‖ in the posterior's metric: 1 is one standard deviation."""
    loss_change: Tensor
    """How much larger the example's own loss would be: what the model learned of it from itself alone."""
    loss: Tensor
    """The example's loss at the posterior mean."""
    leverage: Tensor | None = None
    """The largest eigenvalue of cᵢΛS, the example's share in its own prediction; none with a diagonal posterior."""
    prediction_change: Tensor | None = None
    """f' − f, in the shape of the outputs; none with ``method="gradient"``."""
    changes_at: Tensor | None = None
    """f' − f at the inputs given as ``at``: (examples, inputs, outputs)."""

    @property
    def leave_one_out_loss(self) -> Tensor:
        """The loss of each example without it. Its mean estimates the loss of new examples."""
        return self.loss + self.loss_change

    @property
    def indices(self) -> Tensor:
        """Numbers of the examples, the one that changes the weights most first."""
        return self.top(len(self))

    def top(self, count: int, by: str = "weight_change") -> Tensor:
        """Numbers of the ``count`` examples with the largest ``by``: "weight_change", "loss_change", "loss", …"""
        if not is_number(count, whole=True) or count < 0:
            raise invalid("count", count, "an integer >= 0", "It is how many examples are named.")
        values = getattr(self, by, None) if isinstance(by, str) else None
        if not isinstance(values, Tensor) or values.shape != self.weight_change.shape:
            raise invalid("by", by, "an attribute with one number per example", "'weight_change' is the default.")
        return values.argsort(descending=True, stable=True)[:count]

    def __len__(self) -> int:
        return len(self.weight_change)

    def __repr__(self) -> str:
        first = int(self.indices[0]) if len(self) else None
        return f"Sensitivity({len(self)} examples, most of all example {first})"


@torch.no_grad()
def measure(posterior: Posterior, data: Any, loss_fn: LossFunction | None, at: Any, **arguments: Any) -> Sensitivity:
    """See :meth:`vprop.Posterior.sensitivity`."""
    reader = ExampleReader(posterior, data, loss_fn, where="sensitivity", **arguments)
    elsewhere = None if at is None else _covariance_with(posterior, reader.jacobians(at))
    parts = reader.over(lambda chunks: [_without_each(posterior, examples, elsewhere) for examples in chunks])
    columns: dict[str, Any] = {}
    for name in ("weight_change", "loss_change", "loss", "leverage", "prediction_change", "changes_at"):
        values = [getattr(part, name) for part in parts]
        columns[name] = None if any(value is None for value in values) else torch.cat(values)
    return Sensitivity(**columns)


def _covariance_with(posterior: Posterior, jacobians: Tensor) -> Tensor:
    """ΣJᵀ for all outputs of other inputs, as (inputs, outputs, weights)."""
    return posterior._covariance_times(widest(jacobians.flatten(0, 1))).view(jacobians.shape)


def _without_each(posterior: Posterior, examples: Examples, elsewhere: Tensor | None) -> Sensitivity:
    rows = widest(examples.rows)
    products = posterior._covariance_times(rows.flatten(0, 1)).view_as(rows)
    covariance = (rows @ products.mT).double().cpu()  # S, one small matrix for each example
    gradient, curvature, factors = (t.cpu() for t in (examples.gradient, examples.curvature, examples.factors))
    covariance = (covariance + covariance.mT) / 2
    corrected = posterior.correlated and examples.outputs is not None
    change, leverage = _solved(gradient, curvature, covariance, factors, corrected)
    outputs_change = (covariance @ change[..., None])[..., 0]
    weight_change = (change * outputs_change).sum(1).clamp_min(0).sqrt()
    at = None
    if elsewhere is not None:
        direction = torch.einsum("eow,eo->ew", rows, change.to(rows))
        at = torch.einsum("ew,iow->eio", direction, elsewhere.to(rows)).double().cpu()
    if examples.outputs is None:
        # To first order the loss changes along its gradient, which is the one row.
        return Sensitivity(weight_change, outputs_change[:, 0], examples.losses.cpu(), leverage, None, at)
    outputs = examples.outputs
    moved = losses_of(
        examples.loss_fn, outputs + outputs_change.to(outputs), examples.targets, examples.output_shape
    ).cpu()
    losses = losses_of(examples.loss_fn, outputs, examples.targets, examples.output_shape).cpu()
    prediction_change = outputs_change.view(-1, *examples.output_shape)
    return Sensitivity(weight_change, moved - losses, losses, leverage, prediction_change, at)


def _solved(
    gradient: Tensor, curvature: Tensor, covariance: Tensor, factors: Tensor, correlated: bool
) -> tuple[Tensor, Tensor | None]:
    """a of every example, and its largest leverage.

    With R = Λ^½ and the leverages in A = cRSR, (I − cΛS)⁻¹ = I + cR(I − A)⁻¹RS: symmetric, and A can be bounded.
    """
    if not correlated:
        return factors[:, None] * gradient, None
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    root = vectors @ (values.clamp_min(0).sqrt()[..., None] * vectors.mT)
    leverages, directions = torch.linalg.eigh(factors[:, None, None] * root @ covariance @ root)
    inverse = directions @ ((1 - leverages.clamp(0, MOST_LEVERAGE)).reciprocal()[..., None] * directions.mT)
    correction = root @ inverse @ root @ covariance @ gradient[..., None]
    change = factors[:, None] * (gradient + factors[:, None] * correction[..., 0])
    return change, leverages[:, -1].clamp_min(0)

"""A posterior without the contribution of some examples.

In the notation of :mod:`vprop.posterior._examples` the examples add Σᵢ cᵢJᵀΛJ to the precision P, and to Pμ they add
Σᵢ cᵢ(JᵀΛJμ − Jᵀe). Without them

    P' = P − Σᵢ cᵢJᵢᵀΛᵢJᵢ,        μ' = μ + P'⁻¹ Σᵢ cᵢJᵢᵀeᵢ,        ess' = ess − Σᵢ cᵢ

For a linear model with Gaussian noise these contributions are what the examples added, wherever μ is, so the result is
the posterior of the other examples. Elsewhere J, e and Λ are those at μ: it is the first step of Newton's method
towards that posterior. A diagonal posterior loses the diagonal of the curvature, and its step has no correlations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.objective import LossFunction
from vprop.posterior._examples import ExampleReader, Examples
from vprop.precision import widest

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


@torch.no_grad()
def forget(posterior: Posterior, data: Any, loss_fn: LossFunction | None, **arguments: Any) -> Posterior:
    """See :meth:`vprop.Posterior.forget`."""
    reader = ExampleReader(posterior, data, loss_fn, where="forget", **arguments)
    assert posterior.ess is not None
    curvature, gradient, removed = reader.over(lambda chunks: _contributions(posterior, chunks))
    if removed >= posterior.ess * (1 - 1e-9):
        raise ValueError(
            f"forget(data): the examples count {removed:g}, which is all of the posterior's effective sample size "
            f"{posterior.ess:g} or more. Without any data there is the prior: posterior.prior."
        )
    return posterior._without(curvature, gradient, posterior.ess - removed)


def _contributions(posterior: Posterior, chunks: Iterable[Examples]) -> tuple[Tensor, Tensor, float]:
    """Σᵢ cᵢJᵢᵀΛᵢJᵢ as the structure keeps it, Σᵢ cᵢJᵢᵀeᵢ, and what the examples count in ess."""
    curvature: Tensor | None = None
    gradient: Tensor | None = None
    removed = 0.0
    for examples in chunks:
        rows = widest(examples.rows)
        values, vectors = torch.linalg.eigh(examples.curvature)
        roots = (values.clamp_min(0) * examples.factors[:, None]).sqrt()[..., None] * vectors.mT
        added = posterior._curvature_of((roots.to(rows) @ rows).flatten(0, 1))
        slopes = examples.factors[:, None] * examples.gradient
        slope = torch.einsum("eow,eo->w", rows, slopes.to(rows))
        curvature = added if curvature is None else curvature + added
        gradient = slope if gradient is None else gradient + slope
        removed += float(examples.factors.sum()) * posterior.scales.variance
    assert curvature is not None
    assert gradient is not None
    return curvature, gradient, removed


def lost_positivity(lowest: float, where: str) -> ValueError:
    """The error for a precision that holds less than is to be taken out of it."""
    return ValueError(
        f"forget(data): without these examples the precision would not be positive {where} (lowest {lowest:.3g}): the "
        "posterior holds less curvature than they have now. Were they part of its training data, with this loss? "
        "Forget fewer at a time, train longer, or use an optimizer with the curvature of the examples (VON, VOGN)."
    )

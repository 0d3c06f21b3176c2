"""The variational optimizers of a Trainer or of a checkpoint, and what there is to log of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vprop.optim import VariationalOptimizer
from vprop.parallel.sharding import sums


def variational(optimizers: Any) -> list[VariationalOptimizer]:
    """Those of ours."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, VariationalOptimizer)]


def variational_of(optimizers: Any, model: nn.Module) -> list[VariationalOptimizer]:
    """Those of ours whose parameters are all the model's."""
    owned = {id(p) for p in model.parameters()}
    return [
        optimizer
        for optimizer in variational(optimizers)
        if all(id(p) in owned for group in optimizer.param_groups for p in group["params"])
    ]


def from_checkpoint(pl_module: Any, states: list[dict[str, Any]]) -> list[Optimizer]:
    """The module's optimizers, made anew, as they were when a checkpoint was saved."""
    optimizers = list(_optimizers_in(pl_module.configure_optimizers()))
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return optimizers


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """All optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from _optimizers_in(part)


@torch.no_grad()
def summary(optimizer: VariationalOptimizer, model: nn.Module) -> dict[str, float]:
    """Curvature, KL and noise of the posterior, averaged over all weights that have made a step."""
    marginals = [marginal for marginal in optimizer.marginals() if marginal.steps > 0]
    count = sum(marginal.mean.numel() for marginal in marginals)
    if count == 0:
        return {}
    known = [marginal.hess for marginal in marginals if marginal.hess is not None]
    curvature = sum(sums(known)) if len(known) == len(marginals) else math.nan
    variance = sum(sums([marginal.variance for marginal in marginals]))
    squared_weights = sum(sums([marginal.mean.square() for marginal in marginals]))
    values = {
        "curvature": curvature / count,
        "noise": math.sqrt(variance / count),
        "noise_to_weights": math.sqrt(variance / squared_weights) if squared_weights > 0 else math.inf,
    }
    sizes = {group["num_data"] for group in optimizer.param_groups}
    kl = _kl(optimizer, model)
    if kl is not None:
        values["kl"] = kl
        if len(sizes) == 1:
            values["kl_per_example"] = kl / sizes.pop()
    return values


def _kl(optimizer: VariationalOptimizer, model: nn.Module) -> float | None:
    """KL(q ‖ prior) in nats: NaN for a posterior that is not finite, ``None`` where it is infinite by design."""
    if any(_is_flat(group["prior_precision"]) for group in optimizer.param_groups):
        return None
    try:
        return float(optimizer.posterior(model).kl())
    except FloatingPointError:
        return math.nan


def _is_flat(precision: float | list[Tensor] | Tensor) -> bool:
    """Whether a prior says nothing of some weight; one with correlations, a matrix, says something of all."""
    if isinstance(precision, list):
        return sum(sums([tensor == 0 for tensor in precision])) > 0
    return not isinstance(precision, Tensor) and precision == 0

"""ĥ = mean over examples of squared per-example gradients: the Gauss–Newton diagonal of VOGN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from vprop.curvature._base import ObservedAverage
from vprop.noise import Draw
from vprop.objective import Objective


class PerExampleGaussNewton(ObservedAverage):
    """The mean over the mini-batch (and over samples) of the squared gradients of single examples.

    Unbiased, also with mini-batches, for E_q of the empirical Fisher diagonal of the data. Where the model is right
    (labels as if drawn from it) that is the Fisher, the Gauss–Newton diagonal; it is never negative.

    ``chunk_size`` examples are differentiated at a time, so memory is bounded by that many gradients.
    """

    def __init__(self, chunk_size: int = 32) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """Mean of squared per-example gradients at the weights in the model."""
        _refuse_batchnorm(objective.model)
        weights = {name: p.detach() for name, p in parameters.items()}

        def loss_of_one(weights: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            x, y = tree_map(_as_batch_of_one, (x, y))
            return objective.loss_at(weights, x, y)

        in_dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, (objective.x, objective.y))
        gradients = vmap(grad_and_value(loss_of_one), in_dims=(None, *in_dims), randomness="different")
        totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        counted = 0
        for first in range(0, objective.batch_size, self.chunk_size):
            chunk = slice(first, first + self.chunk_size)
            x, y = tree_map(lambda t, chunk=chunk: t[chunk] if isinstance(t, Tensor) else t, (objective.x, objective.y))
            with torch.no_grad():  # parameters outside `weights` would tie all chunks into one graph
                rows, losses = gradients(weights, x, y)
            # The loss of an example whose label is ignored is 0/0: it is not part of the mean.
            counted += int((~losses.isnan()).sum())
            for name, values in rows.items():
                totals[name] += values.square().sum(0)
        return [total / max(1, counted) for total in totals.values()]


def _as_batch_of_one(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf


def _refuse_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name!r} is a {type(module).__name__} in training mode (or without running statistics), which mixes "
                "the examples of a batch, so that no example has a gradient of its own. Put it in evaluation mode "
                "(module.eval()), or use GroupNorm or LayerNorm, or an optimizer that needs no per-example gradients "
                "(Vprop)."
            )

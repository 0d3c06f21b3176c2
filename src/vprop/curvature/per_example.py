"""ĥ = mean over examples of squared per-example gradients: the Gauss–Newton diagonal of VOGN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vprop.curvature._base import ObservedAverage
from vprop.curvature._mean_check import MeanCheck
from vprop.curvature._single_examples import squared_gradients
from vprop.likelihood.terms import LossWatch
from vprop.noise import Draw
from vprop.objective import Objective
from vprop.precision import compute_dtype

NUMBERS_AT_A_TIME = 1 << 25
"""Gradients of a chunk of examples, unless somebody says how many examples: 128 MiB in float32."""
_LEAST_WEIGHT = 1e-30
"""Where nothing counts, nothing is divided by this."""


class PerExampleGaussNewton(ObservedAverage):
    """The mean over the mini-batch (and over samples) of the squared gradients of single examples.

    With ℓᵢ the loss of a batch of one, the loss is ℓ = Σᵢ wᵢℓᵢ / Σᵢ wᵢ and ĥ = Σᵢ wᵢ(∇ℓᵢ)² / Σᵢ wᵢ: ∇²ℓ is that mean of
    the ∇²ℓᵢ. w is 1 in a plain mean, the weight of the class in ``cross_entropy`` with weights, 0 for an example
    whose label is ignored, and the number of targets that count where an example has several (which are taken as one
    with their mean loss). A loss that is no such mean of its examples', a sum or one in which they meet, is refused.

    Unbiased, also with mini-batches, for E_q of the empirical Fisher diagonal of the data. Where the model is right
    (labels as if drawn from it) that is the Fisher, the Gauss–Newton diagonal; it is never negative.

    ``chunk_size`` examples are differentiated at a time, so memory is bounded by that many gradients and activations;
    ``None`` takes as many as make 2²⁵ numbers of gradients, and at least 32. Linear layers, convolutions and
    embeddings take about one more ordinary pass; what else a model does with a weight takes a copy of the weight for
    each of these examples.
    """

    def __init__(self, chunk_size: int | None = None) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    @torch.enable_grad()
    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """Mean of squared per-example gradients at the weights in the model."""
        refuse_batchnorm_without_statistics(objective.model)
        weights = {name: p.detach() for name, p in objective.model.named_parameters()}
        wanted = {name: weights.pop(name) for name in parameters}

        def loss_of_one(copies: dict[str, Tensor], x: Any, y: Any) -> tuple[Tensor, Tensor]:
            x, y = tree_map(_as_batch_of_one, (x, y))
            with LossWatch() as watch:
                loss = objective.loss_at(weights | copies, x, y)
            return loss, weight_of_one(watch, loss)

        totals = {name: torch.zeros_like(p, dtype=compute_dtype(p)) for name, p in wanted.items()}
        check = MeanCheck(objective)
        size = self.chunk_size or max(32, NUMBERS_AT_A_TIME // max(1, sum(p.numel() for p in wanted.values())))
        for first in range(0, objective.batch_size, size):
            chunk = slice(first, first + size)
            x, y = tree_map(lambda t, chunk=chunk: t[chunk] if isinstance(t, Tensor) else t, (objective.x, objective.y))
            squares = squared_gradients(loss_of_one, wanted, x, y)
            for name, total in squares.sums.items():
                totals[name] += total
            check.take_in(squares.losses, squares.weights)
        check.require_mean(weights | wanted)
        return [total / check.weight.to(total).clamp_min(_LEAST_WEIGHT) for total in totals.values()]


def weight_of_one(watch: LossWatch, loss: Tensor) -> Tensor:
    """w of an example: what its own mean is over; 1 where that is not seen, and 0 where the loss is 0/0."""
    terms = watch.terms_of(loss)
    return ((~loss.isnan()) if terms is None else terms).detach().to(loss.dtype)


def _as_batch_of_one(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf


def refuse_batchnorm_without_statistics(model: nn.Module, *, in_training_mode: bool = True) -> None:
    """Refuse a model in which the examples of a batch meet; unless it will run in evaluation mode, by its mode now."""
    for name, module in model.named_modules():
        meets = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if meets and ((in_training_mode and module.training) or module.running_mean is None):
            raise ValueError(
                f"{name!r} is a {type(module).__name__} in training mode (or without running statistics), which mixes "
                "the examples of a batch, so that no example has a gradient of its own. Put it in evaluation mode "
                "(module.eval()), or use GroupNorm or LayerNorm, or an optimizer that needs no per-example gradients "
                "(Vprop)."
            )

"""ĥ = diag ∇²ℓ(θ), or Ĥ = ∇²ℓ(θ): the exact Hessian of the mini-batch at the sample. CVI and VON.

Computed by differentiating the gradient once more, a chunk of rows at a time, so that memory is bounded by the chunk
and not by the number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vprop.curvature._base import ObservedAverage
from vprop.curvature._linear_layers import linear_layers_of, second_derivatives, single_layer_hessian
from vprop.curvature._second_derivatives import backward_directions, detached_copies, differentiable_gradients
from vprop.noise import Draw
from vprop.objective import Objective


class HessianDiagonal(ObservedAverage):
    """The mean over samples of the Hessian's diagonal: unbiased for E_q[diag ∇²ℓ], also with mini-batches.

    A row of the Hessian costs about two gradients, so in general a diagonal costs twice as many as there are
    parameters. In a chain of linear layers and elementwise functions the second derivative in a weight is that in its
    output unit times the squared input, so that one row per *unit* is enough; such models are recognised.

    ``chunk_size`` rows are computed at a time.
    """

    signed = True

    def __init__(self, chunk_size: int | None = None) -> None:
        super().__init__()
        self.chunk_size = 32 if chunk_size is None else chunk_size

    @torch.enable_grad()
    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """diag ∇²ℓ at the weights in the model, in the shapes of the parameters."""
        layers = linear_layers_of(objective)
        if layers is not None and set(parameters) <= set(layers.parameter_names):
            diagonals = second_derivatives(objective, layers, self.chunk_size)
            return [diagonals[name] for name in parameters]
        weights = detached_copies(parameters)
        grads = differentiable_gradients(objective, weights)
        diagonal = []
        for weight, grad in zip(weights.values(), grads, strict=True):
            pieces = [rows.diagonal(first) for first, rows in _rows(grad.flatten(), [weight], self.chunk_size)]
            diagonal.append(torch.cat(pieces).view_as(weight) if pieces else torch.zeros_like(weight))
        return diagonal


class Hessian(ObservedAverage):
    """The mean over samples of the Hessian over all parameters: unbiased for E_q[∇²ℓ], also with mini-batches.

    A row costs about two gradients. A model that is one linear layer needs one per output unit only.
    """

    signed = True

    def __init__(self, chunk_size: int | None = None) -> None:
        super().__init__(torch.outer)
        self.chunk_size = 32 if chunk_size is None else chunk_size

    @torch.enable_grad()
    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """∇²ℓ at the weights in the model, each parameter's block of rows."""
        sizes = [p.numel() for p in parameters.values()]
        layers = linear_layers_of(objective)
        if layers is not None and len(layers.layers) == 1 and list(parameters) == layers.parameter_names:
            return list(single_layer_hessian(objective, layers, self.chunk_size).detach().split(sizes))
        weights = detached_copies(parameters)
        grads = differentiable_gradients(objective, weights)
        flat = torch.cat([grad.flatten() for grad in grads])
        matrix = flat.new_empty(len(flat), len(flat))
        for first, rows in _rows(flat, list(weights.values()), self.chunk_size):
            matrix[first : first + len(rows)] = rows
        matrix = (matrix + matrix.T) / 2  # a rounding apart
        return list(matrix.split(sizes))


def _rows(grad: Tensor, weights: list[Tensor], chunk_size: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first row, rows of ∂grad/∂weights), a chunk at a time."""
    for first in range(0, len(grad), chunk_size):
        count = min(chunk_size, len(grad) - first)
        directions = torch.zeros(count, len(grad), dtype=grad.dtype, device=grad.device)
        directions.diagonal(first).fill_(1)
        blocks = backward_directions(grad, weights, directions)
        yield first, torch.cat([block.reshape(count, -1) for block in blocks], dim=1)

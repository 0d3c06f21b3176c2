"""The exact Hessian diagonal of a chain of linear layers, from second derivatives in the layers' outputs.

In z = Wa + b the weight Wᵢⱼ enters through zᵢ alone, and linearly, so ∂²ℓ/∂Wᵢⱼ² = aⱼ²·∂²ℓ/∂zᵢ² for one example, and
the mean over examples for the batch. This is exact, and takes one second derivative per unit instead of one per
weight. It holds when a weight is used once for each example and examples do not meet: not with BatchNorm, nor with
weights that are shared between positions or layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vprop.calling import call_model
from vprop.curvature._second_derivatives import backward_directions
from vprop.objective import Objective

_PER_EXAMPLE = (
    nn.Identity, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Softsign, nn.LogSigmoid, nn.Hardtanh,
)  # fmt: skip
"""Modules that treat each example by itself and keep a matrix a matrix."""


def _treats_examples_alone(module: nn.Module) -> bool:
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return module.dim in (1, -1)
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    return type(module) in _PER_EXAMPLE


@dataclass
class LinearLayers:
    """The linear layers of a chain, with the names of their parameters."""

    layers: list[tuple[str, nn.Linear]]

    @property
    def parameter_names(self) -> list[str]:
        """Names of all weights and biases."""
        return [_join(prefix, name) for prefix, layer in self.layers for name, _ in layer.named_parameters()]


def linear_layers_of(objective: Objective) -> LinearLayers | None:
    """The linear layers if the model is a chain of them and elementwise functions, and its input is a matrix.

    The loss must be a mean over examples, which is known of torch's own and of those whose likelihood is given.
    """
    if not isinstance(objective.x, Tensor) or objective.x.dim() != 2 or objective.likelihood is None:
        return None
    layers: list[tuple[str, nn.Linear]] = []
    for name, module in objective.model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear:
            layers.append((name, module))
        elif type(module) is not nn.Sequential and not _treats_examples_alone(module):
            return None
        if module._forward_hooks or module._forward_pre_hooks:
            return None  # a hook may do anything
    parameters = [p for _, layer in layers for p in layer.parameters()]
    all_parameters = list(objective.model.named_parameters(remove_duplicate=False))
    alone = len({id(p) for p in parameters}) == len(parameters) == len(all_parameters)
    return LinearLayers(layers) if alone and layers else None


def second_derivatives(objective: Objective, chain: LinearLayers, chunk_size: int) -> dict[str, Tensor]:
    """diag ∇²ℓ by parameter name, at the weights in the model."""
    diagonals = {}
    for (prefix, layer), (a, z, slope) in zip(chain.layers, _passes(objective, chain), strict=True):
        curvature = torch.zeros_like(z)
        for units, rows in _unit_rows(slope, z, chunk_size):
            curvature[:, units] = rows[torch.arange(len(units), device=rows.device), :, units].T
        diagonals[_join(prefix, "weight")] = curvature.T @ a.square()
        if layer.bias is not None:
            diagonals[_join(prefix, "bias")] = curvature.sum(0)
    return diagonals


def single_layer_hessian(objective: Objective, chain: LinearLayers, chunk_size: int) -> Tensor:
    """∇²ℓ over weight and bias of a model with one linear layer, a generalised linear model.

    ∂²ℓ/∂Wᵢₐ∂Wⱼᵦ is the mean over examples of aₐaᵦ·∂²ℓ/∂zᵢ∂zⱼ: products of matrices instead of a row per weight.
    """
    (_, layer), ((a, z, slope),) = chain.layers[0], _passes(objective, chain)
    if layer.bias is not None:
        a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
    units, inputs = z.shape[1], a.shape[1]
    hessian = a.new_zeros(units, inputs, units, inputs)
    for chosen, rows in _unit_rows(slope, z, chunk_size):
        for i, row in zip(chosen.tolist(), rows, strict=True):
            for j in range(units):
                hessian[i, :, j] = (a * row[:, j : j + 1]).T @ a
    # From (unit, input) order, the bias being the last input, to all weights and then all biases.
    order = torch.arange(units * inputs, device=a.device).view(units, inputs)
    if layer.bias is not None:
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    order = order.flatten()
    return hessian.view(len(order), len(order))[order[:, None], order]


def _passes(objective: Objective, chain: LinearLayers) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Input a, output z and slope ∂ℓ/∂z of every linear layer, with the graph from z to the slope."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(args[0].detach())
        # A leaf's second derivatives can be asked for even where nothing before it needs a gradient.
        outputs.append(output if output.requires_grad else output.requires_grad_())
        return outputs[-1].clone()  # what comes next may write in place

    handles = [layer.register_forward_hook(record) for _, layer in chain.layers]
    try:
        loss = objective.loss_fn(call_model(objective.model, objective.x), objective.y)
    finally:
        for handle in handles:
            handle.remove()
    slopes = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
    return list(zip(inputs, outputs, slopes, strict=True))


def _unit_rows(slope: Tensor, z: Tensor, chunk_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(units i, ∂²ℓ/∂zᵢ∂z for every example), a chunk of units at a time.

    All examples go at once: one's slope does not depend on another's z.
    """
    for first in range(0, z.shape[1], chunk_size):
        units = torch.arange(first, min(first + chunk_size, z.shape[1]), device=z.device)
        directions = torch.zeros(len(units), *z.shape, dtype=z.dtype, device=z.device)
        directions[torch.arange(len(units), device=z.device), :, units] = 1
        (rows,) = backward_directions(slope, [z], directions)
        yield units, rows


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

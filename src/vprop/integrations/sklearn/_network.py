"""Several multilayer perceptrons of one shape, side by side in one module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "identity": nn.Identity,
}


class StackedLinear(nn.Module):
    """One linear layer for each member: (rows, inputs) or (members, rows, inputs) to (members, rows, outputs).

    On small networks a step costs the same for one member as for a few, because starting an operation costs more than
    carrying it out.
    """

    def __init__(self, members: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        # The scale of torch's own linear layers, from a generator that is nobody else's.
        bound = 1 / math.sqrt(inputs)
        weight = torch.rand(members, inputs, outputs, generator=generator, dtype=torch.float64, device="cpu")
        bias = torch.rand(members, 1, outputs, generator=generator, dtype=torch.float64, device="cpu")
        self.weight = nn.Parameter(bound * (2 * weight - 1))
        self.bias = nn.Parameter(bound * (2 * bias - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of all members."""
        if x.dim() == 2:
            x = x.expand(self.weight.shape[0], *x.shape)
        return torch.baddbmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        """Its sizes."""
        members, inputs, outputs = self.weight.shape
        return f"members={members}, inputs={inputs}, outputs={outputs}"


def make_network(
    members: int, inputs: int, hidden: Sequence[int], outputs: int, activation: str, seed: int
) -> nn.Sequential:
    """``members`` networks in float64, each from its own initial weights."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [StackedLinear(members, inputs, int(size), generator), ACTIVATIONS[activation]()]
        inputs = int(size)
    layers.append(StackedLinear(members, inputs, outputs, generator))
    return nn.Sequential(*layers)

"""Weights and gradients that all contenders work on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROW = 256


def even(size: int) -> int:
    """A size as those of real layers are: a multiple of ``ROW`` or of 4, where that changes little.

    >>> even(8391667), even(10_001), even(33)
    (8391424, 10000, 33)
    """
    for multiple in (ROW, 4):
        if size >= 100 * multiple:
            return size - size % multiple
    return size


class Tensors:
    """The same storage for all contenders, in parameters that are new for each."""

    def __init__(self, params: float, tensors: int, device: torch.device) -> None:
        self.size = even(max(1, round(params / tensors)))
        self.count = tensors
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        self.grads = [
            torch.empty(self.size, device=device).normal_(0, 1e-3, generator=generator) for _ in range(tensors)
        ]
        self.weights = [torch.empty_like(grad) for grad in self.grads]
        self.fill()

    @property
    def numel(self) -> int:
        """How many parameters there are."""
        return self.size * self.count

    def fill(self) -> None:
        """Weights of a usual size. From the gradients, which is cheaper than a generator."""
        for weight, grad in zip(self.weights, self.grads, strict=True):
            torch.mul(grad, 20, out=weight)

    def parameters(self) -> list[nn.Parameter]:
        """New parameters on the shared storage, with their gradients."""
        self.fill()
        params = [nn.Parameter(weight) for weight in self.weights]
        give(params, self.grads)
        return params


def give(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    """Put gradients into their place, as a backward would."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


class Holder(nn.Module):
    """A model whose forward does nothing: what ``attach`` hooks into."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self) -> float:
        """A result, so that the hooks see a forward that went well."""
        return 0.0

"""Weights and gradients that all contenders work on."""

from __future__ import annotations

import torch
from torch import nn

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
        self.numel = self.size * self.count
        generator = torch.Generator(device).manual_seed(0)
        self.grads = [
            torch.empty(self.size, device=device).normal_(0, 1e-3, generator=generator) for _ in range(tensors)
        ]
        self.weights = [20 * grad for grad in self.grads]  # of a usual size, and cheaper than a generator

    def parameters(self) -> list[nn.Parameter]:
        """New parameters on the shared storage, with their first values, and gradients as after a backward."""
        params = []
        for weight, grad in zip(self.weights, self.grads, strict=True):
            torch.mul(grad, 20, out=weight)
            params.append(nn.Parameter(weight))
            params[-1].grad = grad
        return params


class Holder(nn.Module):
    """A model whose forward does nothing: what ``attach`` hooks into."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self) -> float:
        """A result, so that the hooks see a forward that went well."""
        return 0.0

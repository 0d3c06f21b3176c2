"""Networks for images that people know the figures of."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "frn"]


class FilterResponseNorm(nn.Module):
    """y = γ·x/√(ν+ε) + β, ν the mean of x² over a channel's pixels (Singh and Krishnan, 2020): no other example counts.

    In 32 bits, whatever the rest runs in: the square of a large activation does not fit into 16.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape and the type that it is given."""
        wide = x.float()
        scale = wide.square().mean((2, 3), keepdim=True).add(self.eps).rsqrt()
        return (self.weight * (wide * scale) + self.bias).to(x.dtype)


class ThresholdedLinear(nn.Module):
    """max(x, τ) with a learned τ for each channel, which goes with FilterResponseNorm in place of ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return torch.maximum(x, self.threshold.to(x.dtype))


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else FilterResponseNorm(channels)


def _activation(kind: Norm, channels: int) -> nn.Module:
    return nn.ReLU() if kind == "batch" else ThresholdedLinear(channels)


class Residual(nn.Module):
    """Two convolutions with normalisation, and the input added; dropout, if any, between them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm = "batch", dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm, self.first_activation = _norm(norm, outputs), _activation(norm, outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm, self.second_activation = _norm(norm, outputs), _activation(norm, outputs)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Channels that the input lacks are zero."""
        out = self.dropout(self.first_activation(self.first_norm(self.first(x))))
        out = self.second_norm(self.second(out))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return self.second_activation(out + shortcut)


class ChannelsLast(nn.Sequential):
    """Layers that see images in the order in memory that tensor cores want, and keep it. No weight changes its name."""

    def forward(self, x: Tensor) -> Tensor:
        """Of what ``nn.Sequential`` would say."""
        return super().forward(x.contiguous(memory_format=torch.channels_last))


def resnet20(
    channels: int = 1,
    classes: int = 10,
    *,
    norm: Norm = "batch",
    dropout: float = 0.0,
    width: int = 16,
    blocks: int = 3,
    channels_last: bool = False,
) -> nn.Module:
    """16, 32 and 64 channels, 0.27 million weights, for images of so many ``channels``.

    ``width`` and ``blocks`` make smaller ones: there are 6·``blocks`` + 2 layers.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False),
        _norm(norm, width),
        _activation(norm, width),
    ]
    inputs = width
    for outputs in (width, 2 * width, 4 * width):
        for i in range(blocks):
            layers.append(Residual(inputs, outputs, 2 if i == 0 and outputs > width else 1, norm, dropout))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return (ChannelsLast if channels_last else nn.Sequential)(*layers, nn.Linear(4 * width, classes))

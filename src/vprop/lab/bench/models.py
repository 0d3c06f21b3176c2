"""Models to train end to end: a GPT and a ResNet, in plain torch, with random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSize:
    """Of a decoder-only transformer; the usual values have 124 million parameters."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    context: int = 1024


class _Block(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.join_heads = nn.Linear(size.width, size.width)
        self.before_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(approximate="tanh"), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.join_heads(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """A small language model; the embedding of the tokens is the head, too."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(_Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return F.linear(x, self.tokens.weight)


@dataclass(frozen=True)
class ResNetSize:
    """Of a residual network; the usual values are those of ResNet-50."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    bottleneck: bool = True
    pixels: int = 224
    classes: int = 1000


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = width * 4 if bottleneck else width
        if bottleneck:
            layers = [_conv(inputs, width, 1), nn.ReLU(True), _conv(width, width, 3, stride), nn.ReLU(True)]
            layers.append(_conv(width, self.outputs, 1))
        else:
            layers = [_conv(inputs, width, 3, stride), nn.ReLU(True), _conv(width, width, 3)]
        self.change = nn.Sequential(*layers)
        same = stride == 1 and inputs == self.outputs
        self.shortcut = nn.Identity() if same else _conv(inputs, self.outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.change(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """An image classifier."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        width = size.width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        features = width
        for stage, count in enumerate(size.blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                residual = _Residual(features, width << stage, stride, size.bottleneck)
                blocks.append(residual)
                features = residual.outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(features, size.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Task(nn.Module):
    """A model with one batch of random data: its forward is the loss.

    What is compiled is the network inside; hooks of an optimizer stay outside.
    """

    def __init__(self, net: nn.Module, inputs: Tensor, labels: Tensor, compiled: bool) -> None:
        super().__init__()
        self.net = net
        self.inputs, self.labels = inputs, labels
        call: Callable[..., Any] = torch.compile(net) if compiled else net
        self.run = [call]  # in a list: not a second submodule

    def forward(self) -> Tensor:
        """The mean loss of the batch, in bfloat16 where that pays."""
        device = self.inputs.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self.run[0](self.inputs)
            return F.cross_entropy(logits.flatten(0, -2), self.labels.flatten())


def gpt_task(size: GPTSize, batch: int, device: torch.device, compiled: bool) -> Task:
    """A batch of random tokens."""
    torch.manual_seed(0)
    with device:
        net = GPT(size)
        text = torch.randint(size.vocabulary, (batch, size.context + 1))
    return Task(net, text[:, :-1].contiguous(), text[:, 1:].contiguous(), compiled)


def resnet_task(size: ResNetSize, batch: int, device: torch.device, compiled: bool) -> Task:
    """A batch of random images; channels last on a GPU, where convolutions are faster so."""
    torch.manual_seed(0)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    with device:
        net: nn.Module = ResNet(size)
        net = net.to(memory_format=layout)  # type: ignore[call-overload]
        images = torch.randn(batch, 3, size.pixels, size.pixels).contiguous(memory_format=layout)
        labels = torch.randint(size.classes, (batch,))
    return Task(net, images, labels, compiled)

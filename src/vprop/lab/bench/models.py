"""Models to train end to end: a GPT and a ResNet, in plain torch, with random data."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """A small language model; the embedding of the tokens is the head, too."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        gelu = partial(F.gelu, approximate="tanh")
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return F.linear(self.blocks(x, mask, is_causal=True), self.tokens.weight)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first, second, third = _conv(inputs, width, 1), _conv(width, width, 3, stride), _conv(width, 4 * width, 1)
        self.change = nn.Sequential(first, nn.ReLU(True), second, nn.ReLU(True), third)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else _conv(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.change(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """An image classifier, with as many bottleneck blocks in each of its stages as ``blocks`` says."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        layers = [_conv(3, width, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, padding=1)]
        features = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(_Residual(features, width << stage, 2 if stage > 0 and block == 0 else 1))
                features = 4 * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(images).mean((2, 3)))


class Task(nn.Module):
    """A model with one batch of random data: its forward is the loss."""

    def __init__(self, net: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.net = net
        self.inputs, self.labels = inputs, labels

    def forward(self) -> Tensor:
        """The mean loss of the batch, in bfloat16 where that pays."""
        device = self.inputs.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self.net(self.inputs)
            return F.cross_entropy(logits.flatten(0, -2), self.labels.flatten())


# (layers, heads, width, vocabulary, context), and the sequences in a batch; the usual one has 124 million parameters
GPT_SIZES = {
    "usual": ((12, 12, 768, 50304, 1024), 32),
    "small": ((4, 4, 128, 1024, 128), 8),
    "tiny": ((2, 2, 32, 64, 16), 2),
}
# (blocks, width, classes), pixels and the images in a batch; the usual one is ResNet-50
RESNET_SIZES = {
    "usual": (((3, 4, 6, 3), 64, 1000), 224, 256),
    "small": (((2, 2, 2, 2), 16, 10), 64, 16),
    "tiny": (((1, 1), 8, 10), 32, 2),
}


def gpt_task(size: str, device: torch.device) -> tuple[Task, int]:
    """A batch of random tokens, and how many sequences that is."""
    shape, batch = GPT_SIZES[size]
    vocabulary, context = shape[-2:]
    torch.manual_seed(0)
    with device:
        net = GPT(*shape)
        text = torch.randint(vocabulary, (batch, context + 1))
    return Task(net, text[:, :-1].contiguous(), text[:, 1:].contiguous()), batch


def resnet_task(size: str, device: torch.device) -> tuple[Task, int]:
    """A batch of random images, and how many; channels last on a GPU, where convolutions are faster so."""
    shape, pixels, batch = RESNET_SIZES[size]
    torch.manual_seed(0)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    with device:
        net: nn.Module = ResNet(*shape)
        net = net.to(memory_format=layout)  # type: ignore[call-overload]
        images = torch.randn(batch, 3, pixels, pixels).contiguous(memory_format=layout)
        labels = torch.randint(shape[-1], (batch,))
    return Task(net, images, labels), batch


TASKS = {"gpt": gpt_task, "resnet": resnet_task}

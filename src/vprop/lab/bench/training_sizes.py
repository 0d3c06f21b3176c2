"""How large the models of `vprop bench train` are: usual sizes on a GPU, small ones on a CPU or in a hurry."""

from __future__ import annotations

import torch

from vprop.lab.bench.models import GPTSize, ResNetSize, Task, gpt_task, resnet_task

SMALL_GPT = GPTSize(layers=4, heads=4, width=128, vocabulary=1024, context=128)
TINY_GPT = GPTSize(layers=2, heads=2, width=32, vocabulary=64, context=16)
RESNET_18 = ResNetSize(blocks=(2, 2, 2, 2), bottleneck=False)
SMALL_RESNET = ResNetSize(blocks=(2, 2, 2, 2), width=16, bottleneck=False, pixels=64, classes=10)
TINY_RESNET = ResNetSize(blocks=(1, 1), width=8, bottleneck=False, pixels=32, classes=10)

# (device, in a hurry) → a size, and the examples in a batch
GPT_SIZES = {
    ("cuda", False): (GPTSize(), 32),
    ("cuda", True): (SMALL_GPT, 8),
    ("cpu", False): (SMALL_GPT, 8),
    ("cpu", True): (TINY_GPT, 2),
}
RESNET_SIZES = {
    ("cuda", False): (ResNetSize(), 256),
    ("cuda", True): (RESNET_18, 32),
    ("cpu", False): (SMALL_RESNET, 16),
    ("cpu", True): (TINY_RESNET, 2),
}


def sized_task(model: str, device: torch.device, batch: int | None, compiled: bool, quick: bool) -> tuple[Task, int]:
    """A model with a batch of data, and how many examples that has."""
    if model == "gpt":
        gpt, usual = GPT_SIZES[device.type, quick]
        return gpt_task(gpt, batch or usual, device, compiled), batch or usual
    resnet, usual = RESNET_SIZES[device.type, quick]
    return resnet_task(resnet, batch or usual, device, compiled), batch or usual

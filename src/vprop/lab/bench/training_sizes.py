"""How large the models of `vprop bench train` are: usual sizes on a GPU, small ones on a CPU or in a hurry."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vprop.lab.bench.models import GPTSize, ResNetSize, Task, gpt_task, resnet_task

SMALL_GPT = GPTSize(layers=4, heads=4, width=128, vocabulary=1024, context=128)
TINY_GPT = GPTSize(layers=2, heads=2, width=32, vocabulary=64, context=16)
SMALL_RESNET = ResNetSize(blocks=(2, 2, 2, 2), width=16, bottleneck=False, pixels=64, classes=10)
TINY_RESNET = ResNetSize(blocks=(1, 1), width=8, bottleneck=False, pixels=32, classes=10)


def _gpt(device: torch.device, batch: int | None, compiled: bool, quick: bool) -> tuple[Task, int]:
    size, usual = GPTSize(), 32
    if device.type == "cpu":
        size, usual = (TINY_GPT, 2) if quick else (SMALL_GPT, 8)
    elif quick:
        size, usual = SMALL_GPT, 8
    return gpt_task(size, batch or usual, device, compiled), batch or usual


def _resnet(device: torch.device, batch: int | None, compiled: bool, quick: bool) -> tuple[Task, int]:
    size, usual = ResNetSize(), 256
    if device.type == "cpu":
        size, usual = (TINY_RESNET, 2) if quick else (SMALL_RESNET, 16)
    elif quick:
        size, usual = ResNetSize(blocks=(2, 2, 2, 2), bottleneck=False), 32
    return resnet_task(size, batch or usual, device, compiled), batch or usual


TASKS: dict[str, Callable[[torch.device, int | None, bool, bool], tuple[Task, int]]] = {"gpt": _gpt, "resnet": _resnet}

"""The tasks of ``eigenbasis.py`` that say what a step and its state cost."""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import vprop
from vprop.lab.bench.clock import seconds_per_call
from vprop.lab.bench.models import gpt_task
from vprop.structures.matrices import sides_of


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Of the GPT of 124 million weights, all matrices but the embeddings."""
    return len(shape) == 2 and "tokens" not in name and "positions" not in name


def groups(model: nn.Module, structure: str) -> list[dict[str, Any]]:
    """This structure for the matrices, and a diagonal for embeddings, biases and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (matrices if is_matrix(name, p.shape) else others).append(p)
    return [{"params": matrices, "structure": structure}, {"params": others}]


def step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The time of a training step, over rounds in which the contenders take turns; a round has all refreshes once."""
    device, rounds, per_round = torch.device(arguments.device), 3 if arguments.short else 6, 10
    torch.set_float32_matmul_precision("high")
    contenders: dict[str, tuple[nn.Module, Any]] = {}
    for name in ("AdamW fused", "Vario", "Vario, eigenbasis"):
        task, batch = gpt_task("tiny" if arguments.short else "usual", device)
        if name == "AdamW fused":
            optimizer: Any = torch.optim.AdamW(task.parameters(), lr=1e-4, fused=device.type == "cuda")
        else:
            structure = "eigenbasis" if "eigenbasis" in name else "diagonal"
            facts: dict[str, Any] = {"lr": 1e-4, "num_data": 1_000_000, "batch_size": batch, "basis_every": per_round}
            facts["max_basis_dim"] = arguments.max_basis_dim
            optimizer = vprop.Vario(groups(task, structure), **facts)
        contenders[name] = task, optimizer
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 3):  # the first have refreshes that compute eigenvectors anew
        for name, (task, optimizer) in contenders.items():

            def closure(task: nn.Module = task, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = task()
                loss.backward()
                return loss

            seconds = seconds_per_call(partial(optimizer.step, closure), per_round, device)
            if turn >= 3:
                times[name].append(seconds)
    base = statistics.median(times["AdamW fused"])
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        rows.append({"name": name, "seconds": median, "all": values, "ratio": median / base})
        print(f"{name:20} {1000 * median:.2f} ms, {median / base:.3f} of AdamW's", flush=True)
    return rows


def memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Numbers kept beside the weights of each kind of layer of the GPT, in multiples of its weights, by the limit."""
    task, _ = gpt_task("tiny" if arguments.short else "usual", torch.device("meta"))
    shapes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, p in task.named_parameters():
        key = (name.split(".")[-2] + "." + name.split(".")[-1], tuple(p.shape))
        shapes[key] = shapes.get(key, 0) + 1
    rows = []
    for limit in (0, 768, 1024, 2304, 3072):
        total = beside = 0
        for (name, shape), count in shapes.items():
            size = math.prod(shape)
            sides = sides_of(torch.Size(shape), limit) if is_matrix(name, shape) else ()
            bases = sum(2 * length**2 for _, length in sides)
            total, beside = total + count * size, beside + count * (2 * size + bases)  # h̃ and the momentum
            row = {"limit": limit, "layer": name, "shape": list(shape), "layers": count, "weights": size}
            rows.append(row | {"beside": 2 * size + bases, "ratio": 2 + bases / size})
        rows.append({"limit": limit, "layer": "all", "weights": total, "beside": beside, "ratio": beside / total})
        print(f"max_basis_dim {limit:5}: {beside / total:.2f} times the weights beside them", flush=True)
    return rows

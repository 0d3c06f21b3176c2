"""The tasks of ``eigenbasis.py`` that train networks, and what a step and its state cost."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vprop
from vprop import metrics
from vprop.lab.bench.models import gpt_task
from vprop.lab.data import files
from vprop.lab.deep.data import random_windows
from vprop.lab.deep.gpt import CharacterGPT, next_character_loss
from vprop.lab.deep.networks import resnet20
from vprop.lab.deep.training import flips_and_crops
from vprop.structures.matrices import sides_of

DATA = Path(os.environ.get("VPROP_DATA", "."))
STRUCTURES = ("diagonal", "eigenbasis")


def vario(model: nn.Module, structure: str, *, matrices: Callable[[str, nn.Parameter], bool], **arguments: Any) -> Any:
    """Vario with this structure for the weight matrices, and a diagonal for embeddings, biases and norms."""
    chosen = [p for name, p in model.named_parameters() if matrices(name, p)]
    ids = {id(p) for p in chosen}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": chosen, "structure": structure}, {"params": others}]
    return vprop.Vario([group for group in groups if group["params"]], **arguments)


def schedule(optimizer: Any, lr: float, step: int, steps: int) -> None:
    """A warm-up over a twentieth of the steps, and a cosine to zero."""
    share = min(1.0, (step + 1) / max(1.0, 0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = lr * share


def synchronize(device: torch.device) -> float:
    """The time when all work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Gradients:
    """Forward and backward of one batch; on a GPU as one CUDA graph, which writes the gradients in place."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.model, self.loss, self.x, self.y = model, loss, x.clone(), y.clone()
        self.graph: Any = None
        if x.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            buffers = [buffer.clone() for buffer in model.buffers()]
            with torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
                for _ in range(3):
                    self._backward()
            torch.cuda.current_stream().wait_stream(stream)
            model.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.value = self._backward()
            for buffer, start in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(start)

    def _backward(self) -> Tensor:
        device = self.x.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            value = self.loss(self.model(self.x), self.y)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss; the gradients are in the parameters."""
        self.x.copy_(x)
        self.y.copy_(y)
        if self.graph is None:
            self.model.zero_grad()
            return self._backward()
        self.graph.replay()  # writes the gradients anew: there were none when it was captured
        return self.value


# -- a GPT on characters ---------------------------------------------------------------------------------------------


@torch.no_grad()
def text_losses(model: nn.Module, posterior: Any, text: Tensor, context: int, samples: int) -> tuple[float, float]:
    """Of the next character, at the mean and under the posterior: the log of the mean probability over samples."""
    count = (len(text) - 1) // context
    x = text[: count * context].view(count, context)
    y = text[1 : count * context + 1].view(count, context)
    device = text.device.type

    def log_probs(net: Any) -> Tensor:
        found = []
        for rows in torch.arange(count, device=text.device).split(64):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = net(x[rows])
            found.append(-F.cross_entropy(logits.float().flatten(0, 1), y[rows].flatten(), reduction="none"))
        return torch.cat(found)

    total: Tensor | None = None
    for net in posterior.sampled_models(samples):
        own = log_probs(net)
        total = own if total is None else torch.logaddexp(total, own)
    assert total is not None
    model.eval()
    at_mean = -float(log_probs(model).mean())
    return at_mean, -float((total - math.log(samples)).mean())


def gpt(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both structures at equal steps, and the diagonal once more with the steps that the eigenbasis' time allows.

    With several ``--lr`` the best of each structure is found on the last twentieth of the training text, by a run of
    another seed on the rest.
    """
    short, device = arguments.short, torch.device(arguments.device)
    layers, heads, width = (2, 2, 32) if short else (6, 6, 384)
    batch, steps, samples = (4, 5, 2) if short else (64, 2500, 16)
    context = 16 if short else 256
    torch.set_float32_matmul_precision("high")
    raw = (DATA / "text" / "tinyshakespeare.txt").read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(raw)))}
    text = torch.tensor([letters[letter] for letter in raw], device=device)
    text = text[:4000] if short else text
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def run(structure: str, lr: float, seed: int, steps: int, tuning: bool) -> dict[str, Any]:
        own, judged = (train[: len(train) * 19 // 20], train[len(train) * 19 // 20 :]) if tuning else (train, held_out)
        torch.manual_seed(seed)
        model = CharacterGPT(len(letters), context, layers, width, heads).to(device)
        optimizer = vario(
            model,
            structure,
            matrices=lambda name, p: p.dim() == 2 and not name.startswith(("character.", "place.")),
            lr=lr,
            num_data=len(own),
            batch_size=batch,
            seed=seed,
            max_basis_dim=max(arguments.max_basis_dim, 1536),
        )
        generator = torch.Generator(device).manual_seed(seed)
        gradients = Gradients(model, next_character_loss, *random_windows(own, batch, context, generator))
        started = synchronize(device)
        for step in range(steps):
            schedule(optimizer, lr, step, steps)
            with optimizer.sampled_params():
                gradients(*random_windows(own, batch, context, generator))
            optimizer.step()
        seconds = synchronize(device) - started
        mean, posterior = text_losses(model, optimizer.posterior(model), judged, context, samples)
        row = {"structure": structure, "lr": lr, "seed": seed, "steps": steps, "tuning": tuning}
        row |= {"seconds": seconds, "mean": mean, "posterior": posterior}
        print(row, flush=True)
        return row

    rates = arguments.lr or [2e-3]
    rows, best = [], dict.fromkeys(STRUCTURES, rates[0])
    if len(rates) > 1:
        for structure in STRUCTURES:
            tried = [run(structure, lr, 100, steps, tuning=True) for lr in rates]
            best[structure] = min(tried, key=lambda row: row["posterior"])["lr"]
            rows += tried
    for seed in arguments.seeds:
        pair = [run(structure, best[structure], seed, steps, tuning=False) for structure in STRUCTURES]
        longer = round(steps * max(1.0, pair[1]["seconds"] / pair[0]["seconds"]))
        equal_time = run("diagonal", best["diagonal"], seed, longer, tuning=False) | {"equal_time": True}
        rows += [*pair, equal_time]
    return rows


# -- ResNet-20 on CIFAR-10 -------------------------------------------------------------------------------------------


def normalized(images: Tensor, device: torch.device) -> Tensor:
    """Images of mean 0 and variance 1."""
    x = images.to(device).float() / 255
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)))
    return (x - mean) / std


def resnet(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy, log-loss and calibration error of both structures, at the mean and of the posterior."""
    short, device = arguments.short, torch.device(arguments.device)
    epochs, batch, samples = (1, 8, 2) if short else (40, 128, 32)
    torch.set_float32_matmul_precision("high")
    if short:
        x, y = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
        train, test = (x, y), (x, y)
    else:
        train, test = ((normalized(x, device), y.to(device)) for x, y in files.cifar10(None))

    def run(structure: str, lr: float, seed: int, tuning: bool) -> dict[str, Any]:
        x, y = train
        judged = test
        if tuning:
            (x, judged_x), (y, judged_y) = (t.split([len(t) * 9 // 10, len(t) - len(t) * 9 // 10]) for t in train)
            judged = judged_x, judged_y
        torch.manual_seed(seed)
        model = resnet20(3).to(device)
        optimizer = vario(
            model,
            structure,
            matrices=lambda name, p: p.dim() > 1,
            lr=lr,
            num_data=len(x),
            batch_size=batch,
            seed=seed,
            max_basis_dim=arguments.max_basis_dim,
        )
        generator = torch.Generator(device).manual_seed(seed)
        change = flips_and_crops(generator)
        model.train()
        gradients = Gradients(model, F.cross_entropy, x[:batch], y[:batch])
        batches, step = len(x) // batch, 0
        started = synchronize(device)
        for _ in range(epochs):
            order = torch.randperm(len(x), generator=generator, device=device)
            for rows in order[: batches * batch].split(batch):
                schedule(optimizer, lr, step, epochs * batches)
                step += 1
                with optimizer.sampled_params():
                    gradients(change(x[rows]), y[rows])
                optimizer.step()
        seconds = synchronize(device) - started
        row: dict[str, Any] = {"structure": structure, "lr": lr, "seed": seed, "tuning": tuning, "seconds": seconds}
        model.eval()
        posterior = optimizer.posterior(model, likelihood="categorical")
        with torch.no_grad():
            mean = torch.cat([model(part).softmax(-1) for part in judged[0].split(2000)])
            drawn = torch.cat([posterior.predict(part, samples).probs for part in judged[0].split(2000)])
        for kind, probs in (("mean", mean.cpu()), ("posterior", drawn.cpu())):
            labels = judged[1].cpu()
            row[kind] = {
                "accuracy": float(metrics.accuracy(probs, labels)),
                "nll": float(metrics.nll(probs, labels)),
                "ece": float(metrics.reliability(probs, labels, bins=15).expected_calibration_error),
            }
        print(row, flush=True)
        return row

    rates = arguments.lr or [3e-3]
    rows, best = [], dict.fromkeys(STRUCTURES, rates[0])
    if len(rates) > 1:
        for structure in arguments.structures:
            tried = [run(structure, lr, 100, tuning=True) for lr in rates]
            best[structure] = min(tried, key=lambda row: row["posterior"]["nll"])["lr"]
            rows += tried
    chosen = [(structure, seed) for seed in arguments.seeds for structure in arguments.structures]
    rows += [run(structure, best[structure], seed, False) for structure, seed in chosen]
    return rows


# -- what it costs ---------------------------------------------------------------------------------------------------


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """Of the GPT of 124 million weights, all matrices but the embeddings."""
    return p.dim() == 2 and "tokens" not in name and "positions" not in name


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
            facts = {"lr": 1e-4, "num_data": 1_000_000, "batch_size": batch, "basis_every": per_round}
            facts["max_basis_dim"] = arguments.max_basis_dim
            optimizer = vario(task, structure, matrices=is_matrix, **facts)
        contenders[name] = task, optimizer
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 3):  # the first have refreshes that compute eigenvectors anew
        for name, (task, optimizer) in contenders.items():
            started = synchronize(device)
            for _ in range(per_round):

                def closure(task: nn.Module = task, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = task()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            if turn >= 3:
                times[name].append((synchronize(device) - started) / per_round)
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
            matrix = len(shape) == 2 and "tokens" not in name and "positions" not in name
            bases = sum(2 * length**2 for _, length in sides_of(torch.Size(shape), limit)) if matrix else 0
            total, beside = total + count * size, beside + count * (2 * size + bases)  # h̃ and the momentum
            row = {"limit": limit, "layer": name, "shape": list(shape), "layers": count, "weights": size}
            rows.append(row | {"beside": 2 * size + bases, "ratio": 2 + bases / size})
        rows.append({"limit": limit, "layer": "all", "weights": total, "beside": beside, "ratio": beside / total})
        print(f"max_basis_dim {limit:5}: {beside / total:.2f} times the weights beside them", flush=True)
    return rows

"""The tasks of ``eigenbasis.py`` that train networks, and what a step and its state cost."""

from __future__ import annotations

import argparse
import importlib.util
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


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Both added to the input."""
        parts = self.attention(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.back(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class CharacterGPT(nn.Module):
    """Without dropout."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                out = name.endswith(("back.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character at every place."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


def character_loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over characters."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def windows(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of a text, and the characters that follow."""
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator, device=text.device)
    places = starts + torch.arange(context + 1, device=text.device)
    pieces = text[places]
    return pieces[:, :-1], pieces[:, 1:]


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
    shape, batch, steps, samples = ((2, 2, 32), 4, 5, 2) if short else ((6, 6, 384), 64, 2500, 16)
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
        model = CharacterGPT(*shape, len(letters), context).to(device)
        optimizer = vario(
            model,
            structure,
            matrices=lambda name, p: p.dim() == 2 and "tokens" not in name and "positions" not in name,
            lr=lr,
            num_data=len(own),
            batch_size=batch,
            seed=seed,
            max_basis_dim=max(arguments.max_basis_dim, 1536),
        )
        generator = torch.Generator(device).manual_seed(seed)
        gradients = Gradients(model, character_loss, *windows(own, batch, context, generator))
        started = synchronize(device)
        for step in range(steps):
            schedule(optimizer, lr, step, steps)
            with optimizer.sampled_params():
                gradients(*windows(own, batch, context, generator))
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


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Channels that the input lacks are zero."""
        out = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(out + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding)))


def resnet20() -> nn.Module:
    """16, 32 and 64 channels, 0.27 million weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for i in range(3):
            layers.append(Residual(inputs, outputs, 2 if i == 0 and outputs > 16 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def cifar(split: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images of mean 0 and variance 1, and labels."""
    file = DATA / "cifar10" / "load.py"
    spec = importlib.util.spec_from_file_location("cifar_load", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    images, labels = module.load(split)
    x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)))
    return (x - mean) / std, torch.from_numpy(labels).long().to(device)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flipped half of the time, and moved by up to four pixels."""
    count, channels, height, width = x.shape
    flip = torch.rand(count, 1, 1, 1, generator=generator, device=x.device) < 0.5
    padded = F.pad(torch.where(flip, x.flip(-1), x), (4, 4, 4, 4))
    shift = torch.randint(0, 9, (2, count), generator=generator, device=x.device)
    rows = (shift[0, :, None] + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (shift[1, :, None] + torch.arange(width, device=x.device))[:, None, None, :]
    image = torch.arange(count, device=x.device)[:, None, None, None]
    return padded[image, torch.arange(channels, device=x.device)[None, :, None, None], rows, columns]


def resnet(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy, log-loss and calibration error of both structures, at the mean and of the posterior."""
    short, device = arguments.short, torch.device(arguments.device)
    epochs, batch, samples = (1, 8, 2) if short else (40, 128, 32)
    torch.set_float32_matmul_precision("high")
    if short:
        x, y = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
        train, test = (x, y), (x, y)
    else:
        train, test = cifar("train", device), cifar("test", device)

    def run(structure: str, lr: float, seed: int, tuning: bool) -> dict[str, Any]:
        x, y = train
        judged = test
        if tuning:
            (x, judged_x), (y, judged_y) = (t.split([len(t) * 9 // 10, len(t) - len(t) * 9 // 10]) for t in train)
            judged = judged_x, judged_y
        torch.manual_seed(seed)
        model = resnet20().to(device)
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
                    gradients(augmented(x[rows], generator), y[rows])
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

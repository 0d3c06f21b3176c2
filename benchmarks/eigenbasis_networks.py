"""The tasks of ``eigenbasis.py`` that train networks: data on the device, and steps that a GPU replays as one graph."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vprop
from vprop import metrics
from vprop.lab.data import files
from vprop.lab.deep.contenders import ivon
from vprop.lab.deep.data import random_windows
from vprop.lab.deep.gpt import CharacterGPT, next_character_loss
from vprop.lab.deep.networks import resnet20
from vprop.lab.deep.training import Loss, Trainer, epochs, flips_and_crops, one_cycle

DATA = Path(os.environ.get("VPROP_DATA", "."))
TUNING_SEED = 100
SIGMA = 0.008
"""Of IVON's noise at the start, as in the lab's comparison."""
CHUNK = 100
"""Steps whose windows of text are cut out at once."""

Choice = Callable[[str, nn.Parameter], bool]
Labelled = tuple[Tensor, Tensor]


def made(name: str, model: nn.Module, structure: str, matrices: Choice, **facts: Any) -> Any:
    """An optimizer with this structure for the weight matrices, and a diagonal for embeddings, biases and norms."""
    chosen = [p for name, p in model.named_parameters() if matrices(name, p)]
    ids = {id(p) for p in chosen}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [group for group in ({"params": chosen, "structure": structure}, {"params": others}) if group["params"]]
    if name == "vario":
        return vprop.Vario(groups, **facts)
    return ivon(groups, {key: value for key, value in facts.items() if key != "lr"}, SIGMA, speed=facts["lr"])


def synchronize(device: torch.device) -> float:
    """The time when all work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(
    model: nn.Module, optimizer: Any, loss: Loss, lr: float, steps: int, batch: int, chunks: Iterator[Labelled]
) -> float:
    """Train with a warm-up and a cosine to zero; returns how many seconds that took."""
    device = next(model.parameters()).device
    trainer = Trainer(model, optimizer, one_cycle(lr, steps), batch, loss=loss)
    started = synchronize(device)
    while trainer.steps_done < steps:
        trainer.run_epoch(*next(chunks))
    return synchronize(device) - started


def best_rates(
    arguments: argparse.Namespace, run: Callable[..., dict[str, Any]], loss: Callable[[dict[str, Any]], float]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The best step size of each structure, found on training data that are held out, and the runs that say so."""
    rates, rows, best = arguments.lr or [DEFAULT_RATES[arguments.task][arguments.optimizer]], [], {}
    for structure in arguments.structures:
        best[structure] = rates[0]
        if len(rates) > 1:
            tried = [run(structure, lr, TUNING_SEED, tuning=True) for lr in rates]
            best[structure] = min(tried, key=loss)["lr"]
            rows += tried
    return best, rows


DEFAULT_RATES = {"gpt": {"vario": 2e-3, "ivon": 1.0}, "resnet": {"vario": 3e-3, "ivon": 1.0}}


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


def windows(text: Tensor, count: int, context: int, seed: int) -> Iterator[Labelled]:
    """Pieces from anywhere in a text, for so many rows at once."""
    generator = torch.Generator(text.device).manual_seed(seed)
    while True:
        yield random_windows(text, count, context, generator)


def gpt(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The structures at equal steps, and the diagonal once more with the steps that the eigenbasis' time allows.

    With several ``--lr`` the best of each structure is found on the last twentieth of the training text, by a run of
    another seed on the rest.
    """
    short, device = arguments.short, torch.device(arguments.device)
    layers, heads, width = (2, 2, 32) if short else (6, 6, 384)
    batch, steps, samples = (4, 5, 2) if short else (64, 2500, 16)
    steps, context = arguments.steps or steps, 16 if short else 256
    torch.set_float32_matmul_precision("high")
    raw = (DATA / "text" / "tinyshakespeare.txt").read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(raw)))}
    text = torch.tensor([letters[letter] for letter in raw], device=device)
    text = text[:4000] if short else text
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def run(structure: str, lr: float, seed: int, steps: int = steps, tuning: bool = False) -> dict[str, Any]:
        own, judged = (train[: len(train) * 19 // 20], train[len(train) * 19 // 20 :]) if tuning else (train, held_out)
        torch.manual_seed(seed)
        model = CharacterGPT(len(letters), context, layers, width, heads).to(device)
        facts = {"lr": lr, "num_data": len(own), "batch_size": batch, "seed": seed}
        facts |= {"max_basis_dim": arguments.max_basis_dim, "capturable": device.type == "cuda"}
        optimizer = made(arguments.optimizer, model, structure, is_hidden, **facts)
        chunks = windows(own, min(CHUNK, steps) * batch, context, seed)
        seconds = trained(model, optimizer, next_character_loss, lr, steps, batch, chunks)
        mean, posterior = text_losses(model, optimizer.posterior(model), judged, context, samples)
        row = {"optimizer": arguments.optimizer, "structure": structure, "lr": lr, "seed": seed, "steps": steps}
        row |= {"tuning": tuning, "seconds": seconds, "mean": mean, "posterior": posterior}
        print(row, flush=True)
        return row

    best, rows = best_rates(arguments, run, lambda row: row["posterior"])
    for seed in arguments.seeds:
        own = {structure: run(structure, best[structure], seed) for structure in arguments.structures}
        rows += own.values()
        if len(own) > 1 and not arguments.equal_steps_only:
            longer = round(steps * max(1.0, own["eigenbasis"]["seconds"] / own["diagonal"]["seconds"]))
            rows.append(run("diagonal", best["diagonal"], seed, longer) | {"equal_time": True})
    return rows


def is_hidden(name: str, p: nn.Parameter) -> bool:
    """Of the GPT on characters, all matrices but the embeddings."""
    return p.dim() == 2 and not name.startswith(("character.", "place."))


# -- ResNet-20 on CIFAR-10 -------------------------------------------------------------------------------------------


def normalized(images: Tensor, device: torch.device) -> Tensor:
    """Images of mean 0 and variance 1."""
    x = images.to(device).float() / 255
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)))
    return (x - mean) / std


def image_scores(model: nn.Module, posterior: Any, x: Tensor, y: Tensor, samples: int) -> dict[str, dict[str, float]]:
    """Accuracy, log-loss and calibration error at the mean and of the posterior."""
    model.eval()
    with torch.no_grad():
        mean = torch.cat([model(part).softmax(-1) for part in x.split(2000)])
        drawn = torch.cat([posterior.predict(part, samples).probs for part in x.split(2000)])
    found, labels = {}, y.cpu()
    for kind, probs in (("mean", mean.cpu()), ("posterior", drawn.cpu())):
        found[kind] = {
            "accuracy": float(metrics.accuracy(probs, labels)),
            "nll": float(metrics.nll(probs, labels)),
            "ece": float(metrics.reliability(probs, labels, bins=15).expected_calibration_error),
        }
    return found


def resnet(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy, log-loss and calibration error of the structures, at the mean and of the posterior.

    With several ``--lr`` the best of each structure is found on the last tenth of the training images, by a run of
    another seed on the rest.
    """
    short, device = arguments.short, torch.device(arguments.device)
    count, batch, samples = (1, 8, 2) if short else (40, 128, 32)
    count = arguments.epochs or count
    torch.set_float32_matmul_precision("high")
    if short:
        x, y = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
        train, test = (x, y), (x, y)
    else:
        train, test = ((normalized(x, device), y.to(device)) for x, y in files.cifar10(None))

    def run(structure: str, lr: float, seed: int, tuning: bool = False) -> dict[str, Any]:
        x, y = train
        judged, own = test, len(x) * 9 // 10 if tuning else len(x)
        if tuning:
            judged, (x, y) = (x[own:], y[own:]), (x[:own], y[:own])
        torch.manual_seed(seed)
        model = resnet20(3).to(device)
        facts = {"lr": lr, "num_data": own, "batch_size": batch, "seed": seed}
        facts |= {"max_basis_dim": arguments.max_basis_dim, "capturable": device.type == "cuda"}
        optimizer = made(arguments.optimizer, model, structure, lambda name, p: p.dim() > 1, **facts)
        generator = torch.Generator(device).manual_seed(seed)
        chunks = epochs(x, y, count, generator, flips_and_crops(generator))
        seconds = trained(model, optimizer, F.cross_entropy, lr, count * (own // batch), batch, chunks)
        row: dict[str, Any] = {"optimizer": arguments.optimizer, "structure": structure, "lr": lr, "seed": seed}
        row |= {"epochs": count, "tuning": tuning, "seconds": seconds}
        row |= image_scores(model, optimizer.posterior(model, likelihood="categorical"), *judged, samples)
        print(row, flush=True)
        return row

    best, rows = best_rates(arguments, run, lambda row: row["posterior"]["nll"])
    chosen = [(structure, seed) for seed in arguments.seeds for structure in arguments.structures]
    return rows + [run(structure, best[structure], seed) for structure, seed in chosen]

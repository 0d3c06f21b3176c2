"""The demo: a regression with error bars and a digit classifier, each against Adam, in about a minute.

Everything it shows is written to ``demo.json`` first; the plots are made from that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from vprop import Objective, VariationalOptimizer, Vario, metrics
from vprop.files import write_text
from vprop.lab import plots
from vprop.lab.environment import environment, one_thread
from vprop.lab.gains import gains

NOISE_STD = 0.15


def run(out: Path, *, short: bool = False) -> dict[str, Any]:
    """Run both parts, write ``demo.json`` and the plots into ``out``, print a summary."""
    console = Console()
    columns = (TextColumn("{task.description:<38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with one_thread(), Progress(*columns, console=console) as progress:
        result = {
            "environment": environment(),
            "regression": regression(progress, steps=50 if short else 2000),
            "digits": digits(progress, epochs=1 if short else 40, splits=1 if short else 5),
        }
    write_text(out / "demo.json", json.dumps(result, indent=1))
    pictures = [
        plots.regression_band(result["regression"], out / "regression.png"),
        plots.calibration(result["digits"], out / "calibration.png"),
    ]
    _summarise(console, result, [out / "demo.json", *pictures])
    return result


# -- a regression with error bars ----------------------------------------------------------------------------


def regression(progress: Progress, steps: int, networks: int = 5) -> dict[str, Any]:
    """Fifty noisy points with a gap; ReLU networks with three hidden layers; the noise level is known.

    One Gaussian is one way to bridge the gap. Five of them, from different first weights, show how open it is. With so
    few data the prior is a better bound on the noise than the size of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(25, 1, generator=generator) - 1.9, torch.rand(25, 1, generator=generator) + 0.6
    x = torch.cat([left, right])
    y = _truth(x) + NOISE_STD * torch.randn(x.shape, generator=generator)
    grid, samples = torch.linspace(-3, 3, 241)[:, None], []
    for number in range(networks):
        model = _build(lambda: _mlp(1, 32, 32, 32, 1), seed=number)
        optimizer = Vario(
            model.parameters(), lr=0.01, num_data=50, batch_size=50, noise_limit=float("inf"), seed=number
        )
        scheduler = _schedule(optimizer, 0.01, steps)
        for _ in progress.track(range(steps), description=f"Regression, network {number + 1} of {networks}"):
            optimizer.step(Objective(model, _gaussian_nll, x, y))
            scheduler.step()
        posterior = optimizer.posterior(model, likelihood="gaussian", noise_variance=NOISE_STD**2)
        samples.append(posterior.predict(grid, num_samples=40).samples)
    functions = torch.cat(samples)
    curves = {
        "grid": grid,
        "truth": _truth(grid),
        "mean": functions.mean(0),
        "epistemic_std": functions.std(0),
        "total_std": (functions.var(0) + NOISE_STD**2).sqrt(),
        "x": x,
        "y": y,
    }
    numbers = {"steps": steps, "networks": networks, "noise_std": NOISE_STD}
    return numbers | {name: value.flatten().tolist() for name, value in curves.items()}


def _truth(x: Tensor) -> Tensor:
    return torch.sin(2.5 * x) + 0.3 * x


def _gaussian_nll(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (((y - output) / NOISE_STD) ** 2 + math.log(2 * math.pi * NOISE_STD**2)).mean()


# -- a classifier that knows what it does not know -----------------------------------------------------------


def digits(progress: Progress, epochs: int, splits: int) -> dict[str, Any]:
    """scikit-learn's digits, an MLP, Adam against Vario with the same step size and schedule.

    Half of the images train, the other half judge; the scores are over the test halves of several splits together.
    """
    features, labels = load_digits(return_X_y=True)
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"Adam": [], "Vario": []}
    for split, name in product(range(splits), found):
        parts = train_test_split(
            features.astype("float32") / 16, labels, test_size=0.5, random_state=split, stratify=labels
        )
        x, test_x, y, test_y = (torch.tensor(part) for part in parts)
        model = _build(lambda: _mlp(64, 64, 64, 10), seed=split)
        batches = list(_batches(len(x), epochs))
        optimizer: torch.optim.Optimizer
        if name == "Adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        else:
            optimizer = Vario(model.parameters(), lr=0.01, num_data=len(x), batch_size=32)
        scheduler = _schedule(optimizer, 0.01, len(batches))
        for rows in progress.track(batches, description=f"Digits with {name}, split {split + 1} of {splits}"):
            closure: Callable[[], Any] = Objective(model, F.cross_entropy, x[rows], y[rows])
            optimizer.step(closure)
            scheduler.step()
        if isinstance(optimizer, VariationalOptimizer):
            posterior = optimizer.posterior(model, likelihood="categorical")
            probs, noise_probs = (posterior.predict(data, num_samples=64).probs for data in (test_x, noise))
        else:
            with torch.no_grad():
                probs, noise_probs = (model(data).softmax(-1) for data in (test_x, noise))
        found[name].append((probs, test_y, noise_probs))
    judged = {name: _judge(*map(torch.cat, zip(*runs, strict=True))) for name, runs in found.items()}
    return {"epochs": epochs, "splits": splits, "train": len(x), "test": len(test_x), "methods": judged}


def _judge(probs: Tensor, labels: Tensor, noise_probs: Tensor) -> dict[str, Any]:
    diagram = metrics.reliability(probs, labels, bins=10)
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "log_loss": metrics.nll(probs, labels),
        "expected_calibration_error": diagram.expected_calibration_error,
        "reliability": diagram._asdict(),
        "mean_confidence_on_noise": float(noise_probs.max(-1).values.mean()),
    }


# -- shared --------------------------------------------------------------------------------------------------


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The same initial weights for every method, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _schedule(optimizer: torch.optim.Optimizer, lr: float, steps: int) -> OneCycleLR:
    """A short warm-up, and a cosine to zero."""
    return OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=0.05, cycle_momentum=False)


def _batches(count: int, epochs: int, size: int = 32) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(size)


def _summarise(console: Console, result: dict[str, Any], files: list[Path]) -> None:
    methods = result["digits"]["methods"]
    table = Table(
        title=f"Digits, {result['digits']['test']} test images, {result['digits']['splits']} splits",
        title_justify="left",
    )
    table.add_column("")
    for name in methods:
        table.add_column(name, justify="right")
    rows = [
        ("accuracy", "accuracy", "higher is better"),
        ("log-loss", "log_loss", "lower is better"),
        ("calibration error", "expected_calibration_error", "lower is better"),
        ("confidence on pure noise", "mean_confidence_on_noise", "lower is better"),
    ]
    table.add_column("")
    for label, key, direction in rows:
        table.add_row(label, *(f"{method[key]:.3f}" for method in methods.values()), direction)
    console.print(table)
    _tell_gains(console, result)
    console.print("Written: " + ", ".join(str(file) for file in files), soft_wrap=True)


def _tell_gains(console: Console, result: dict[str, Any]) -> None:
    """What all of this was good for, in words."""
    found, last = gains(result)
    console.print("\nWhat the posterior gained:", style="bold")
    for gain in found:
        line = Table.grid(padding=(0, 1))
        line.add_row(f" {gain.mark}", gain.words)
        console.print(line, highlight=False)
    console.print(f"{last}\n", highlight=False)

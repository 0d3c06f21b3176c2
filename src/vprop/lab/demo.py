"""The demo: a regression with error bars and a digit classifier, each against Adam, in about a minute.

Everything it shows is written to ``demo.json`` first; the plots are made from that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
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
from torch.optim.lr_scheduler import CosineAnnealingLR

from vprop import Objective, Vprop, metrics
from vprop.files import write_text
from vprop.lab import plots
from vprop.lab.environment import environment

NOISE_STD = 0.15


def run(out: Path, *, quick: bool = False) -> dict[str, Any]:
    """Run both parts, write ``demo.json`` and the plots into ``out``, print a summary."""
    console = Console()
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        result = {
            "environment": environment(),
            "regression": regression(progress, steps=20 if quick else 1500),
            "digits": digits(progress, epochs=1 if quick else 40),
        }
    write_text(out / "demo.json", json.dumps(result, indent=1))
    pictures = [
        plots.regression_band(result["regression"], out / "regression.png"),
        plots.calibration(result["digits"], out / "calibration.png"),
    ]
    _summarise(console, result, [out / "demo.json", *pictures])
    return result


# -- a regression with error bars ----------------------------------------------------------------------------


def regression(progress: Progress, steps: int) -> dict[str, Any]:
    """Fifty noisy points with a gap; a ReLU network with three hidden layers; the noise level is known."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(25, 1, generator=generator) - 1.6, torch.rand(25, 1, generator=generator) + 0.4
    x = torch.cat([left, right])
    y = _truth(x) + NOISE_STD * torch.randn(x.shape, generator=generator)
    model = _build(lambda: _mlp(1, 32, 32, 32, 1))
    optimizer = Vprop(
        model.parameters(),
        lr=0.1,
        num_data=len(x),
        prior_precision=0.3,
        betas=(0.9, 0.99),
        mc_samples=4,
        antithetic=True,
        centered=True,
        hess_init=10.0,
    )
    scheduler = CosineAnnealingLR(optimizer, steps)
    for _ in progress.track(range(steps), description="Regression with error bars"):
        optimizer.step(Objective(model, _gaussian_nll, x, y))
        scheduler.step()
    grid = torch.linspace(-3, 3, 241)[:, None]
    posterior = optimizer.posterior(model, likelihood="gaussian", noise_variance=NOISE_STD**2)
    prediction = posterior.predict(grid, num_samples=200)
    curves = {
        "grid": grid,
        "truth": _truth(grid),
        "mean": prediction.mean,
        "epistemic_std": prediction.epistemic_variance.sqrt(),
        "total_std": prediction.variance.sqrt(),
        "x": x,
        "y": y,
    }
    return {"steps": steps, "noise_std": NOISE_STD} | {name: value.flatten().tolist() for name, value in curves.items()}


def _truth(x: Tensor) -> Tensor:
    return torch.sin(2.5 * x) + 0.3 * x


def _gaussian_nll(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (((y - output) / NOISE_STD) ** 2 + math.log(2 * math.pi * NOISE_STD**2)).mean()


# -- a classifier that knows what it does not know -----------------------------------------------------------


def digits(progress: Progress, epochs: int) -> dict[str, Any]:
    """scikit-learn's digits, an MLP, Adam against Vprop with no argument but lr and num_data."""
    features, labels = load_digits(return_X_y=True)
    parts = train_test_split(features.astype("float32") / 16, labels, test_size=0.5, random_state=0, stratify=labels)
    x, test_x, y, test_y = (torch.tensor(part) for part in parts)
    result: dict[str, Any] = {"epochs": epochs, "train": len(x), "test": len(test_x), "methods": {}}
    for name in ("Adam", "Vprop"):
        model = _build(lambda: _mlp(64, 64, 64, 10))
        batches = list(_batches(len(x), epochs))
        if name == "Adam":
            optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        else:
            optimizer = Vprop(model.parameters(), lr=0.3, num_data=len(x))
        scheduler = CosineAnnealingLR(optimizer, len(batches)) if name == "Vprop" else None
        for rows in progress.track(batches, description=f"Digits with {name}"):
            closure: Callable[[], Any] = Objective(model, F.cross_entropy, x[rows], y[rows])
            optimizer.step(closure)
            if scheduler is not None:
                scheduler.step()
        noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(0))
        if isinstance(optimizer, Vprop):
            posterior = optimizer.posterior(model, likelihood="categorical")
            probs, noise_probs = (posterior.predict(data, num_samples=64).probs for data in (test_x, noise))
        else:
            with torch.no_grad():
                probs, noise_probs = (model(data).softmax(-1) for data in (test_x, noise))
        result["methods"][name] = _judge(probs, test_y, noise_probs)
    return result


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


def _build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same initial weights for every method, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def _batches(count: int, epochs: int, size: int = 32) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(size)


def _summarise(console: Console, result: dict[str, Any], files: list[Path]) -> None:
    methods = result["digits"]["methods"]
    table = Table(title=f"Digits, {result['digits']['test']} test images", title_justify="left")
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
    console.print("Written: " + ", ".join(str(file) for file in files), soft_wrap=True)

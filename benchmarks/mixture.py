"""One posterior, a mixture of four, one network and an ensemble of four: what members and error bars are each worth.

    python benchmarks/mixture.py [--seeds 5] [--short] [--json FILE] [--plot FILE]

A network of 64-64-10 units learns 300 of scikit-learn's digits, and is scored on the other 1,497. All have 40 epochs
with batches of 50 and a cosine. A prediction of a posterior has 64 samples, that of a mixture 16 for each member. Step
sizes were chosen on the split and the initial weights of seed 100, from 0.001, 0.003 and 0.01, by the log-loss of one
network on 200 images that it was not trained on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run_and_plot import run_and_plot
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import vprop
from vprop import metrics

RATES, BATCH, MEMBERS = (0.001, 0.003, 0.01), 50, 4
SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": metrics.accuracy,
    "log-loss": metrics.nll,
    "calibration error": metrics.expected_calibration_error,
}


def make_model() -> nn.Module:
    """5,000 weights."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[:300]], y[order[:300]], x[order[300:]], y[order[300:]]


def train_posteriors(loader: DataLoader, rows: int, lr: float, epochs: int, seed: int, members: int) -> vprop.Mixture:
    """By one call."""
    return vprop.train_mixture(
        make_model,
        lambda model, seed: vprop.Vario(model.parameters(), lr=lr, num_data=rows, batch_size=BATCH, seed=seed),
        loader,
        F.cross_entropy,
        members=members,
        epochs=epochs,
        seed=seed,
        make_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs * len(loader)),
    )


def train_networks(loader: DataLoader, lr: float, epochs: int, seed: int, x_test: Tensor, members: int) -> list[Tensor]:
    """Probabilities of networks trained by AdamW."""
    probs = []
    for number in range(seed, seed + members):
        torch.manual_seed(number)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = CosineAnnealingLR(optimizer, epochs * len(loader))
        for _ in range(epochs):
            for x, y in loader:
                optimizer.step(vprop.Objective(model, F.cross_entropy, x, y))
                scheduler.step()
        probs.append(model(x_test).softmax(-1).detach())
    return probs


def choose(epochs: int) -> dict[str, float]:
    """The step size of either optimizer."""
    x, y, x_held, y_held = make_data(100)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    losses: dict[str, dict[float, float]] = {"Vario": {}, "AdamW": {}}
    for lr in RATES:
        mixture = train_posteriors(loader, len(x), lr, epochs, 100, 1)
        losses["Vario"][lr] = metrics.nll(mixture.predict(x_held[:200], 64).probs, y_held[:200])
        (probs,) = train_networks(loader, lr, epochs, 100, x_held[:200], 1)
        losses["AdamW"][lr] = metrics.nll(probs, y_held[:200])
    return {name: min(found, key=lambda lr: found[lr]) for name, found in losses.items()}


def run(seeds: range, short: bool) -> dict[str, Any]:
    """Scores of all four, by seed."""
    epochs = 2 if short else 40
    rates = choose(epochs)
    scores: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        x, y, x_test, y_test = make_data(seed)
        loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        mixture = train_posteriors(loader, len(x), rates["Vario"], epochs, 10 * seed, MEMBERS)
        networks = train_networks(loader, rates["AdamW"], epochs, 10 * seed, x_test, MEMBERS)
        predictions = {
            "one network": networks[0],
            "four networks": torch.stack(networks).mean(0),
            "one posterior": mixture.members[0].predict(x_test, 64).probs,
            "mixture of four": mixture.predict(x_test, 64).probs,
        }
        for name, probs in predictions.items():
            for score, function in SCORES.items():
                scores.setdefault(name, {}).setdefault(score, []).append(function(probs, y_test))
    for name, found in scores.items():
        print(f"{name:16}", {score: round(statistics.mean(values), 4) for score, values in found.items()})
    return {"learning rates": rates, "scores": scores}


def plot(results: dict[str, Any], path: Path) -> None:
    """Each score of each seed, and the mean."""
    import matplotlib.pyplot as plt

    from vprop.plots.style import BLUE, ORANGE, save

    figure, panels = plt.subplots(1, len(SCORES), figsize=(8, 2.6), layout="constrained")
    for axes, score in zip(panels, SCORES, strict=True):
        for place, (name, found) in enumerate(results["scores"].items()):
            color = ORANGE if "network" in name else BLUE
            axes.plot([place] * len(found[score]), found[score], "o", color=color, alpha=0.4, markersize=4)
            axes.plot(place, statistics.mean(found[score]), "_", color=color, markersize=18, markeredgewidth=2)
        axes.set_xticks(range(4), [name.replace(" ", "\n", 1) for name in results["scores"]], fontsize=7)
        axes.set_title(score)
        axes.grid(axis="x", visible=False)
    save(figure, path)


if __name__ == "__main__":
    COMMAND = "python benchmarks/mixture.py --json benchmarks/results/mixture.json"
    run_and_plot(__doc__, COMMAND, run, plot, seeds=5)

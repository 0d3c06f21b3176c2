"""Test accuracy against sparsity: pruning by |μ|/σ, by magnitude, and by magnitude after AdamW.

    python benchmarks/pruning.py [--seeds 3] [--short] [--json FILE] [--plot FILE]

A network of 784-100-10 units learns 5,000 images of Fashion-MNIST for 10 epochs, its weights (not its biases) are
pruned without any training after it, and 5,000 test images are classified at the posterior mean. `global` compares the
weights of both layers, `parameter` prunes the same share of each. Step sizes were chosen on seed 100 from 0.0003, 0.001
and 0.003 (Vario, AdamW) and 0.03, 0.1 and 0.3 (IVON), by accuracy without pruning on 2,000 further training images.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run_and_plot import run_and_plot
from torch import Tensor, nn

import vprop
from vprop.lab.data import load

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
BATCH, EPOCHS, ROWS = 50, 10, 5000
RATES = {"Vario": (3e-4, 1e-3, 3e-3), "IVON": (0.03, 0.1, 0.3), "AdamW": (3e-4, 1e-3, 3e-3)}


def make_optimizer(name: str, model: nn.Module, lr: float, seed: int, rows: int) -> Any:
    """With what each needs beside a step size."""
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    if name == "Vario":
        return vprop.Vario(model.parameters(), lr=lr, num_data=rows, batch_size=BATCH, seed=seed)
    return vprop.IVON(model.parameters(), lr=lr, num_data=rows, betas=(0.9, 0.999), hess_init=0.1, seed=seed)


def train(name: str, lr: float, seed: int, x: Tensor, y: Tensor, epochs: int) -> Any:
    """The posterior; of AdamW one with a variance of one, of which only the magnitudes are used."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = make_optimizer(name, model, lr, seed, len(x))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(x) // BATCH)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.step(vprop.Objective(model, F.cross_entropy, x[rows], y[rows]))
            scheduler.step()
    if name != "AdamW":
        return optimizer.posterior(model, likelihood="categorical")
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    flat = {key: torch.tensor(0.0) for key in weights}
    prior = vprop.GaussianPrior(flat, {key: torch.tensor(1.0) for key in weights})
    ones = {key: torch.ones_like(weight) for key, weight in weights.items()}
    return vprop.posterior.DiagonalPosterior(model, weights, ones, prior, ess=float(len(x)))


def accuracy(posterior: Any, x: Tensor, y: Tensor) -> float:
    """At the posterior mean."""
    output = torch.func.functional_call(posterior.model, posterior.mean, (x,))
    return float((output.argmax(1) == y).double().mean())


def run(seeds: range, short: bool) -> list[dict[str, Any]]:
    """Accuracies of all methods, seeds and fractions, printed as they come."""
    data, epochs = load("fashion_mnist"), 1 if short else EPOCHS
    x, y = data.train_x.flatten(1), data.train_y
    x_test, y_test = data.test_x.flatten(1)[:5000], data.test_y[:5000]
    held_x, held_y = x[ROWS : ROWS + 2000], y[ROWS : ROWS + 2000]
    x, y = x[:ROWS], y[:ROWS]
    results = []
    for name, rates in RATES.items():
        scores = {lr: accuracy(train(name, lr, 100, x, y, epochs), held_x, held_y) for lr in rates}
        lr = max(scores, key=lambda rate: scores[rate])
        posteriors = [train(name, lr, seed, x, y, epochs) for seed in seeds]
        for by in ("magnitude",) if name == "AdamW" else ("signal_to_noise", "magnitude"):
            for scope in ("global", "parameter"):
                entry: dict[str, Any] = {"method": name, "lr": lr, "by": by, "scope": scope, "fractions": FRACTIONS}
                entry["accuracy"] = [
                    [accuracy(p.prune(f, by=by, scope=scope), x_test, y_test) for p in posteriors] for f in FRACTIONS
                ]
                results.append(entry)
                print(name, lr, by, scope, [round(statistics.mean(row), 3) for row in entry["accuracy"]], flush=True)
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Mean accuracy against the share of weights that are left; one panel per scope."""
    import matplotlib.pyplot as plt

    from vprop.plots.style import BLACK, BLUE, ORANGE, name_lines, save

    colors = {"Vario": BLUE, "IVON": ORANGE, "AdamW": BLACK}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, scope in zip(panels, ("global", "parameter"), strict=True):
        for entry in (row for row in results if row["scope"] == scope):
            style = "-" if entry["by"] == "signal_to_noise" else "--"
            label = f"{entry['method']}, {'|μ|/σ' if style == '-' else '|μ|'}"
            left = [1 - fraction for fraction in entry["fractions"]]
            means = [statistics.mean(row) for row in entry["accuracy"]]
            axes.plot(left, means, style, marker="o", markersize=3, color=colors[entry["method"]], label=label)
        axes.set(xscale="log", xlabel="share of the weights that are left", title=f"scope={scope!r}")
        axes.invert_xaxis()
    panels[0].set_ylabel("test accuracy at the mean")
    name_lines(*panels)
    save(figure, path)


if __name__ == "__main__":
    COMMAND = "python benchmarks/pruning.py --json benchmarks/results/pruning.json"
    run_and_plot(__doc__, COMMAND, run, plot, seeds=3)

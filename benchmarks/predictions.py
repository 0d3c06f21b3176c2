"""Ways to predict from one posterior, side by side: how good they are. `vprop bench predict` says how long they take.

    python benchmarks/predictions.py --json benchmarks/results/predictions.json --picture docs/predictions/ways.png

Digits, half of them for training, a network with two hidden layers of 64 units trained by Vario with its defaults (and
by centred Vprop), five splits. And forty points on a line, for the picture. Nothing is chosen on the test data: there
is nothing to choose.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import vprop
from vprop import Posterior, Prediction, metrics
from vprop.lab.environment import environment
from vprop.plots import style

OPTIMIZERS: dict[str, Callable[..., vprop.VariationalOptimizer]] = {
    "Vario": lambda params, num_data: vprop.Vario(params, num_data=num_data, batch_size=32),
    "Vprop, centred": lambda params, num_data: vprop.Vprop(
        params, lr=0.1, num_data=num_data, mc_samples=2, antithetic=True, centered=True
    ),
}

WAYS: dict[str, Callable[[Posterior, Tensor], Prediction]] = {
    "1000 draws": lambda q, x: q.predict(x, 1000),
    "128 draws": lambda q, x: q.predict(x, 128, seed=1),
    "32 draws": lambda q, x: q.predict(x, 32, seed=1),
    "8 draws": lambda q, x: q.predict(x, 8, seed=1),
    "linearized": lambda q, x: q.predict(x, method="linearized"),
    "last layer, 32 draws": lambda q, x: q.last_layer().predict(x, 32, seed=1),
    "last layer, linearized": lambda q, x: q.last_layer().predict(x, method="linearized"),
}


def main() -> None:
    """Run, write the file, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="with --json of a run that is there, of that run")
    arguments = parser.parse_args()
    if arguments.picture and arguments.json and arguments.json.exists():
        draw(json.loads(arguments.json.read_text())["regression"], arguments.picture)
        return
    torch.set_num_threads(1)
    result = {
        "command": "python benchmarks/predictions.py",
        "environment": environment(),
        "settings": {"splits": arguments.splits, "epochs": arguments.epochs},
        "digits": {name: digits(make, arguments) for name, make in OPTIMIZERS.items()},
        "regression": regression(),
    }
    for name, rows in result["digits"].items():
        for row in rows:
            print(f"{name:15} {row['way']:25}", {key: value for key, value in row.items() if key != "way"})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.picture is not None:
        draw(result["regression"], arguments.picture)


# -- digits ------------------------------------------------------------------------------------------------------------


def digits(make: Callable[..., vprop.VariationalOptimizer], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way: means over the splits."""
    scores: dict[str, list[dict[str, float]]] = {"the mean of the weights": [], **{way: [] for way in WAYS}}
    images, labels = load_digits(return_X_y=True)
    for split in range(arguments.splits):
        parts = train_test_split(images.astype("float32") / 16, labels, test_size=0.5, random_state=split)
        x, test_x, y, test_y = map(torch.tensor, parts)
        posterior = trained(make, x, y, arguments.epochs, split)
        reference = WAYS["1000 draws"](posterior, test_x).probs
        mean = at_the_mean(posterior, test_x)
        scores["the mean of the weights"].append(score(mean, test_y, reference))
        for name, way in WAYS.items():
            scores[name].append(score(way(posterior, test_x).probs, test_y, reference))
    return [{"way": way} | averaged(rows) for way, rows in scores.items()]


def trained(make: Callable[..., Any], x: Tensor, y: Tensor, epochs: int, seed: int) -> Posterior:
    """Mini-batches of 32, the step size going to 0 along a cosine."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model.parameters(), len(x))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * math.ceil(len(x) / 32))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.step(vprop.Objective(model, F.cross_entropy, x[rows], y[rows]))
            scheduler.step()
    return optimizer.posterior(model, likelihood="categorical")


@torch.no_grad()
def at_the_mean(posterior: Posterior, x: Tensor) -> Tensor:
    """What one would predict without a posterior."""
    return torch.func.functional_call(posterior.model.eval(), posterior.mean, x).softmax(-1)


def score(probs: Tensor, y: Tensor, reference: Tensor) -> dict[str, float]:
    """Log-loss, accuracy, calibration error; and how far from the average over many draws, in total variation."""
    return {
        "log_loss": metrics.nll(probs, y),
        "accuracy": metrics.accuracy(probs, y),
        "calibration_error": metrics.expected_calibration_error(probs, y),
        "distance": float((probs - reference).abs().sum(-1).mean() / 2),
    }


def averaged(rows: list[dict[str, float]]) -> dict[str, float]:
    """Each score over the splits."""
    return {name: round(statistics.fmean(row[name] for row in rows), 5) for name in rows[0]}


# -- forty points ------------------------------------------------------------------------------------------------------


def regression() -> dict[str, Any]:
    """Intervals of 90 % from draws and from the linearised model, of one posterior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.6, 20), torch.linspace(0.7, 2, 20)])[:, None]
    y = torch.sin(2.5 * x) + 0.15 * torch.randn(x.shape, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    how: dict[str, Any] = {"mc_samples": 2, "antithetic": True, "centered": True, "clip_radius": 1.0}
    optimizer = vprop.VONG(model.parameters(), lr=0.05, num_data=len(x), **how)
    likelihood = vprop.GaussianLikelihood(0.15**2, learnable=False)
    objective = vprop.Objective(model, likelihood, x, y)
    for _ in range(2000):
        optimizer.step(objective)
    posterior = optimizer.posterior(model, likelihood=likelihood)
    grid = torch.linspace(-3, 3, 121)[:, None]
    found = {
        "draws": posterior.predict(grid, 1000),
        "linearized": posterior.predict(grid, method="linearized"),
        "last layer": posterior.last_layer().predict(grid, method="linearized"),
    }
    bands = {
        name: {
            "mean": prediction.mean.flatten().tolist(),
            "low": prediction.interval(0.9)[0].flatten().tolist(),
            "high": prediction.interval(0.9)[1].flatten().tolist(),
        }
        for name, prediction in found.items()
    }
    return {"x": x.flatten().tolist(), "y": y.flatten().tolist(), "grid": grid.flatten().tolist(), "bands": bands}


@style.pictures()
def draw(result: dict[str, Any], path: Path) -> None:
    """Three panels: the same posterior, asked in three ways."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {
        "draws": "1000 draws of the weights",
        "linearized": 'method="linearized"',
        "last layer": "last layer, linearised",
    }
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axes, (name, band) in zip(panels, result["bands"].items(), strict=True):
        axes.fill_between(result["grid"], band["low"], band["high"], color=style.BLUE, alpha=0.25, linewidth=0)
        axes.plot(result["grid"], band["mean"], color=style.BLUE)
        axes.plot(result["x"], result["y"], "o", color=style.BLACK, markersize=3)
        axes.set(title=titles[name], xlabel="x", xlim=(-3, 3), ylim=(-3.5, 3.5))
    panels[0].set_ylabel("y, with 90 % of new observations")
    style.save(figure, path)


if __name__ == "__main__":
    main()

"""What calibration, outlier scores, refusals and acquisition are worth, each on data that nothing was chosen by.

    python benchmarks/decisions.py --json benchmarks/results/decisions.json --pictures docs

If the file is there, only the pictures are made: accuracy against labels from it, the others by training the classifier
of seed 0 again.

Fashion-MNIST: 2,000 training, 1,000 held-out and 10,000 test images, an MLP, Vario with its defaults, five seeds; as
inputs of another kind, MNIST's test images, in ``$VPROP_DATA/mnist``. Diabetes (scikit-learn): 200 training, 121
held-out and 121 test rows. Digits (scikit-learn): 20 labels at first, 10 more each round, as in
examples/active_learning.py, ten seeds. Settings were chosen on other seeds (100 to 102), or are the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import vprop
from vprop import acquisition, calibration, metrics, plots
from vprop.lab import data
from vprop.lab.data.idx import parse_idx
from vprop.lab.environment import environment
from vprop.plots import style

LEVELS = (0.8, 0.9, 0.95)


def main() -> None:
    """Run, print, write the file and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, help="folder; calibration/ and decisions/ in it get the pictures")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    pictures = arguments.pictures
    if pictures is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["active_learning"]
        draw_active_learning(kept, pictures / "decisions" / "active-learning.png")
        classification(0, pictures)
        return
    result = {
        "command": "python benchmarks/decisions.py --json benchmarks/results/decisions.json --pictures docs",
        "environment": environment(),
        "seeds": arguments.seeds,
        "classification": _summary([classification(seed, pictures) for seed in range(arguments.seeds)]),
        "regression": _summary([regression(seed) for seed in range(arguments.seeds)]),
        "active_learning": active_learning(range(2 * arguments.seeds), pictures),
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation over seeds."""
    return {name: [mean(run[name] for run in runs), stdev(run[name] for run in runs)] for name in runs[0]}


def _mlp(*widths: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(
    model: nn.Module, loss: Callable[..., Any], x: Tensor, y: Tensor, *, steps: int, lr: float, batch: int
) -> Any:
    """Vario with its defaults, and a cosine; a loss with parameters of its own learns them with Adam."""
    optimizer = vprop.Vario(model.parameters(), lr=lr, num_data=len(x), batch_size=batch)
    own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    noise = torch.optim.Adam(own, lr=0.02) if own else None
    schedule = CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randperm(len(x))[:batch]
        optimizer.step(vprop.Objective(model, loss, x[rows], y[rows]))
        schedule.step()
        if noise is not None:
            noise.step()
            noise.zero_grad()
    return optimizer


# -- classification: calibration, outliers, refusals ----------------------------------------------------------------


def classification(seed: int, pictures: Path | None) -> dict[str, float]:
    """One seed on Fashion-MNIST; pictures are those of seed 0."""
    fashion = data.load("fashion_mnist")
    rows = torch.randperm(len(fashion.train_x), generator=torch.Generator().manual_seed(seed))
    x, y = fashion.train_x.flatten(1), fashion.train_y
    fit, held_out = rows[:2000], rows[2000:3000]
    test_x, test_y = fashion.test_x.flatten(1), fashion.test_y
    folder = Path(os.environ["VPROP_DATA"]) / "mnist"
    other_x = parse_idx(folder / "t10k-images-idx3-ubyte.gz", 3).float().flatten(1) / 255
    model = _mlp(784, 128, 10, seed=seed)
    optimizer = train(model, F.cross_entropy, x[fit], y[fit], steps=1500, lr=0.003, batch=64)
    posterior = optimizer.posterior(model, likelihood="categorical")
    temperature = calibration.fit_temperature(posterior, x[held_out], y[held_out])
    scale = calibration.fit_variance_scale(posterior, x[held_out], y[held_out], num_samples=16)
    result = {"temperature": temperature.value, "variance_scale": scale.value}
    predictions = {}
    for name, q in {"trained": posterior, "temperature": temperature.posterior, "variance": scale.posterior}.items():
        prediction = predictions[name] = q.predict(test_x)
        result |= {
            f"{name}_nll": metrics.nll(prediction.probs, test_y),
            f"{name}_ece": metrics.expected_calibration_error(prediction.probs, test_y),
            f"{name}_accuracy": metrics.accuracy(prediction.probs, test_y),
        }
    for level in LEVELS:
        sets = calibration.conformal_sets(posterior, x[held_out], y[held_out], level=level)
        members = sets.of(predictions["trained"].probs)
        result[f"sets_{level}_coverage"] = float(members.gather(1, test_y[:, None]).double().mean())
        result[f"sets_{level}_size"] = float(members.sum(-1).double().mean())
    prediction, other = predictions["trained"], posterior.predict(other_x)
    wrong = prediction.probs.argmax(-1) != test_y
    scores = {"entropy": acquisition.entropy, "mutual information": acquisition.mutual_information}
    scores |= {"1 − confidence": acquisition.least_confidence, "variation ratio": acquisition.variation_ratio}
    for name, score in scores.items():
        known, unknown = score(prediction), score(other)
        result |= {
            f"{name}_auroc": metrics.auroc(known, unknown),
            f"{name}_aupr": metrics.aupr(known, unknown),
            f"{name}_fpr95": metrics.fpr_at_tpr(known, unknown),
            f"{name}_aurc": metrics.aurc(known, wrong),
        }
    if pictures is not None and seed == 0:
        _calibration_picture(predictions, test_y, pictures / "calibration" / "reliability.png")
        pairs = {name: (score(prediction), score(other)) for name, score in scores.items()}
        curves = {name: metrics.risk_coverage(known, wrong) for name, (known, _) in pairs.items()}
        _decisions_picture(pairs, curves, pictures / "decisions" / "outliers-and-refusals.png")
    return result


@style.pictures()
def _calibration_picture(predictions: dict[str, Any], y: Tensor, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True, layout="constrained")
    for axes, name, title in zip(panels, ("trained", "temperature"), ("as trained", "with a temperature"), strict=True):
        plots.reliability(metrics.calibration_curve(predictions[name].probs, y), axes=axes)
        error = metrics.expected_calibration_error(predictions[name].probs, y)
        axes.set_title(title)
        axes.text(0.96, 0.06, f"calibration error {error:.3f}", transform=axes.transAxes, ha="right")
    style.save(figure, path)


@style.pictures()
def _decisions_picture(pairs: dict[str, Any], curves: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    plots.outliers(pairs, axes=left).set_title("MNIST told from Fashion-MNIST")
    plots.risk_coverage(curves, axes=right).set_title("Errors, if the least certain are refused")
    style.save(figure, path)


# -- regression: noise and intervals ----------------------------------------------------------------------------------


def regression(seed: int) -> dict[str, float]:
    """One split of the diabetes data: noise that was learned on training rows, and what held-out rows make of it."""
    features, target = load_diabetes(return_X_y=True, scaled=True)
    x, y = torch.tensor(features * 21, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std()
    fit, held_out, test = torch.randperm(442, generator=torch.Generator().manual_seed(seed)).split([200, 121, 121])
    model, loss = _mlp(10, 50, 1, seed=seed), vprop.GaussianLikelihood(0.5)
    optimizer = train(model, loss, x[fit], y[fit], steps=1500, lr=0.01, batch=32)
    posterior = optimizer.posterior(model, likelihood=loss)
    noise = calibration.fit_noise_scale(posterior, x[held_out], y[held_out])
    result = {"noise_scale": noise.value}
    for name, q in {"trained": posterior, "noise": noise.posterior}.items():
        prediction = q.predict(x[test])
        result[f"{name}_nll"] = metrics.gaussian_nll(prediction.mean, prediction.variance, y[test])
        result[f"{name}_coverage"] = metrics.coverage(prediction.mean, prediction.variance, y[test], level=0.9)
    low, high = calibration.conformal_intervals(posterior, x[held_out], y[held_out], level=0.9).predict(x[test])
    result["conformal_coverage"] = float(((low <= y[test]) & (y[test] <= high)).double().mean())
    result["conformal_width"] = float((high - low).mean())
    return result


# -- active learning ------------------------------------------------------------------------------------------------


def active_learning(seeds: range, pictures: Path | None, rounds: int = 8) -> dict[str, Any]:
    """Accuracy on digits after every round, for each way to choose."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    information = acquisition.mutual_information
    ways: dict[str, Callable[[Any, int], Tensor]] = {
        "random": lambda p, seed: acquisition.power_sample(torch.ones(p.samples.shape[1]), 10, seed=seed),
        "entropy": lambda p, seed: acquisition.top(acquisition.entropy(p), 10, seed=seed),
        "mutual information": lambda p, seed: acquisition.top(information(p), 10, seed=seed),
        "mutual information, drawn": lambda p, seed: acquisition.power_sample(information(p), 10, power=4, seed=seed),
        "batch_bald": lambda p, seed: acquisition.batch_bald(p, 10, configurations=100, seed=seed).indices,
        "variation ratio": lambda p, seed: acquisition.top(acquisition.variation_ratio(p), 10, seed=seed),
    }

    def accuracies(choose: Callable[[Any, int], Tensor], seed: int) -> list[float]:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        test, known, pool = order.split([577, 20, 1200])
        found = []
        for number in range(rounds + 1):
            model = _mlp(64, 64, 10, seed=seed)
            optimizer = train(model, F.cross_entropy, x[known], y[known], steps=100, lr=0.02, batch=len(known))
            posterior = optimizer.posterior(model, likelihood="categorical")
            found.append(metrics.accuracy(posterior.predict(x[test]).probs, y[test]))
            known = torch.cat([known, pool[choose(posterior.predict(x[pool]), 100 * seed + number)]])
            pool = pool[~torch.isin(pool, known)]
        return found

    runs = {name: [accuracies(choose, seed) for seed in seeds] for name, choose in ways.items()}
    table = {
        name: {
            "mean": [mean(column) for column in zip(*each, strict=True)],
            "spread": [stdev(column) for column in zip(*each, strict=True)],
            "wins_against_random": sum(a[-1] > b[-1] for a, b in zip(each, runs["random"], strict=True)),
        }
        for name, each in runs.items()
    }
    result = {"seeds": len(seeds), "labels": [20 + 10 * number for number in range(rounds + 1)], "ways": table}
    if pictures is not None:
        draw_active_learning(result, pictures / "decisions" / "active-learning.png")
    return result


@style.pictures()
def draw_active_learning(result: dict[str, Any], path: Path) -> None:
    """Accuracy against labels, one line for each way to choose."""
    figure, axes = plt.subplots(figsize=(7.4, 4), layout="constrained")
    for name, row in result["ways"].items():
        look = {"color": style.BLACK, "linestyle": "--"} if name == "random" else {}
        (line,) = axes.plot(result["labels"], row["mean"], label=name, **look)
        low, high = ([m + sign * s for m, s in zip(row["mean"], row["spread"], strict=True)] for sign in (-1, 1))
        if name in ("random", "variation ratio"):
            axes.fill_between(result["labels"], low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    title = f"Digits: which ten to label next ({result['seeds']} seeds; bands: standard deviation)"
    axes.set(xlabel="labels", ylabel="test accuracy", title=title)
    axes.margins(x=0)
    style.name_lines(axes)
    style.save(figure, path)


if __name__ == "__main__":
    main()

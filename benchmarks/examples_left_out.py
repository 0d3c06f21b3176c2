"""What an example taught the model, from the posterior, against training again without it; and forgetting likewise.

    python benchmarks/examples_left_out.py [--seeds 3] [--short] [--json FILE] [--plot FILE]

`sensitivity`: for some examples of each seed, the change of the example's own loss and outputs when it is left out, as
`posterior.sensitivity` says and as training again from the same start with the same noise finds (Spearman's rank
correlation). `loss` is the same for the example's loss at the mean, which costs nothing: what sensitivity must beat.

`forgetting`: k random examples are forgotten by `posterior.forget`, or left out of training. `error` is the distance of
the forgetful model from the one trained again, as a share of that of the model that forgot nothing: root mean square
over the outputs for all training examples. 0 is as good as training again, 1 as good as doing nothing. `refused` counts
posteriors that hold too little curvature to forget.

Settings were chosen on seed 100.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run_and_plot import run_and_plot
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from torch import Tensor, nn

import vprop


@dataclass(frozen=True)
class Task:
    """Some rows of a data set, and a model."""

    rows: int
    load: Callable[[], tuple[Tensor, Tensor]]
    model: Callable[[], nn.Module]


def breast_cancer() -> tuple[Tensor, Tensor]:
    """569 tumours with 30 features, standardized."""
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor(x)
    return (x - x.mean(0)) / x.std(0), torch.tensor(y)


def moons() -> tuple[Tensor, Tensor]:
    """Two half circles that overlap."""
    x, y = make_moons(400, noise=0.3, random_state=0)
    return torch.tensor(x), torch.tensor(y)


def digits() -> tuple[Tensor, Tensor]:
    """1797 images of 8×8 pixels."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x).float() / 16, torch.tensor(y)


TASKS = {
    "logistic regression": Task(200, breast_cancer, lambda: nn.Linear(30, 2).double()),
    "42 weights": Task(120, moons, lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()),
    "1210 weights": Task(300, digits, lambda: nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))),
}
Optimizer = Callable[[nn.Module, int, int], vprop.VariationalOptimizer]
FAST = {"betas": (0.9, 0.99)}
METHODS: list[tuple[str, str, str, int, Optimizer]] = [
    ("logistic regression", "VON at the mean", "full", 60, lambda m, n, s: vprop.VON(
        m.parameters(), lr=1.0, num_data=n, betas=(0.0, 0.5), mc_samples=0, seed=s)),
    ("logistic regression", "VON", "full", 60, lambda m, n, s: vprop.VON(
        m.parameters(), lr=0.5, num_data=n, betas=(0.0, 0.9), mc_samples=4, antithetic=True, seed=s)),
    ("logistic regression", "VOGN", "diagonal", 300, lambda m, n, s: vprop.VOGN(
        m.parameters(), lr=0.1, num_data=n, seed=s, **FAST)),
    ("42 weights", "VON at the mean", "full", 100, lambda m, n, s: vprop.VON(
        m.parameters(), lr=0.3, num_data=n, betas=(0.0, 0.9), mc_samples=0, seed=s)),
    ("1210 weights", "Vario", "diagonal", 300, lambda m, n, s: vprop.Vario(
        m.parameters(), lr=0.01, num_data=n, batch_size=n, seed=s)),
    ("1210 weights", "IVON", "diagonal", 300, lambda m, n, s: vprop.IVON(
        m.parameters(), lr=0.1, num_data=n, hess_init=0.1, seed=s, **FAST)),
    ("1210 weights", "Vprop", "diagonal", 300, lambda m, n, s: vprop.Vprop(
        m.parameters(), lr=0.1, num_data=n, seed=s, **FAST)),
]  # fmt: skip
"""Task, method, structure of its posterior, steps, and optimizer from a model, the number of rows and a seed."""


@dataclass(frozen=True)
class Training:
    """How a model is trained: always with the whole batch, so that only the rows make a difference."""

    model: Callable[[], nn.Module]
    optimizer: Optimizer
    steps: int


def train(training: Training, x: Tensor, y: Tensor, seed: int) -> Any:
    """The posterior after training on these rows."""
    torch.manual_seed(seed)
    model = training.model()
    optimizer = training.optimizer(model, len(x), seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    objective = vprop.Objective(model, F.cross_entropy, x, y)
    for _ in range(training.steps):
        optimizer.step(objective)
        scheduler.step()
    return optimizer.posterior(model, likelihood="categorical")


def outputs(posterior: Any, x: Tensor) -> Tensor:
    """Of the model at the posterior mean."""
    return torch.func.functional_call(posterior.model, posterior.mean, (x,)).detach()


def spearman(one: list[float], other: list[float]) -> float:
    """Correlation of ranks; there are no ties among these numbers."""
    ranks = [torch.tensor(v, dtype=torch.float64).argsort().argsort().double() for v in (one, other)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def sensitivity(training: Training, x: Tensor, y: Tensor, seed: int, count: int) -> dict[str, Any]:
    """Rank correlations of one seed, and the pairs that they are made of."""
    posterior = train(training, x, y, seed)
    result, before = posterior.sensitivity((x, y)), outputs(posterior, x)
    losses = F.cross_entropy(before, y, reduction="none")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    loss_changes, output_changes = [], []
    for i in chosen:
        rest = torch.arange(len(x)) != i
        after = outputs(train(training, x[rest], y[rest], seed), x[i : i + 1])
        loss_changes.append(float(F.cross_entropy(after, y[i : i + 1]) - losses[i]))
        output_changes.append(float((after - before[i]).norm()))
    said = result.loss_change[chosen].tolist()
    return {
        "rank correlation, loss": spearman(said, loss_changes),
        "rank correlation, outputs": spearman(result.prediction_change[chosen].norm(dim=1).tolist(), output_changes),
        "rank correlation of the loss itself": spearman(losses[chosen].tolist(), loss_changes),
        "said": said,
        "trained again": loss_changes,
    }


def forgetting(training: Training, x: Tensor, y: Tensor, seed: int, counts: list[int]) -> list[dict[str, Any]]:
    """For each number of forgotten examples the error of one seed."""
    posterior, rows = train(training, x, y, seed), []
    for count in counts:
        gone = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[gone] = False
        again = train(training, x[rest], y[rest], seed)
        row: dict[str, Any] = {"examples": count, "refused": False}
        try:
            forgetful = posterior.forget((x[gone], y[gone]))
        except ValueError:
            rows.append(row | {"refused": True})
            continue
        target = outputs(again, x)
        distances = [float((outputs(p, x) - target).square().mean().sqrt()) for p in (forgetful, posterior)]
        losses = {
            name: float(F.cross_entropy(outputs(p, x[gone]), y[gone]))
            for name, p in (("before", posterior), ("forgotten", forgetful), ("trained again", again))
        }
        rows.append(row | {"error": distances[0] / distances[1], "loss of the forgotten": losses})
    return rows


def run(seeds: range, short: bool) -> list[dict[str, Any]]:
    """All methods, printed as they come."""
    results = []
    for task_name, method, structure, steps, optimizer in METHODS:
        task = TASKS[task_name]
        training = Training(task.model, optimizer, 5 if short else steps)
        whole_x, whole_y = task.load()
        entry: dict[str, Any] = {"task": task_name, "method": method, "structure": structure}
        entry |= {"examples": task.rows, "sensitivity": [], "forgetting": []}
        for seed in seeds:
            rows = torch.randperm(len(whole_x), generator=torch.Generator().manual_seed(1000 + seed))[: task.rows]
            x, y = whole_x[rows], whole_y[rows]
            entry["sensitivity"].append(sensitivity(training, x, y, seed, 8 if short else 30))
            entry["forgetting"].append(forgetting(training, x, y, seed, [1, 10] if short else [1, 3, 10, 30]))
        for key in ("rank correlation, loss", "rank correlation, outputs", "rank correlation of the loss itself"):
            entry[key] = statistics.mean(row[key] for row in entry["sensitivity"])
        print(task_name, method, {key: round(value, 3) for key, value in entry.items() if key.startswith("rank")})
        for rows_of_count in zip(*entry["forgetting"], strict=True):
            errors = [row["error"] for row in rows_of_count if not row["refused"]]
            shown = f"{statistics.median(errors):.3f}" if errors else "none"
            print(
                f"  forget {rows_of_count[0]['examples']}: error {shown}, refused {len(seeds) - len(errors)}",
                flush=True,
            )
        results.append(entry)
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Changes as said against changes after training again, one panel per method."""
    import matplotlib.pyplot as plt

    from vprop.plots.style import BLUE, GREY, save

    figure, panels = plt.subplots(2, -(-len(results) // 2), figsize=(10, 5.4), layout="constrained")
    for axes in panels.flat[len(results) :]:
        axes.axis("off")
    for axes, entry in zip(panels.flat, results, strict=False):
        for row in entry["sensitivity"]:
            axes.plot(row["trained again"], row["said"], "o", color=BLUE, markersize=3, alpha=0.5, markeredgewidth=0)
        axes.axline((0, 0), slope=1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(xlim=(-1e-3, 20), ylim=(-1e-3, 20))
        ranks = entry["rank correlation, loss"]
        axes.set_title(
            f"{entry['task']}, {entry['method']}\n({entry['structure']}): ranks {ranks:.2f}",
            fontsize=8,
            fontweight="normal",
        )
        axes.tick_params(labelsize=6)
    figure.supxlabel("change of an example's loss after training again without it", fontsize=9)
    figure.supylabel("as the posterior says", fontsize=9)
    save(figure, path)


if __name__ == "__main__":
    COMMAND = "python benchmarks/examples_left_out.py --json benchmarks/results/examples-left-out.json"
    run_and_plot(__doc__, COMMAND, run, plot, seeds=3)

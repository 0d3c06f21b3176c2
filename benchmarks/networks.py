"""What the defaults give on networks: accuracy, log-loss and calibration error, against AdamW and SGD.

    python benchmarks/networks.py [--tasks fashion-10k fashion-2k …] [--jobs 2] [--device cuda] [--json FILE]

Every method sees the same batches for the same number of epochs, one gradient a step, with a warm-up over a twentieth
of the steps and a cosine to zero. The step size of each is chosen from its grid by the log-loss on training images that
no run trains on, with a seed of its own (100); reported are seeds 0 to 2 on the test set: tuned, and at the step size
that a new user would take. A posterior predicts with 32 samples. Results are printed as they come.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import vprop
from vprop import metrics
from vprop.lab.data import load
from vprop.lab.environment import environment

SEEDS, TUNING_SEED, SAMPLES = (0, 1, 2), 100, 32


# -- networks --------------------------------------------------------------------------------------------------------


def cnn(norm: bool) -> nn.Module:
    """Two convolutions, 106,000 weights."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [conv, nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Channels that the input lacks are zero."""
        out = F.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return F.relu(out + shortcut)


def resnet20() -> nn.Module:
    """16, 32 and 64 channels, 0.27 million weights."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for i in range(3):
            layers.append(Residual(inputs, outputs, 2 if i == 0 and outputs > 16 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


# -- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A network and what it is trained on: the first images of Fashion-MNIST's training set."""

    model: Callable[[], nn.Module]
    images: int
    epochs: int
    batch: int
    augment: bool = False
    methods: tuple[str, ...] = ("adamw", "vario")


TASKS = {
    "fashion-10k": Task(lambda: cnn(norm=True), 10_000, 5, 64),
    "fashion-2k": Task(lambda: cnn(norm=True), 2_000, 30, 64, methods=("adamw", "vario", "vario-prior-10")),
    "fashion-10k-no-norm": Task(lambda: cnn(norm=False), 10_000, 5, 64),
    "fashion-2k-no-norm": Task(lambda: cnn(norm=False), 2_000, 30, 64),
    "resnet20": Task(
        resnet20, 60_000, 20, 128, augment=True, methods=("sgd", "vario", "vprop-floor-1", "vprop-floor-2")
    ),
    "resnet20-long": Task(resnet20, 60_000, 70, 128, methods=("sgd", "vario")),
    "fashion-10k-long": Task(lambda: cnn(norm=True), 10_000, 70, 64),
}


# -- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An optimizer, the step sizes that are tried, and the one that a new user would take."""

    make: Callable[..., Any]
    rates: tuple[float, ...]
    usual: float


def floored(floor: float, params: Any, lr: float, **facts: Any) -> vprop.Vprop:
    """The natural-gradient step above a floor: where h is small, SGD with momentum and a step size of lr/(10·floor)."""
    likes_sgd = {"betas": (0.9, 0.999), "init_steps": 0, "prior_precision": 5e-4 * facts["num_data"]}
    return vprop.Vprop(params, lr=lr, hess_floor=floor, **likes_sgd, **facts)


METHODS = {
    "adamw": Method(lambda params, lr, **_: torch.optim.AdamW(params, lr=lr), (5e-4, 1e-3, 2e-3, 4e-3), 1e-3),
    "sgd": Method(
        lambda params, lr, **_: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
        (0.05, 0.1, 0.2),
        0.1,
    ),
    **{
        f"vprop-floor-{floor}": Method(functools.partial(floored, floor), (0.5 * floor, floor, 2.0 * floor), floor)
        for floor in (1, 2)
    },
    "vario-prior-10": Method(
        lambda params, lr, **facts: vprop.Vario(params, lr=lr, prior_precision=10.0, **facts),
        (1e-3, 2e-3, 3e-3, 6e-3),
        3e-3,
    ),
    "vario": Method(lambda params, lr, **facts: vprop.Vario(params, lr=lr, **facts), (1e-3, 2e-3, 3e-3, 6e-3), 3e-3),
}


# -- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    method: str
    lr: float
    seed: int
    device: str
    tuning: bool
    """Whether it is judged on images of the training set that it does not train on."""

    def run(self) -> dict[str, Any]:
        """Train and judge."""
        started = time.perf_counter()
        task, device = TASKS[self.task], torch.device(self.device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        data = images()
        count = min(task.images, 50_000) if self.tuning else task.images
        x, y = data.train_x[:count, None].to(device), data.train_y[:count].to(device)
        judged = (
            (data.train_x[50_000:, None], data.train_y[50_000:]) if self.tuning else (data.test_x[:, None], data.test_y)
        )
        torch.manual_seed(self.seed)
        model = task.model().to(device)
        facts = {"num_data": count, "batch_size": task.batch, "seed": self.seed}
        optimizer = METHODS[self.method].make(model.parameters(), lr=self.lr, **facts)
        self._train(task, model, optimizer, x, y)
        result = {"task": self.task, "method": self.method, "lr": self.lr, "seed": self.seed, "tuning": self.tuning}
        model.eval()
        judged_x, judged_y = judged[0].to(device), judged[1]
        with torch.no_grad():
            mean = torch.cat(
                [model(part).softmax(-1) for part in judged_x.split(250 if device.type == "cpu" else 2000)]
            ).cpu()
        result["mean"] = scores(mean, judged_y)
        if isinstance(optimizer, vprop.VariationalOptimizer):
            posterior = optimizer.posterior(model, likelihood="categorical")
            parts = [
                posterior.predict(part, num_samples=SAMPLES).probs
                for part in judged_x.split(250 if device.type == "cpu" else 2000)
            ]
            result["posterior"] = scores(torch.cat(parts).cpu(), judged_y)
        return result | {"seconds": round(time.perf_counter() - started, 1)}

    def _train(self, task: Task, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        generator = torch.Generator(x.device).manual_seed(self.seed)
        batches = len(x) // task.batch
        steps = task.epochs * batches
        schedule = OneCycleLR(optimizer, self.lr, steps, pct_start=0.05, cycle_momentum=False)
        if isinstance(optimizer, vprop.VariationalOptimizer):
            optimizer.attach(model)
        model.train()
        for _ in range(task.epochs):
            order = torch.randperm(len(x), generator=generator, device=x.device)
            for rows in order[: batches * task.batch].split(task.batch):
                images = augmented(x[rows], generator) if task.augment else x[rows]
                optimizer.zero_grad()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
                    loss = F.cross_entropy(model(images), y[rows])
                loss.backward()
                optimizer.step()
                schedule.step()


@functools.cache
def images() -> Any:
    """Fashion-MNIST, read once in each process."""
    return load("fashion_mnist")


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flipped half of the time, and moved by up to four pixels."""
    count, _, height, width = x.shape
    flip = torch.rand(count, 1, 1, 1, generator=generator, device=x.device) < 0.5
    padded = F.pad(torch.where(flip, x.flip(-1), x), (4, 4, 4, 4))
    shift = torch.randint(0, 9, (2, count), generator=generator, device=x.device)
    rows = (shift[0, :, None] + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (shift[1, :, None] + torch.arange(width, device=x.device))[:, None, None, :]
    return padded[torch.arange(count, device=x.device)[:, None, None, None], 0, rows, columns]


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, log-loss in nats, calibration error in 15 bins."""
    return {
        "accuracy": float(metrics.accuracy(probs, labels)),
        "nll": float(metrics.nll(probs, labels)),
        "ece": float(metrics.reliability(probs, labels, bins=15).expected_calibration_error),
    }


# -- all of them -----------------------------------------------------------------------------------------------------


def run_all(jobs: Iterable[Job], processes: int) -> list[dict[str, Any]]:
    """Run the jobs side by side, each result printed as it comes."""
    results = []
    with get_context("spawn").Pool(processes) as pool:
        for result in pool.imap_unordered(Job.run, list(jobs)):
            print(json.dumps(result), flush=True)
            results.append(result)
    return results


def best_rates(results: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The step size with the smallest log-loss, of the posterior where there is one, by task and method."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for result in results:
        loss = result.get("posterior", result["mean"])["nll"]
        key = result["task"], result["method"]
        if not math.isnan(loss):
            best[key] = min(best.get(key, (math.inf, 0.0)), (loss, result["lr"]))
    return {key: lr for key, (_, lr) in best.items()}


def table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, for each task, method and step size."""
    rows = []
    keys = sorted({(r["task"], r["method"], r["lr"]) for r in results})
    for task, method, lr in keys:
        own = [r for r in results if (r["task"], r["method"], r["lr"]) == (task, method, lr)]
        row: dict[str, Any] = {"task": task, "method": method, "lr": lr, "seeds": len(own)}
        for kind in ("mean", "posterior"):
            if kind in own[0]:
                for score in ("accuracy", "nll", "ece"):
                    values = [r[kind][score] for r in own]
                    spread = statistics.stdev(values) if len(values) > 1 else 0.0
                    row[f"{kind}_{score}"] = [statistics.mean(values), spread]
        rows.append(row)
    return rows


def main() -> None:
    """Tune, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["fashion-10k", "fashion-2k"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--usual-only", action="store_true", help="only the step sizes that a new user would take")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = [(task, method) for task in arguments.tasks for method in TASKS[task].methods]
    rates = {pair: {METHODS[pair[1]].usual} for pair in pairs}
    tried: list[dict[str, Any]] = []
    if not arguments.usual_only:
        grid = [(*pair, lr) for pair in pairs for lr in METHODS[pair[1]].rates]
        tried = run_all((Job(t, m, lr, TUNING_SEED, arguments.device, True) for t, m, lr in grid), arguments.jobs)
        for pair, lr in best_rates(tried).items():
            rates[pair].add(lr)
    final = [Job(*pair, lr, seed, arguments.device, False) for pair in pairs for lr in rates[pair] for seed in SEEDS]
    rows = table(run_all(final, arguments.jobs))
    for row in rows:
        kind = "posterior" if "posterior_nll" in row else "mean"
        numbers = " / ".join("{:.4f} ± {:.4f}".format(*row[f"{kind}_{score}"]) for score in ("accuracy", "nll", "ece"))
        print(f"{row['task']:20} {row['method']:10} lr {row['lr']:<7g} {numbers}")
    if arguments.json:
        command = "python benchmarks/networks.py --tasks " + " ".join(arguments.tasks)
        command += " --usual-only" if arguments.usual_only else ""
        command += "" if arguments.device == "cpu" else f" --device {arguments.device}"
        result = {"command": command, "environment": environment(), "rows": rows, "tuning": tried}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

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
from torch import Tensor, nn

import vprop
from vprop import metrics
from vprop.lab.data import load
from vprop.lab.deep.networks import resnet20
from vprop.lab.deep.training import Trainer, epochs, flips_and_crops, one_cycle
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


# -- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A network and what it is trained on: the first images of Fashion-MNIST's training set."""

    model: Callable[[], nn.Module]
    images: int
    epochs: int
    batch: int
    augment: bool = False
    look_every: int = 0
    """After how many epochs the accuracy is looked at; 0 is at the end only."""
    methods: tuple[str, ...] = ("adamw", "vario")


TASKS = {
    "fashion-10k": Task(lambda: cnn(norm=True), 10_000, 5, 64),
    "fashion-2k": Task(lambda: cnn(norm=True), 2_000, 30, 64, methods=("adamw", "vario", "vario-prior-10")),
    "fashion-10k-no-norm": Task(lambda: cnn(norm=False), 10_000, 5, 64),
    "fashion-2k-no-norm": Task(lambda: cnn(norm=False), 2_000, 30, 64),
    "resnet20": Task(
        resnet20, 60_000, 20, 128, augment=True, methods=("sgd", "vario", "vprop-floor-1", "vprop-floor-2")
    ),
    "resnet20-long": Task(resnet20, 60_000, 70, 128, look_every=5, methods=("sgd", "vario", "vprop-floor-2")),
    "fashion-10k-long": Task(lambda: cnn(norm=True), 10_000, 70, 64, look_every=5),
}


# -- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An optimizer, the step sizes that are tried, and the one that a new user would take."""

    make: Callable[..., Any]
    rates: tuple[float, ...]
    usual: float


def adamw(params: Any, lr: Any, capturable: bool = False, **_: Any) -> torch.optim.Optimizer:
    """With torch's own weight decay, 0.01."""
    return torch.optim.AdamW(params, lr=lr, capturable=capturable)


def sgd(params: Any, lr: Any, capturable: bool = False, **_: Any) -> torch.optim.Optimizer:
    """As ResNets are trained; the fused one, for its step size may be a tensor in a recorded step."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=capturable)


def floored(floor: float, params: Any, lr: float, **facts: Any) -> vprop.Vprop:
    """The natural-gradient step above a floor: where h is small, SGD with momentum and a step size of lr/(10·floor)."""
    likes_sgd = {"betas": (0.9, 0.999), "init_steps": 0, "prior_precision": 5e-4 * facts["num_data"]}
    return vprop.Vprop(params, lr=lr, hess_floor=floor, **likes_sgd, **facts)


METHODS = {
    "adamw": Method(adamw, (5e-4, 1e-3, 2e-3, 4e-3), 1e-3),
    "sgd": Method(sgd, (0.05, 0.1, 0.2), 0.1),
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
        if device.type == "cuda":
            facts["capturable"] = True
        optimizer = METHODS[self.method].make(
            model.parameters(), lr=torch.tensor(float(self.lr), device=device), **facts
        )
        judged = judged[0].to(device), judged[1]
        course = self._train(task, model, optimizer, x, y, judged)
        result = {"task": self.task, "method": self.method, "lr": self.lr, "seed": self.seed, "tuning": self.tuning}
        if course:
            result["course"] = course
        result["mean"] = scores(probabilities(model, judged[0]), judged[1])
        if isinstance(optimizer, vprop.VariationalOptimizer):
            posterior = optimizer.posterior(model, likelihood="categorical")
            parts = [
                posterior.predict(part, num_samples=SAMPLES).probs for part in judged[0].split(part_size(judged[0]))
            ]
            result["posterior"] = scores(torch.cat(parts).cpu(), judged[1])
        return result | {"seconds": round(time.perf_counter() - started, 1)}

    def _train(self, task: Task, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, judged: Any) -> list[float]:
        """Train, and say how accurate the mean was on the way, if the task asks for it."""
        generator = torch.Generator(x.device).manual_seed(self.seed)
        rates = one_cycle(self.lr, task.epochs * (len(x) // task.batch))
        trainer = Trainer(model, optimizer, rates, task.batch)
        course = []
        change = flips_and_crops(generator) if task.augment else None
        for epoch, (images, labels) in enumerate(epochs(x, y, task.epochs, generator, change), 1):
            trainer.run_epoch(images, labels)
            if task.look_every and epoch % task.look_every == 0:
                course.append(scores(probabilities(model, judged[0]), judged[1])["accuracy"])
        return course


@functools.cache
def images() -> Any:
    """Fashion-MNIST, read once in each process."""
    return load("fashion_mnist")


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """At the mean, on the CPU."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).softmax(-1) for part in x.split(part_size(x))]).cpu()


def part_size(x: Tensor) -> int:
    """Images that predict together."""
    return 250 if x.device.type == "cpu" else 2000


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
        if "course" in own[0]:
            row["course"] = [r["course"] for r in own]
        rows.append(row)
    return rows


def main() -> None:
    """Tune, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["fashion-10k", "fashion-2k"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="only these of a task's methods")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--usual-only", action="store_true", help="only the step sizes that a new user would take")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = [
        (task, method)
        for task in arguments.tasks
        for method in TASKS[task].methods
        if not arguments.methods or method in arguments.methods
    ]
    rates = {pair: {METHODS[pair[1]].usual} for pair in pairs}
    tried: list[dict[str, Any]] = []
    if not arguments.usual_only:
        grid = [(*pair, lr) for pair in pairs for lr in METHODS[pair[1]].rates]
        tried = run_all((Job(t, m, lr, TUNING_SEED, arguments.device, True) for t, m, lr in grid), arguments.jobs)
        for pair, lr in best_rates(tried).items():
            rates[pair].add(lr)
    final = [
        Job(*pair, lr, seed, arguments.device, False)
        for pair in pairs
        for lr in rates[pair]
        for seed in SEEDS[: arguments.seeds]
    ]
    rows = table(run_all(final, arguments.jobs))
    for row in rows:
        kind = "posterior" if "posterior_nll" in row else "mean"
        numbers = " / ".join("{:.4f} ± {:.4f}".format(*row[f"{kind}_{score}"]) for score in ("accuracy", "nll", "ece"))
        print(f"{row['task']:20} {row['method']:10} lr {row['lr']:<7g} {numbers}")
    if arguments.json:
        command = "python benchmarks/networks.py --tasks " + " ".join(arguments.tasks)
        command += " --methods " + " ".join(arguments.methods) if arguments.methods else ""
        command += f" --seeds {arguments.seeds}" if arguments.seeds < len(SEEDS) else ""
        command += " --usual-only" if arguments.usual_only else ""
        command += "" if arguments.device == "cpu" else f" --device {arguments.device}"
        result = {"command": command, "environment": environment(), "rows": rows, "tuning": tried}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

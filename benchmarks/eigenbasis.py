"""What the eigenbasis gives: posteriors against exact ones, regression, and what a step and its state cost.

    python benchmarks/eigenbasis.py a1a [--json FILE]             # logistic regression against exact inference, CPU
    python benchmarks/eigenbasis.py usps [--json FILE]            # the same of threes and fives
    python benchmarks/eigenbasis.py concrete [--json FILE]        # a network of 50 units; also energy, on a CPU
    python benchmarks/eigenbasis.py step --device cuda [...]      # the time of a training step of a GPT of 124 million
    python benchmarks/eigenbasis.py launches [...]                # operations of a step of small networks
    python benchmarks/eigenbasis.py memory [...]                  # what is kept beside the weights of that GPT
    python benchmarks/eigenbasis.py picture --out FILE            # two correlated weights under three structures

``--short`` runs a task in miniature, to see that it runs. Settings are chosen on other seeds, or on data that are held
out of the training data, than those that are reported. Larger networks are trained by ``vprop compare deep``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vprop
from vprop.baselines import exact_vi_logistic
from vprop.functional.logistic import elbo
from vprop.lab.data import load
from vprop.lab.environment import environment

DATA = Path(os.environ.get("VPROP_DATA", "."))


# -- logistic regression ---------------------------------------------------------------------------------------------

SEEDS, TUNING_SEEDS = (0, 1, 2), (100,)
RATES = (0.05, 0.1)
EPOCHS, BATCH = 100, 32
PUBLISHED = {
    "a1a": {"mean field": -614.3, "SLANG-1": -604.4, "SLANG-10": -599.0, "full": -590.3},
    "usps": {"mean field": -205.7, "SLANG-1": -161.4, "SLANG-10": -148.6, "full": -143.2},
}
"""SLANG's repository: 500 epochs in batches of 32 and 64; of USPS another half of the same 1,540 digits."""


def binary_data(name: str, split: int) -> tuple[Tensor, Tensor, float]:
    """Inputs, labels and the prior's precision; of USPS a random half of the threes and fives, scaled to [−1, 1]."""
    if name == "a1a":
        data = load("a1a")
        return data.train_x.double(), data.train_y.double(), 2.8072
    file = np.load(DATA / "usps" / "usps.npz")
    x = np.concatenate([file["X_train"], file["X_test"]])
    y = np.concatenate([file["y_train"], file["y_test"]])
    chosen = np.flatnonzero((y == 3) | (y == 5))
    half = chosen[np.random.RandomState(split).permutation(len(chosen))[: len(chosen) // 2]]
    return torch.from_numpy(2 * x[half] - 1).double(), torch.from_numpy(y[half] == 3).double(), 25.0


def binary_methods() -> dict[str, Any]:
    """Both learn from one gradient a step."""
    mini = {"batch_size": BATCH, "init_steps": 10, "betas": (0.9, 0.99)}
    return {
        "diagonal": lambda p, **k: vprop.Vprop(p, **mini, **k),
        "eigenbasis": lambda p, **k: vprop.Vprop(p, **mini, structure="eigenbasis", **k),
    }


def train_binary(make: Any, x: Tensor, y: Tensor, precision: float, *, epochs: int, lr: float, seed: int) -> float:
    """The exact ELBO after training on mini-batches in a random order, with a step size that falls to zero."""
    model = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make(model.parameters(), lr=lr, num_data=len(y), prior_precision=precision, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = x.float(), y.float()
    steps, step = epochs * (len(y) // BATCH), 0
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator)[: len(y) // BATCH * BATCH].split(BATCH):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
            step += 1

            def closure(rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(inputs[rows]).squeeze(-1), labels[rows])
                loss.backward()
                return loss

            optimizer.step(closure)
    posterior = optimizer.posterior(model)
    mean = posterior.mean["weight"].flatten().double()
    if hasattr(posterior, "covariance_of"):
        return float(elbo(x, y, mean, posterior.covariance_of("weight"), precision))
    return float(elbo(x, y, mean, posterior.variance["weight"].flatten().double(), precision))


def logistic(name: str, short: bool) -> list[dict[str, Any]]:
    """One row for each method, beside the exact values of the same data."""
    seeds, epochs = (SEEDS[:1], 2) if short else (SEEDS, EPOCHS)
    exact: dict[str, list[float]] = {"diagonal": [], "full": []}
    for seed in seeds if name == "usps" else (0,):
        for structure, values in exact.items():
            x, y, precision = binary_data(name, seed)
            values.append(exact_vi_logistic(x, y, precision, structure, tolerance=1e-4).elbo)  # type: ignore[arg-type]
    known = {structure: statistics.mean(values) for structure, values in exact.items()}
    print(f"{name}: exact {known}, published {PUBLISHED[name]}", flush=True)
    rows = []
    for label, make in binary_methods().items():

        def run(lr: float, seed: int, make: Any = make) -> float:
            return train_binary(make, *binary_data(name, seed), epochs=epochs, lr=lr, seed=seed)

        tried = {lr: statistics.mean(run(lr, seed) for seed in TUNING_SEEDS) for lr in RATES[: 1 if short else None]}
        best = max(tried, key=tried.__getitem__)
        values = [run(best, seed) for seed in seeds]
        row = {
            "data": name,
            "method": label,
            "lr": best,
            "epochs": epochs,
            "batch": BATCH,
            "elbo": statistics.mean(values),
            "elbo_std": deviation(values),
            "exact": known,
            "published": PUBLISHED[name],
            "tried": tried,
        }
        rows.append(row)
        print(f"{name} {label:12} lr {best:<5g} {row['elbo']:.2f} ± {row['elbo_std']:.2f}", flush=True)
    return rows


# -- regression ------------------------------------------------------------------------------------------------------

UCI_STRUCTURES = ("diagonal", "eigenbasis")
UCI_RATE, UCI_LIMITS, UCI_SPLITS, UCI_STEPS = 0.01, (0.1, 0.2, 0.4, math.inf), 20, 2500


def train_regression(
    x: Tensor, y: Tensor, structure: str, lr: float, limit: float, steps: int, seed: int
) -> tuple[Any, nn.Module]:
    """A network of two layers, with 50 hidden units, and a learned noise; returns the posterior and the likelihood."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    likelihood = vprop.GaussianLikelihood()
    batch = 64
    optimizer = vprop.Vario(
        model.parameters(),
        lr=lr,
        num_data=len(x),
        batch_size=batch,
        noise_limit=limit,
        structure=structure,
        seed=seed,
        basis_every=10,
    )
    noise = torch.optim.Adam(likelihood.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        share = min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in (*optimizer.param_groups, *noise.param_groups):
            group["lr"] = lr * share
        if len(order) < batch:
            order = torch.randperm(len(x), generator=generator)
        rows, order = order[:batch], order[batch:]
        noise.zero_grad()
        optimizer.zero_grad()
        with optimizer.sampled_params():
            likelihood(model(x[rows]).squeeze(-1), y[rows]).backward()
        optimizer.step()
        noise.step()
    return optimizer.posterior(model, likelihood=likelihood), likelihood


def log_likelihood(posterior: Any, x: Tensor, y: Tensor, scale: float) -> float:
    """The mean log-density of targets, in their own units, under a mixture over 64 samples of the weights."""
    prediction = posterior.predict(x, 64)
    means, variance = prediction.samples.squeeze(-1), float(prediction.aleatoric_variance.mean())
    densities = torch.distributions.Normal(means, math.sqrt(variance)).log_prob(y)
    return float((densities.logsumexp(0) - math.log(len(means))).mean()) - math.log(scale)


def uci_score(name: str, structure: str, limit: float, split: int, *, held_out: bool, steps: int) -> float:
    """The log-likelihood of a split's test rows; of the last tenth of its training rows, to choose a limit by.

    Rows of a split are in a random order.
    """
    file = np.load(DATA / "uci" / name / f"{name}.npz")
    all_x, all_y = torch.from_numpy(file["X"]).float(), torch.from_numpy(file["y"]).float().flatten()
    train, test = file["train_idx"][split], file["test_idx"][split]
    if held_out:
        train, test = train[: -len(train) // 10], train[-len(train) // 10 :]
    center, spread = all_x[train].mean(0), all_x[train].std(0).clamp_min(1e-6)
    shift, scale = float(all_y[train].mean()), float(all_y[train].std())
    x, y = (all_x - center) / spread, (all_y - shift) / scale
    posterior, _ = train_regression(x[train], y[train], structure, UCI_RATE, limit, steps, split)
    return log_likelihood(posterior, x[test], y[test], scale)


def deviation(values: list[float]) -> float:
    """The standard deviation, 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def uci(name: str, short: bool) -> list[dict[str, Any]]:
    """Log-likelihoods over all splits of both structures: with the limit on the noise that each chose, and without one.

    Every split chooses by itself, on training rows that are held out for that; the step size is the one of the
    library's regressor. The gain is the difference on the same split.
    """
    splits, steps = range(1 if short else UCI_SPLITS), 30 if short else UCI_STEPS
    limits = UCI_LIMITS[-2 if short else None :]
    tried = {structure: [dict[float, float]() for _ in splits] for structure in UCI_STRUCTURES}
    chosen = {structure: [0.0 for _ in splits] for structure in UCI_STRUCTURES}
    values: dict[str, dict[str, list[float]]] = {kind: {s: [] for s in UCI_STRUCTURES} for kind in ("chosen", "none")}
    for split in splits:
        for structure in UCI_STRUCTURES:

            def score(limit: float, held_out: bool, split: int = split, structure: str = structure) -> float:
                return uci_score(name, structure, limit, split, held_out=held_out, steps=steps)

            found = tried[structure][split] = {limit: score(limit, True) for limit in limits}
            best = chosen[structure][split] = max(found, key=found.__getitem__)
            values["none"][structure].append(score(math.inf, False))
            values["chosen"][structure].append(
                values["none"][structure][-1] if math.isinf(best) else score(best, False)
            )
        shown = [f"{s} {values['chosen'][s][-1]:.3f} ({chosen[s][split]:g})" for s in UCI_STRUCTURES]
        print(f"{name} split {split}: {', '.join(shown)}", flush=True)
    rows = []
    for kind, of_structures in values.items():
        gains = [b - a for a, b in zip(*of_structures.values(), strict=True)]
        for structure, scores in of_structures.items():
            row: dict[str, Any] = {"data": name, "structure": structure, "noise_limit": kind, "lr": UCI_RATE}
            row |= {"log_likelihood": statistics.mean(scores), "std": deviation(scores), "values": scores}
            row |= {"gain": statistics.mean(gains), "splits_won": sum(gain > 0 for gain in gains)}
            row["gain_error"] = deviation(gains) / math.sqrt(len(gains))
            if kind == "chosen":
                row["limits"] = [limit if math.isfinite(limit) else None for limit in chosen[structure]]
                row["held_out"] = {
                    f"{limit:g}": statistics.mean(o[limit] for o in tried[structure]) for limit in limits
                }
            rows.append(row)
            print(f"{name} {kind:6} {structure:10} {row['log_likelihood']:.3f} ± {row['std']:.3f}", flush=True)
        row = rows[-1]
        print(f"{name} {kind:6} gain {row['gain']:.3f} ± {row['gain_error']:.3f}, {row['splits_won']} won", flush=True)
    return rows


# -- the command -----------------------------------------------------------------------------------------------------


def words_without_json(words: list[str]) -> list[str]:
    """What the command was, but for the file that it is written to."""
    kept = [word for word in words if not word.startswith("--json=")]
    return [word for word, before in zip(kept, ["", *kept], strict=False) if "--json" not in (word, before)]


def main() -> None:
    """Run a task, and write what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = ["a1a", "usps", "concrete", "energy", "step", "launches", "memory", "picture"]
    parser.add_argument("task", choices=tasks)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--short", action="store_true", help="in miniature")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--max-basis-dim", type=int, default=1024, help="of step")
    parser.add_argument("--out", type=Path, help="of picture: a PNG file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    if arguments.task in PUBLISHED:
        rows = logistic(arguments.task, arguments.short)
    elif arguments.task in ("concrete", "energy"):
        rows = uci(arguments.task, arguments.short)
    else:
        file = "cost" if arguments.task in ("step", "memory") else arguments.task
        module = importlib.import_module(f"eigenbasis_{file}")
        rows = getattr(module, arguments.task)(arguments)
    if arguments.json:
        command = f"python benchmarks/eigenbasis.py {' '.join(words_without_json(sys.argv[1:]))}"
        result = {"command": command, "environment": environment(), "rows": rows}
        result["seconds"] = round(time.perf_counter() - started)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

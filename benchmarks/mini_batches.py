"""How right a posterior from mini-batches is: logistic regression, where the best diagonal Gaussian is known exactly.

    python benchmarks/mini_batches.py [--json FILE]

Every method has 3,000 gradients of a mini-batch, and a step size that falls linearly to zero. Reported are the ELBO
over all training data (exact quadrature, no sampling), and the ratio of the variances to those of exact mean-field
inference: the median over the weights, and the 10th and 90th percentile; and the log-loss of the posterior predictive
on the test set. Step sizes were chosen on seeds 100 and 101 from 0.01, 0.02, 0.05, 0.1 and 0.2 (Vario: a tenth of that)
by the ELBO; reported are seeds 0 to 2.
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
from torch import Tensor

import vprop
from vprop.baselines import exact_vi_logistic
from vprop.functional.logistic import elbo, predictive_log_loss
from vprop.lab.data import load
from vprop.lab.environment import environment

GRADIENTS, SEEDS, TUNING_SEEDS = 3000, (0, 1, 2), (100, 101)
TASKS = {"a1a": 2.8072, "australian": 1.0}
"""Data sets, with the prior's precision."""
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)


def methods(batch: int) -> dict[str, tuple[int, float, Callable[..., Any]]]:
    """Each with the gradients that a step takes, the scale of its step sizes, and its optimizer."""
    fast = {"betas": (0.9, 0.99)}
    pairs = {"mc_samples": 2, "antithetic": True}
    return {
        "Vprop, N·ĝ² (the paper's)": (1, 1.0, lambda p, **k: vprop.Vprop(p, **fast, **k)),
        "Vprop, centred pairs": (2, 1.0, lambda p, **k: vprop.Vprop(p, **fast, **pairs, centered=True, **k)),
        "IVON, pairs": (2, 1.0, lambda p, **k: vprop.IVON(p, **fast, **pairs, **k)),
        "Vprop, batch_size=M": (1, 1.0, lambda p, **k: vprop.Vprop(p, **fast, batch_size=batch, init_steps=10, **k)),
        "the same, β₂ = 0.999": (
            1,
            1.0,
            lambda p, **k: vprop.Vprop(p, betas=(0.9, 0.999), batch_size=batch, init_steps=10, **k),
        ),
        "Vario": (1, 0.1, lambda p, **k: vprop.Vario(p, batch_size=batch, **k)),
        "Vario, no noise limit": (1, 0.1, lambda p, **k: vprop.Vario(p, batch_size=batch, noise_limit=math.inf, **k)),
    }


def train(
    make: Callable[..., Any], x: Tensor, y: Tensor, precision: float, batch: int, steps: int, lr: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance after some steps on mini-batches in a random order."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.zeros(x.shape[1]))
    optimizer = make([weight], lr=lr, num_data=len(y), prior_precision=precision, seed=seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        if len(order) < batch:
            order = torch.randperm(len(y), generator=generator)
        rows, order = order[:batch], order[batch:]

        def closure(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(x[rows] @ weight, y[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
    (marginal,) = optimizer.marginals()
    return marginal.mean.double(), marginal.variance.double()


def scores(name: str, batch: int) -> list[dict[str, Any]]:
    """One row for each method."""
    data, precision = load(name), TASKS[name]
    x, y = data.train_x.double(), data.train_y.double()
    exact = exact_vi_logistic(x, y, precision, structure="diagonal")
    test_x, test_y = data.test_x.double(), data.test_y.double()
    log_loss = float(predictive_log_loss(test_x, test_y, exact.mean, exact.variance))
    rows = [{"data": name, "batch": batch, "method": "exact", "elbo": float(exact.elbo), "test_log_loss": log_loss}]
    print(f"{name:10} exact {rows[0]['elbo']:.1f}, test log-loss {log_loss:.4f}", flush=True)
    for label, (gradients, scale, make) in methods(batch).items():
        steps = GRADIENTS // gradients

        def score(lr: float, seed: int, steps: int = steps, make: Any = make) -> tuple[float, list[float], float]:
            mean, variance = train(make, x.float(), y.float(), precision, batch, steps, lr, seed)
            ratio = variance / exact.variance
            quantiles = torch.quantile(ratio, torch.tensor([0.5, 0.1, 0.9], dtype=ratio.dtype))
            log_loss = float(predictive_log_loss(test_x, test_y, mean, variance))
            return float(elbo(x, y, mean, variance, precision)), quantiles.tolist(), log_loss

        tried = {rate * scale: statistics.mean(score(rate * scale, seed)[0] for seed in TUNING_SEEDS) for rate in RATES}
        best = max(tried, key=tried.__getitem__)
        results = [score(best, seed) for seed in SEEDS]
        rows.append(
            {
                "data": name,
                "batch": batch,
                "method": label,
                "lr": best,
                "elbo": statistics.mean(result[0] for result in results),
                "elbo_std": statistics.stdev(result[0] for result in results),
                "variance_ratio": [statistics.mean(result[1][i] for result in results) for i in range(3)],
                "test_log_loss": statistics.mean(result[2] for result in results),
                "tried": tried,
            }
        )
        row = rows[-1]
        ratios = "{:.2f} ({:.2f}–{:.2f})".format(*row["variance_ratio"])
        bound = f"{row['elbo']:8.1f} ± {row['elbo_std']:.1f}"
        print(
            f"{name:10} batch {batch:2}  {label:28} lr {best:<6g} {bound}  {ratios}  {row['test_log_loss']:.4f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in TASKS for batch in (8, 32) for row in scores(name, batch)]
    if arguments.json:
        result = {"command": "python benchmarks/mini_batches.py", "environment": environment(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a step of a small network costs: Python, mostly. Ours in all three loops, as a ratio to torch's RMSprop.

    python benchmarks/small_step.py [--json FILE]

A network of six tensors on one CPU thread. Forward and backward, which all have in common, are timed by themselves and
subtracted; the contenders take turns, and the ratio is between medians of one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import vprop
from vprop.lab.environment import environment

ROUNDS, STEPS_A_ROUND = 300, 5


def contenders() -> dict[str, Callable[[], Any]]:
    """One training step of each, with a network of its own."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 20, generator=generator), torch.randint(0, 5, (32,), generator=generator)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 5))

    def backward(model: nn.Module, clear: Callable[[], Any]) -> Any:
        clear()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def plain(model: nn.Module, optimizer: Any) -> Callable[[], Any]:
        def step() -> None:
            backward(model, optimizer.zero_grad)
            optimizer.step()

        return step

    def closure(model: nn.Module, optimizer: Any) -> Callable[[], Any]:
        return lambda: optimizer.step(lambda: backward(model, optimizer.zero_grad))

    def context(model: nn.Module, optimizer: Any) -> Callable[[], Any]:
        def step() -> None:
            with optimizer.sampled_params():
                backward(model, optimizer.zero_grad)
            optimizer.step()

        return step

    models = [network() for _ in range(5)]
    ours = [vprop.Vprop(model.parameters(), num_data=1000) for model in models[2:]]
    ours[2].attach(models[4])
    return {
        "gradient alone": lambda: backward(models[0], models[0].zero_grad),
        "RMSprop": plain(models[1], torch.optim.RMSprop(models[1].parameters())),
        "Vprop closure": closure(models[2], ours[0]),
        "Vprop context": context(models[3], ours[1]),
        "Vprop attach": plain(models[4], ours[2]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the medians and ratios to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = contenders()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(ROUNDS + 20):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                step()
            if round_number >= 20:  # the first ones warm up
                times[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
    medians = {name: statistics.median(values) for name, values in times.items()}
    gradient = medians["gradient alone"]
    rows = [
        {"name": name, "seconds": median, "step_over_rmsprop": (median - gradient) / (medians["RMSprop"] - gradient)}
        for name, median in medians.items()
        if name != "gradient alone"
    ]
    for row in rows:
        print(f"{row['name']:15} {1e6 * row['seconds']:7.1f} µs, of the step {row['step_over_rmsprop']:.2f} × RMSprop")
    if arguments.json is not None:
        command = f"python benchmarks/small_step.py --json {arguments.json}"
        result = {"command": command, "environment": environment(), "gradient_alone_seconds": gradient, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The way of one step through the code: how many files, functions and calls, of ours and of torch's RMSprop.

    python benchmarks/trace_step.py [--json FILE] [--functions]

A model of eight tensors makes three steps, and a fourth one is traced. Counted are the calls of Python functions that
lie in the package of the optimizer (``vprop``; ``torch.optim`` for RMSprop): gradients and torch's own operations are
the same for all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import vprop
from vprop.lab.environment import environment

Calls = Counter[tuple[str, str]]
"""How often each function was called, by file and name."""


def model_of_eight_tensors() -> nn.Module:
    """Four layers with their biases."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def traced(action: Callable[[], Any], package: str) -> Calls:
    """The calls inside a package while ``action`` runs."""
    calls: Calls = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and package in frame.f_code.co_filename:
            calls[frame.f_code.co_filename.split(package)[-1], frame.f_code.co_qualname] += 1

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def step_of(optimizer: Any, model: nn.Module, loop: str) -> Callable[[], Any]:
    """One step in a training loop."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    if loop == "attach":
        optimizer.attach(model)

    def backward() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def in_a_block() -> None:
        with optimizer.sampled_params():
            backward()
        optimizer.step()

    def plain() -> None:
        backward()
        optimizer.step()

    return {"closure": lambda: optimizer.step(backward), "context": in_a_block}.get(loop, plain)


def row(name: str, loop: str, make: Callable[[nn.Module], Any], package: str) -> tuple[dict[str, Any], Calls]:
    """What a contender's step is."""
    model = model_of_eight_tensors()
    step = step_of(make(model), model, loop)
    for _ in range(3):
        step()
    calls = traced(step, package)
    counts = {"files": len({file for file, _ in calls}), "functions": len(calls), "calls": sum(calls.values())}
    return {"name": name, "loop": loop, **counts}, calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--functions", action="store_true", help="list the functions of each file")
    arguments = parser.parse_args()
    ours, rows = f"{Path(vprop.__file__).parent.name}/", []
    for name, fused in (("Vprop fused", None), ("Vprop portable", False)):
        for loop in ("closure", "context", "attach"):
            rows.append(row(name, loop, lambda m, f=fused: vprop.Vprop(m.parameters(), num_data=100, fused=f), ours))
    rows.append(row("RMSprop", "plain", lambda m: torch.optim.RMSprop(m.parameters()), "torch/optim/"))
    for counts, calls in rows:
        print("{name:15} {loop:8} files {files:3} functions {functions:4} calls {calls:5}".format(**counts))
        if arguments.functions:
            for file in sorted({file for file, _ in calls}):
                names = [f"{name}×{count}" for (where, name), count in calls.items() if where == file]
                print(f"    {file}: {', '.join(names)}")
    if arguments.json is not None:
        command = f"python benchmarks/trace_step.py --json {arguments.json}"
        result = {"command": command, "environment": environment(), "rows": [counts for counts, _ in rows]}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

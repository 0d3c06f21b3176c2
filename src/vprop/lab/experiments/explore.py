"""A function with many minima: Newton's method and gradient descent stop in the nearest, sampling gets away from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vprop import VON, VONG, Objective, Vprop
from vprop.baselines import Newton
from vprop.lab.engine.grid import repeat
from vprop.lab.engine.job import Job
from vprop.lab.engine.pool import Pool
from vprop.lab.environment import environment

GLOBAL_MINIMUM = (1.0, 0.5)
RIPPLE, BOWL, FREQUENCY = 0.45, 0.12, 2.0
START = (-1.8, -1.6)
WIDE, NARROW = 4.0, 10.0
"""Play the part of the number of examples, N: it decides how wide the posterior is against the ripples."""
PRIOR_PRECISION = 0.1
REACHED = 0.75
"""A run is a success if it ends this near the global minimum: half a ripple."""
STEPS = 300

_NATURAL: dict[str, Any] = {"lr": 0.1, "betas": (0.0, 0.9), "hess_init": 0.5, "clip_radius": 1.0}
_PAIR = {"mc_samples": 2, "antithetic": True, "centered": True}
METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Gradient descent": (torch.optim.SGD, {"lr": 0.1}),
    "Newton": (Newton, {"lr": 0.5, "clip_radius": 1.0}),
    "Vprop-0": (Vprop, _NATURAL | {"mc_samples": 0}),
    "Vprop-1": (Vprop, _NATURAL),
    "VON-1": (VON, _NATURAL),
    "VONG-2, centred (ours)": (VONG, _NATURAL | _PAIR),
}
SAMPLING = ("Vprop-1", "VON-1", "VONG-2, centred (ours)")


class Landscape(nn.Module):
    """ℓ(θ) = a bowl around the global minimum with ripples: a·‖θ−c‖² + r·Σ(1 − cos ω(θⱼ−cⱼ))."""

    def __init__(self, start: tuple[float, float] = START) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The value at the position, for as many examples as ``x`` has rows."""
        return landscape(self.position).expand(len(x))


def landscape(position: Tensor) -> Tensor:
    """The value at positions, along the last dimension."""
    distance = position - torch.tensor(GLOBAL_MINIMUM, dtype=position.dtype)
    return (BOWL * distance.square() + RIPPLE * (1 - (FREQUENCY * distance).cos())).sum(-1)


@dataclass(frozen=True)
class Walk(Job):
    """One method from the start, with one seed."""

    label: str
    seed: int
    num_data: float = WIDE
    steps: int = STEPS

    def compute(self) -> dict[str, Any]:
        """The means after every step."""
        model = Landscape()
        optimizer = _optimizer(self, model)
        one = torch.zeros(1, 1)
        points = [model.position.tolist()]
        for _ in range(self.steps):
            optimizer.step(Objective(model, lambda output, y: output.mean(), one, one))  # type: ignore[arg-type]
            points.append(model.position.tolist())
        return {"points": points}


def _optimizer(job: Walk, model: nn.Module) -> torch.optim.Optimizer:
    optimizer, arguments = METHODS[job.label]
    if optimizer is torch.optim.SGD:
        return optimizer(model.parameters(), weight_decay=PRIOR_PRECISION / job.num_data, **arguments)
    shared = {"num_data": job.num_data, "prior_precision": PRIOR_PRECISION, "seed": job.seed}
    return optimizer(model.parameters(), **shared, **arguments)


def explore(pool: Pool, seeds: int) -> dict[str, Any]:
    """Walks of every method with many seeds, success rates, and the landscape to draw them on."""
    rows = [(label, num_data) for num_data in (WIDE, NARROW) for label in METHODS]
    # Without sampling every seed takes the same way.
    counts = {label: seeds if label in SAMPLING else 1 for label in METHODS}
    jobs = {(label, num_data): [Walk(label, i, num_data) for i in range(counts[label])] for label, num_data in rows}
    results = repeat(pool, "Local minima", jobs)
    success, trajectories = [], []
    for label, num_data in rows:
        trials = counts[label]
        walks = [result["points"] for result in results[label, num_data]]
        reached = [math.dist(points[-1], GLOBAL_MINIMUM) <= REACHED for points in walks]
        low, high = (
            wilson_interval(sum(reached), trials) if label in SAMPLING else (float(reached[0]), float(reached[0]))
        )
        title = label if num_data == WIDE else f"{label}, N = {NARROW:g}"
        success.append({"label": title, "rate": sum(reached) / trials, "low": low, "high": high, "seeds": trials})
        if num_data == WIDE:
            trajectories.append({"label": label, "points": _thinned(walks[0]), "success": reached[0]})
    axis = torch.linspace(-3.6, 3.2, 86, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    near = _nearest_minimum()
    return {
        "experiment": "explore",
        "title": "Local minima",
        "description": (
            "The mean of the posterior on a rippled bowl. All methods start at the same point, in the valley of the "
            "near minimum. The first seed's way is drawn; the rates are over all seeds. A run is a success if it ends "
            f"within {REACHED} of the global minimum, with 95% intervals (Wilson)."
        ),
        "environment": environment(),
        "settings": {"steps": STEPS, "seeds": seeds, "N": WIDE, "prior precision": PRIOR_PRECISION},
        "notes": [
            "Methods without sampling take the same way whatever the seed: one run each, a rate of 0 or 1.",
            f"How wide the posterior is against the ripples decides. The figure has N = {WIDE:g}; the rates are also "
            f"given for N = {NARROW:g}, where the posterior is narrower and sampling escapes less often or never.",
            "Between minima the Hessian is negative and VON's curvature falls to zero, so the step of every "
            "natural-gradient method here is bounded by clip_radius=1; without it VON diverges on this function.",
        ],
        "surface": {"x": axis.tolist(), "y": axis.tolist(), "value": landscape(grid).tolist()},
        "minima": [
            {"x": near[0], "y": near[1], "value": float(landscape(torch.tensor(near))), "label": "near minimum"},
            {"x": GLOBAL_MINIMUM[0], "y": GLOBAL_MINIMUM[1], "value": 0.0, "label": "global minimum"},
        ],
        "start": list(START),
        "trajectories": trajectories,
        "success": success,
    }


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a rate.

    >>> [round(bound, 3) for bound in wilson_interval(0, 50)]
    [0.0, 0.071]
    """
    rate, square = successes / trials, z * z / trials
    center = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, center - half), min(1.0, center + half)


def _nearest_minimum() -> list[float]:
    """Where gradient descent from the start ends, to many digits."""
    position = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    for _ in range(5000):
        (slope,) = torch.autograd.grad(landscape(position), position)
        with torch.no_grad():
            position -= 0.1 * slope
    return position.tolist()


def _thinned(points: list[list[float]], most: int = 150) -> list[list[float]]:
    return points if len(points) <= most else [*points[:: -(-len(points) // most)], points[-1]]

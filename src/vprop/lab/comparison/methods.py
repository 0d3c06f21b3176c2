"""The methods that are compared, each with its grid of settings. Every grid has the same number of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vprop import CVI, IVON, VOGN, VON, VONG, MeanField, Vadam, Vprop
from vprop.baselines import BBVI
from vprop.lab.comparison.tasks import ProblemName, Task

Kind = Literal["posterior", "point", "dropout"]
Setting = dict[str, float]
Build = Callable[[Iterable[Tensor], Task, int, Setting], torch.optim.Optimizer]

MOMENTUM = 0.9
"""β₁, the same for every method, so that they differ in what they are compared for."""


@dataclass(frozen=True)
class Method:
    """A row of the tables."""

    name: str
    label: str
    build: Build
    """(parameters, task, seed, setting) → optimizer"""
    grid: tuple[Setting, ...]
    gradients: int = 1
    """Weight samples per step, each with a gradient of the mini-batch: what a step costs of the budget."""
    kind: Kind = "posterior"
    problems: tuple[ProblemName, ...] = ("logreg", "mlp", "cnn")
    full_covariance: bool = False
    dropout: float = 0.0
    effort: float = 1.0
    """A guess of what a gradient costs with all that comes along, for the estimate of the time that is left."""


def tried(method: Method, count: int) -> tuple[Setting, ...]:
    """The ``count`` settings (two or more) of the grid that a task has time for, from its first to its last."""
    last = len(method.grid) - 1
    return tuple(method.grid[round(i * last / (count - 1))] for i in range(count))


def at_edge(method: Method, chosen: Setting | None) -> bool:
    """Whether the step size is the smallest or largest that was tried, so that a wider grid might do better."""
    lrs = [setting["lr"] for setting in method.grid]
    return chosen is not None and chosen["lr"] in (min(lrs), max(lrs))


def _variational(constructor: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    """An optimizer with a posterior, given the task's N, prior and first curvature."""

    def build(params: Iterable[Tensor], task: Task, seed: int, setting: Setting) -> torch.optim.Optimizer:
        arguments = {
            "lr": setting["lr"],
            "num_data": task.num_data,
            "prior_precision": task.prior_precision,
            "betas": (MOMENTUM, setting.get("beta2", 0.999)),
            "hess_init": task.hess_init,
            "seed": seed,
        }
        return constructor(params, **(arguments | fixed))

    return build


def _adam(params: Iterable[Tensor], task: Task, seed: int, setting: Setting) -> torch.optim.Optimizer:
    """The prior as weight decay: the maximum a posteriori."""
    decay = task.prior_precision / task.num_data
    return torch.optim.Adam(params, lr=setting["lr"], betas=(MOMENTUM, 0.999), weight_decay=decay)


def _grid(lrs: Iterable[float], beta2s: Iterable[float]) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "beta2": beta2} for beta2 in beta2s for lr in lrs)


_ADAM_GRID = tuple({"lr": lr} for lr in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3))
# Runs are short: the averages are so too, or they would end at the curvature that they began with.
_NATURAL_GRID = _grid((0.02, 0.1, 0.5), (0.98, 0.995))
# The long one is IVON's default, for curvature from a single sample.
_IVON_GRID = _grid((0.02, 0.1, 0.5), (0.999, 0.99999))
_PAIR = {"mc_samples": 2, "antithetic": True}
_CHUNK = 128
"""Rows of the Hessian at a time: all of them."""

METHODS = (
    Method("adam", "Adam (point estimate)", _adam, _ADAM_GRID, kind="point", effort=0.5),
    Method("mc-dropout", "MC dropout with Adam", _adam, _ADAM_GRID, kind="dropout", problems=("cnn",), dropout=0.2,
           effort=0.6),
    Method("vprop-0", "Vprop-0", _variational(Vprop, mc_samples=0), _NATURAL_GRID, effort=0.6),
    Method("vprop-1", "Vprop-1", _variational(Vprop), _NATURAL_GRID),
    Method("vprop-2-centered", "Vprop-2, centred antithetic", _variational(Vprop, **_PAIR, centered=True),
           _NATURAL_GRID, gradients=2),
    Method("vprop-fisher", "Vprop-1, sampled Fisher", _variational(Vprop, sampled_fisher=True), _NATURAL_GRID,
           effort=1.6),
    Method("vogn", "VOGN", _variational(VOGN), _NATURAL_GRID, effort=2.2),
    # Its average of squares starts at zero and is debiased, as published: a first curvature would be scaled up.
    Method("vadam", "Vadam", _variational(Vadam, hess_init=0.0), _ADAM_GRID),
    Method("ivon", "IVON", _variational(IVON), _IVON_GRID),
    Method("ivon-antithetic", "IVON-2, antithetic", _variational(IVON, **_PAIR), _NATURAL_GRID, gradients=2),
    Method("hutchinson", "MeanField(\"hutchinson\")",
           _variational(MeanField, curvature="hutchinson", riemannian=True), _NATURAL_GRID, effort=2.5),
    Method("cvi", "CVI", _variational(CVI), _NATURAL_GRID, problems=("logreg", "mlp"), effort=2.0),
    Method("bbvi-adam", "BBVI with Adam steps", _variational(BBVI, method="adam"), _ADAM_GRID, effort=1.6),
    Method("vong-2-centered", "VONG-2, centred antithetic", _variational(VONG, **_PAIR, centered=True), _NATURAL_GRID,
           gradients=2, problems=("logreg",), full_covariance=True, effort=2.0),
    Method("von", "VON", _variational(VON, chunk_size=_CHUNK), _NATURAL_GRID, problems=("logreg",),
           full_covariance=True, effort=3.0),
)  # fmt: skip

BY_NAME = {method.name: method for method in METHODS}

assert len({len(method.grid) for method in METHODS}) == 1, "no method gets more tuning than another"


def taking_part(task: Task) -> tuple[Method, ...]:
    """The methods that the task's table has."""
    return tuple(method for method in METHODS if task.spec.problem in method.problems)

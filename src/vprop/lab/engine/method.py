"""A method: an optimizer with its arguments and the grid of settings that it may choose from.

Experiments list their methods in tables of these; what is in a row is all that is special about a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vprop.lab.engine.problem import Problem

Kind = Literal["posterior", "point", "dropout"]
Group = Literal["paper", "ours", "extra"]
ProblemName = Literal["logreg", "mlp", "cnn"]
Setting = dict[str, float]


@dataclass(frozen=True)
class Method:
    """A row of a table, a curve of a figure."""

    name: str
    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    grid: tuple[Setting, ...]
    """Settings to choose from: ``lr``, and ``beta2`` where there is one."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the optimizer, beside those that the problem and the setting decide; they win over those."""
    beta1: float = 0.0
    """Momentum of methods with a posterior."""
    kind: Kind = "posterior"
    gradients: int = 1
    """Gradient evaluations of the batch per step: what a step costs of a budget."""
    dropout: float = 0.0
    full_covariance: bool = False
    problems: tuple[ProblemName, ...] = ("logreg", "mlp", "cnn")
    """Where it takes part."""
    group: Group = "extra"
    effort: float = 1.0
    """A guess of what a gradient costs with all that comes along, for the estimate of the time that is left."""

    def build(self, params: Iterable[Tensor], problem: Problem, seed: int, setting: Setting) -> torch.optim.Optimizer:
        """The optimizer: told N, prior and first curvature; without a posterior the prior is its weight decay."""
        given: dict[str, Any] = {"lr": setting["lr"]}
        if self.kind == "posterior":
            given |= {
                "num_data": problem.num_data,
                "prior_precision": problem.prior_precision,
                "betas": (self.beta1, setting.get("beta2", 0.999)),
                "hess_init": problem.hess_init,
                "seed": seed,
            }
        else:
            given["weight_decay"] = problem.prior_precision / problem.num_data
            if "beta2" in setting:
                given["alpha"] = setting["beta2"]  # the name that torch's RMSprop has for it
        return self.optimizer(params, **(given | self.arguments))

    @property
    def identity(self) -> dict[str, Any]:
        """What decides a run; its label, its grid and its place in figures do not."""
        names = ("name", "optimizer", "arguments", "beta1", "kind", "gradients", "dropout")
        return {name: getattr(self, name) for name in names}

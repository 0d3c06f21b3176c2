"""The problem of torch's generic optimizer checks, for optimizers that may need an objective.

torch checks its own optimizers by a table of them (``OptimizerInfo`` in ``torch.testing._internal``) and a file of
tests, ``test/test_optim.py``, that every row runs through. The tests are not in the wheel, and the table cannot be
imported without torch's own test dependencies, so what they check is written here anew, driven by our table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.table import Case, cases
from vprop import Objective, VariationalOptimizer

EVERY_CASE = cases(less_than_shared=True)
EVERY_OPTIMIZER = cases(less_than_shared=True, first_of_each=True)

SCHEDULERS: dict[str, Any] = {
    "none": lambda optimizer: [],
    "StepLR": lambda optimizer: [lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10)],
    "Linear and Step": lambda optimizer: [
        lr_scheduler.LinearLR(optimizer, start_factor=0.4, total_iters=4),
        lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
    ],
    "Exponential and Plateau": lambda optimizer: [
        lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        lr_scheduler.ReduceLROnPlateau(optimizer),
    ],
    "Constant and Polynomial": lambda optimizer: [
        lr_scheduler.ConstantLR(optimizer, factor=0.4, total_iters=4),
        lr_scheduler.PolynomialLR(optimizer, power=0.9, total_iters=40),
    ],
    "Cosine": lambda optimizer: [lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)],
}


class Affine(nn.Module):
    """x ↦ Wx + b, from numbers that are the same in every test; optionally in memory that is not contiguous."""

    def __init__(self, *, contiguous: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight, bias = torch.randn(4, 3, 2, generator=generator), torch.randn(4, 2, generator=generator)
        weight, bias = weight.to(dtype), bias.to(dtype)
        if contiguous:
            weight, bias = weight[..., 0].contiguous(), bias[..., 0].contiguous()
        else:
            weight, bias = weight[..., 0], bias[..., 0]
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean over examples of the sum over outputs."""
    return (output - target).square().sum(-1).mean()


def nothing(output: Tensor, target: Tensor) -> Tensor:
    """A loss that does not depend on the weights, with gradients of zero."""
    return 0.0 * output.square().mean()


class Problem:
    """A model whose outputs should be zero, and its objective, which every optimizer takes as a closure."""

    def __init__(self, **arguments: Any) -> None:
        self.model = Affine(**arguments)
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).to(self.model.weight.dtype)
        self.x, self.y = x, torch.zeros(6, 4, dtype=x.dtype)
        self.objective = self.objective_of(squared_error)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.model.weight, self.model.bias]

    def objective_of(self, loss: Any) -> Objective:
        """On the problem's data; the sum of squares is Gaussian noise of variance ½, if labels are to be drawn."""
        return Objective(self.model, loss, self.x, self.y, likelihood="gaussian", noise_variance=0.5)

    def loss(self) -> float:
        """At the mean."""
        with torch.no_grad():
            return float(squared_error(self.model(self.x), self.y))

    def train(self, optimizer: VariationalOptimizer, steps: int, schedulers: Any = ()) -> None:
        for _ in range(steps):
            optimizer.step(self.objective)
            for scheduler in schedulers:
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(self.loss())
                else:
                    scheduler.step()

    def same_weights(self, other: Problem, **tolerance: float) -> None:
        for p, q in zip(self.parameters, other.parameters, strict=True):
            torch.testing.assert_close(p, q, **({"rtol": 0.0, "atol": 0.0} | tolerance))


def trained(case: Case, steps: int = 3, **arguments: Any) -> tuple[Problem, VariationalOptimizer]:
    problem = Problem()
    optimizer = case(problem.parameters, **arguments)
    problem.train(optimizer, steps)
    return problem, optimizer

"""The problem of torch's generic optimizer checks, for optimizers that may need an objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from vprop import Objective, VariationalOptimizer


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


class Layers(nn.Module):
    """Two layers, the second of which can be frozen, a parameter without elements and one without dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Affine(seed=1), nn.Linear(4, 4)
        with torch.no_grad():
            for number, p in enumerate(self.second.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number + 2)))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x))) + self.scalar


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean over examples of the sum over outputs."""
    return (output - target).square().sum(-1).mean()


def nothing(output: Tensor, target: Tensor) -> Tensor:
    """A loss that does not depend on the weights, with gradients of zero."""
    return 0.0 * output.square().mean()


class Problem:
    """A model whose outputs should be zero, and its objective, which every optimizer takes as a closure."""

    def __init__(self, model: nn.Module | None = None, **arguments: Any) -> None:
        self.model = Affine(**arguments) if model is None else model
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).to(self.parameters[0].dtype)
        self.x, self.y = x, torch.zeros(6, 4, dtype=x.dtype)
        self.objective = self.objective_of(squared_error)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

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
            self.advance(schedulers)

    def advance(self, schedulers: Any) -> None:
        for scheduler in schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.loss())
            else:
                scheduler.step()

    def step_as_torch_does(self, optimizer: VariationalOptimizer, *, backward: bool = True) -> None:
        """Forward, backward, ``step()``: at the samples. Where gradients are not enough, with the objective."""
        if optimizer.needs_objective:
            optimizer.step(self.objective)
            return
        optimizer.zero_grad()
        for sample in range(max(1, optimizer.mc_samples)):
            with optimizer.sampled_params(sample):
                if backward:
                    squared_error(self.model(self.x), self.y).backward()
        optimizer.step()

    def same_weights(self, other: Problem, **tolerance: float) -> None:
        for p, q in zip(self.parameters, other.parameters, strict=True):
            torch.testing.assert_close(p, q, **({"rtol": 0.0, "atol": 0.0} | tolerance))


def trained(
    make: Callable[..., VariationalOptimizer], steps: int = 3, **arguments: Any
) -> tuple[Problem, VariationalOptimizer]:
    problem = Problem()
    optimizer = make(problem.parameters, **arguments)
    problem.train(optimizer, steps)
    return problem, optimizer

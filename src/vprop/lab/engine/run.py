"""A training run: a method with one setting and one seed on one problem.

The loop is here, once: how batches are drawn, how the step size falls, what is seeded. A kind of run says what is
looked at on the way and at the end, in ``measure``.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vprop.lab.engine.job import Job
from vprop.lab.engine.method import Method
from vprop.lab.engine.problem import Problem

ScheduleName = Literal["constant", "second half", "cosine"]


@dataclass
class Training:
    """A method at work on a problem."""

    problem: Problem
    method: Method
    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Run(Job):
    """Everything that decides a training run."""

    fingerprint: str
    """Of the data."""
    method: Method
    setting: tuple[tuple[str, float], ...]
    seed: int
    gradients: int
    """Gradient evaluations that the run may spend."""
    batch: int | None
    """Rows of a mini-batch; ``None`` for all."""
    schedule: ScheduleName = field(default="constant", kw_only=True)

    @abstractmethod
    def load(self) -> Problem:
        """What is trained on."""

    @abstractmethod
    def measure(self, training: Training, steps: Iterator[int]) -> dict[str, Any]:
        """The outcome. Every number that ``steps`` gives, from 1, is a step that was made."""

    @property
    def steps(self) -> int:
        """Optimizer steps that the budget allows."""
        return max(1, self.gradients // self.method.gradients)

    @property
    def effort(self) -> float:
        """By the method's own guess."""
        return self.gradients * self.method.effort

    def compute(self) -> dict[str, Any]:
        """Train and measure."""
        problem = self.load()
        model = problem.model(self.seed, self.method.dropout)
        optimizer = self.method.build(model.parameters(), problem, self.seed, dict(self.setting))
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore", RuntimeWarning)  # left-out elements: a diverging run says so by its scores
            torch.manual_seed(self.seed)  # of dropout masks
            steps = train(problem, model, optimizer, self.batch, self.steps, self.seed, self.schedule)
            return self.measure(Training(problem, self.method, model, optimizer), steps)


def train(
    problem: Problem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: int | None,
    steps: int,
    seed: int,
    schedule: ScheduleName = "constant",
) -> Iterator[int]:
    """Make ``steps`` steps, and give the number of each, from 1, when it is made."""
    first = [group["lr"] for group in optimizer.param_groups]
    for step, rows in enumerate(batches(problem.num_data, batch, steps, seed), start=1):
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * SCHEDULES[schedule](step, steps)
        optimizer.step(problem.objective(model, rows))  # type: ignore[arg-type]
        yield step


def _second_half(step: int, steps: int) -> float:
    """1 in the first half, then a straight line to zero.

    >>> [_second_half(step, 8) for step in (1, 4, 5, 8)]
    [1.0, 1.0, 1.0, 0.25]
    """
    return min(1.0, (steps - step + 1) / (steps - steps // 2))


def _cosine(step: int, steps: int) -> float:
    """From 1 to zero along a cosine.

    >>> [round(_cosine(step, 4), 3) for step in (1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


SCHEDULES: dict[ScheduleName, Callable[[int, int], float]] = {
    "constant": lambda step, steps: 1.0,
    "second half": _second_half,
    "cosine": _cosine,
}
"""The share of the step size that step number ``step``, from 1, of ``steps`` takes."""


def batches(num_data: int, size: int | None, steps: int, seed: int) -> Iterator[Tensor | None]:
    """Rows of each step: a fresh permutation for every epoch, its incomplete last batch left out."""
    if size is None:
        yield from [None] * steps
        return
    generator = torch.Generator().manual_seed(seed)
    given = 0
    while given < steps:
        for rows in torch.randperm(num_data, generator=generator).split(size):
            if len(rows) == size and given < steps:
                given += 1
                yield rows

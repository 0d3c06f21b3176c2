"""Models to train for a moment, and a reader of ``diagnose()`` who does what it says, to the letter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vprop
from tests.optim.test_defaults import MODELS, load, load_digits
from vprop import Objective, VariationalOptimizer, lr_find

BATCH = 32


def cnn() -> nn.Module:
    """Without normalization."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


TASKS = {make.__name__: (make, dataset) for make, dataset in [*MODELS, (cnn, load_digits)]}
Settings = tuple[type[VariationalOptimizer], dict[str, Any]]


@dataclass
class Task:
    """A model and its data, with a seed for the weights, the order of the data and the noise."""

    name: str
    seed: int = 0
    epochs: int = 10

    def __post_init__(self) -> None:
        self.make, dataset = TASKS[self.name]
        self.x, self.y, self.test_x, self.test_y = load(dataset)

    def start(self, settings: Settings) -> tuple[nn.Module, VariationalOptimizer]:
        constructor, arguments = settings
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = self.make()
        return model, constructor(model.parameters(), num_data=len(self.x), seed=self.seed, **arguments)

    def train(self, settings: Settings) -> Trained:
        """With a cosine schedule to zero."""
        model, optimizer = self.start(settings)
        steps = self.epochs * math.ceil(len(self.x) / BATCH)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        order = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(self.x), generator=order).split(BATCH):
                optimizer.step(Objective(model, F.cross_entropy, self.x[rows], self.y[rows]))
                scheduler.step()
        return Trained(self, settings, model, optimizer)

    def found_lr(self, settings: Settings) -> float:
        """What ``lr_find`` suggests, from the start."""
        model, optimizer = self.start(settings)
        rows = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(10 + self.seed))
        loader = [(self.x[part], self.y[part]) for part in rows.split(BATCH)]
        return lr_find(optimizer, model, F.cross_entropy, loader).suggestion


@dataclass
class Trained:
    """What came out."""

    task: Task
    settings: Settings
    model: nn.Module
    optimizer: VariationalOptimizer

    def log_losses(self) -> Tensor:
        """Of each held-out example, by the average over samples."""
        probs = self.optimizer.posterior(self.model, likelihood="categorical").predict(self.task.test_x).probs
        return F.nll_loss(probs.clamp_min(1e-12).log(), self.task.test_y, reduction="none")

    @property
    def log_loss(self) -> float:
        return float(self.log_losses().mean())

    def diagnose(self) -> Any:
        """With the training data at hand."""
        return self.optimizer.diagnose(Objective(self.model, F.cross_entropy, self.task.x, self.task.y))

    def follow(self, findings: Any) -> Trained:
        """Train from the start as the findings say."""
        constructor, arguments = self.settings
        advice = [finding.advice for finding in findings if finding.advice is not None]
        for one in advice:
            if one.optimizer is not None:
                constructor, arguments = getattr(vprop, one.optimizer), {}
        arguments = dict(arguments)
        for one in advice:
            arguments |= one.change
        if any(one.find_lr for one in advice):
            arguments["lr"] = self.task.found_lr((constructor, arguments))
        return self.task.train((constructor, arguments))


def is_no_worse(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether held-out log-losses rose by no more than two standard errors of their mean; one entry per seed."""
    rise = torch.stack(after).mean(0) - torch.stack(before).mean(0)
    return float(rise.mean()) <= 2 * float(rise.std()) / math.sqrt(len(rise))

"""A step size that works, from a handful of short trainings."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from vprop.objective import LossFunction, Objective
from vprop.optim._arguments import invalid, is_number
from vprop.optim._base import VariationalOptimizer

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Times the optimizer's own lr: what is tried if nobody says."""
JUDGED = 0.2
"""The share of a trial, its end, whose mean loss is compared."""
HOPELESS = 10.0
"""A trial whose loss is this many times that of its start is given up."""


@dataclass(frozen=True)
class LrTrials:
    """What :func:`lr_find` saw: the loss at the end of a short training with each lr."""

    lrs: list[float]
    losses: list[float]
    """Infinity for a trial that diverged."""
    suggestion: float

    def __str__(self) -> str:
        tried = ", ".join(f"{lr:.2g}: {loss:.3g}" for lr, loss in zip(self.lrs, self.losses, strict=True))
        edge = self.suggestion in (min(self.lrs), max(self.lrs))
        return f"lr={self.suggestion:.2g} (loss at the end of each trial: {tried})" + (
            ". The best is the last one tried: try values beyond it (lrs=...)" if edge and len(self.lrs) > 1 else ""
        )


def lr_find(
    optimizer: VariationalOptimizer,
    model: nn.Module,
    loss_fn: LossFunction,
    loader: Iterable[Any],
    *,
    steps: int = 100,
    lrs: Sequence[float] | None = None,
) -> LrTrials:
    """Train for a moment with each of a few step sizes, and suggest the one that came furthest.

    Each trial starts from the model and the optimizer as they are, takes ``steps`` steps on the same mini-batches
    (x, y) of ``loader`` (begun again when it ends) with a cosine schedule to zero, and is judged by the mean training
    loss of its last fifth. So the suggestion is the first lr of a schedule that decays; for a constant one, a third.
    Model, optimizer and random state are left as they were.

    Args:
        lrs: what to try; by default 0.1 to 30 times the optimizer's own lr, in six steps. With several groups their
            ratios are kept, and the values are those of the first.

    >>> import torch, vprop
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = vprop.Vprop(model.parameters(), num_data=64)
    >>> trials = vprop.lr_find(optimizer, model, torch.nn.functional.mse_loss, [(x, x.sum(1, keepdim=True))])
    >>> trials.suggestion in trials.lrs
    True
    """
    if not is_number(steps, whole=True) or steps < 10:
        raise invalid("steps", steps, "an integer >= 10", "100 is the default.")
    own = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(own):
        raise invalid("lr", own[0], "> 0 for lr_find", "Build the optimizer with its default lr.")
    tried = [own[0] * factor for factor in FACTORS] if lrs is None else _checked(lrs)
    batches = list(islice(_endless(loader), steps))
    ends = []
    with _as_it_was(optimizer, model) as start_over:
        for lr in tried:
            start_over()
            ends.append(_trial(optimizer, model, loss_fn, batches, [lr * rate / own[0] for rate in own]))
    if not any(math.isfinite(end) for end in ends):
        raise ValueError(
            f"lr_find: the training diverged with every lr tried ({', '.join(f'{lr:.2g}' for lr in tried)}). Try "
            "smaller ones (lrs=[...]); if the loss is not finite from the start, look at the model and its data first."
        )
    return LrTrials(tried, ends, min(zip(ends, tried, strict=True))[1])


def _trial(
    optimizer: VariationalOptimizer, model: nn.Module, loss_fn: LossFunction, batches: list[Any], rates: list[float]
) -> float:
    """The mean loss over the end of a short training."""
    losses: list[float] = []
    for i, (x, y) in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_lr(group, rate * 0.5 * (1 + math.cos(math.pi * i / len(batches))))
        losses.append(float(optimizer.step(Objective(model, loss_fn, x, y))))
        if not math.isfinite(losses[-1]) or losses[-1] > losses[0] + HOPELESS * max(1.0, abs(losses[0])):
            return math.inf
    judged = losses[-max(1, round(JUDGED * len(losses))) :]
    return sum(judged) / len(judged)


class _as_it_was:
    """Everything that a training changes is put back at the end, and by the function that it gives."""

    def __init__(self, optimizer: VariationalOptimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model
        self.weights, self.state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        self.rates = [(group["lr"], float(group["lr"])) for group in optimizer.param_groups]
        self.grads = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        self.modes = [(module, module.training) for module in model.modules()]
        self.random = torch.random.fork_rng()
        self.warnings = warnings.catch_warnings()

    def __enter__(self) -> Any:
        self.random.__enter__()
        self.warnings.__enter__()
        warnings.simplefilter("ignore", RuntimeWarning)  # elements that are not finite: the trial says so by its loss
        self.seed = torch.random.get_rng_state()
        return self.start_over

    def start_over(self) -> None:
        self.put_back()
        self.model.train()
        torch.random.set_rng_state(self.seed)  # of dropout masks, the same in every trial

    def put_back(self) -> None:
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(copy.deepcopy(self.state))
        for group, (rate, value) in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate  # the very tensor, if it is one: somebody may hold it
            _set_lr(group, value)

    def __exit__(self, *error: Any) -> None:
        self.put_back()
        for p, grad in self.grads:
            p.grad = grad
        for module, mode in self.modes:
            module.training = mode
        self.warnings.__exit__(*error)
        self.random.__exit__(*error)


def _set_lr(group: dict[str, Any], value: float) -> None:
    """A rate that is a tensor is changed in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches without an end, from a loader with one."""
    while True:
        batches = iter(loader)
        first = next(batches, None)
        if first is None:
            raise ValueError(
                "lr_find: the loader is empty, or can be read only once and is too short. Pass a DataLoader or a list "
                "of (x, y) batches."
            )
        yield from chain([first], batches)


def _checked(lrs: Sequence[float]) -> list[float]:
    values = list(lrs)
    if not values or not all(is_number(lr) and 0 < lr < math.inf for lr in values):
        raise invalid("lrs", lrs, "finite numbers > 0", "E.g. lrs=[0.03, 0.1, 0.3, 1].")
    return [float(lr) for lr in values]

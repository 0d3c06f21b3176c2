"""A step size that works, from a handful of short trainings."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vprop.checks import check_loss, check_model, invalid, is_finite, is_number, shown
from vprop.objective import LossFunction, Objective
from vprop.parallel.ranks import average_over_ranks
from vprop.parallel.sharding import is_sharded

if TYPE_CHECKING:
    from vprop.optim import VariationalOptimizer

FIRST, FURTHEST = (-2, 3), (-6, 6)
"""What is tried if nobody says, in half decades from the optimizer's own lr: at first, and at most."""
LEARNED = 0.02
"""A trial that lowers the loss by less than this share has learned nothing: where the others are is then unknown."""
AS_GOOD = 0.98
"""The suggestion is the smallest lr that lowered the loss by this share of what the best one did."""
JUDGED = 0.2
"""The share of a trial, its end, whose mean loss is compared."""
LARGEST = torch.finfo(torch.float32).max
"""A larger lr is infinite in the arithmetic of float32 weights."""
MOST_STEPS = 1_000_000
"""Of a trial, whose batches are all kept: more is no short training."""
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
        best = self.lrs[min(range(len(self.losses)), key=self.losses.__getitem__)]
        end = None
        if len(self.lrs) > 1 and self.suggestion == min(self.lrs):
            end = "smallest"
        elif len(self.lrs) > 1 and self.suggestion == best == max(self.lrs):
            end = "largest"
        return f"lr={self.suggestion:.2g} (loss at the end of each trial: {tried})" + (
            f". It is the {end} that was tried: try values beyond it (lrs=...)" if end is not None else ""
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
    """Train for a moment with each of a few step sizes, and suggest the smallest that did as well as the best.

    Each trial starts from the model and the optimizer as they are, takes ``steps`` steps on the same mini-batches
    (x, y) of ``loader`` (begun again when it ends) with a cosine schedule to zero, and is judged by the mean training
    loss of its last fifth. So the suggestion is the first lr of a schedule that decays; for a constant one, a third.
    Model, optimizer and random state are left as they were.

    Args:
        lrs: what to try; by default 0.1 to 30 times the optimizer's own lr, in six steps, and further ones, up to
            three decades away, while the best is the smallest or the largest tried. With several groups their ratios
            are kept, and the values are those of the first.

    >>> import torch, vprop
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = vprop.Vprop(model.parameters(), num_data=64)
    >>> trials = vprop.lr_find(optimizer, model, torch.nn.functional.mse_loss, [(x, x.sum(1, keepdim=True))])
    >>> trials.suggestion in trials.lrs
    True
    """
    _check_arguments(optimizer, model, loss_fn, loader)
    if not is_number(steps, whole=True) or not 10 <= steps <= MOST_STEPS:
        raise invalid("steps", steps, f"an integer >= 10 (and <= {MOST_STEPS})", "100 is the default.")
    own = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(own):
        raise invalid("lr", own[0], "> 0 for lr_find", "Build the optimizer with its default lr.")
    trials: dict[float, list[float]] = {}
    with _as_it_was(optimizer, model, loss_fn) as start_over:
        batches = list(islice(_endless(loader), steps))
        start_over()
        unmoved = _end(_trial(optimizer, model, loss_fn, batches, [0.0 for _ in own]))  # with the same noise
        for lr in _by_half_decades(own[0], trials, unmoved) if lrs is None else _checked(lrs):
            start_over()
            trials[lr] = _trial(optimizer, model, loss_fn, batches, [lr * rate / own[0] for rate in own])
    tried = sorted(trials) if lrs is None else list(trials)
    ends = [_end(trials[lr]) for lr in tried]
    best = min(ends)
    if not math.isfinite(best):
        raise ValueError(
            f"lr_find: the training diverged with every lr tried ({', '.join(f'{lr:.2g}' for lr in tried)}). Try "
            "smaller ones (lrs=[...]); if the loss is not finite from the start, look at the model and its data first."
        )
    return LrTrials(tried, ends, _suggested(dict(zip(tried, ends, strict=True)), unmoved))


def _suggested(ends: dict[float, float], unmoved: float) -> float:
    """The smallest lr that did as well as the best, given what the loss would have been without a step."""
    best = min(ends.values())
    way = max(0.0, unmoved - best) if math.isfinite(unmoved) else 0.0
    good_enough = best + (1 - AS_GOOD) * way
    return min((lr for lr, end in ends.items() if end <= good_enough), default=min(ends))


def _by_half_decades(own: float, trials: dict[float, list[float]], unmoved: float) -> Iterator[float]:
    """What to try next, given the trials so far: to begin with around ``own``, then on beyond the better end.

    ``unmoved`` is the loss that a trial without any step ends with; where it is not finite there is nothing to find.
    """

    def rate(halves: int) -> float:
        return own * 10.0 ** (halves // 2) * (3.0 if halves % 2 else 1.0)

    low, high = FIRST
    yield from (rate(halves) for halves in range(low, high + 1))
    while math.isfinite(unmoved):
        ends = {lr: _end(losses) for lr, losses in trials.items()}
        nothing_learned = not min(ends.values()) < unmoved - LEARNED * abs(unmoved)
        if low > FURTHEST[0] and (_suggested(ends, unmoved) == rate(low) or nothing_learned):
            low -= 1
            yield rate(low)
        elif high < FURTHEST[1] and (ends[rate(high)] == min(ends.values()) or nothing_learned):
            high += 1
            yield rate(high)
        else:
            return


def _trial(
    optimizer: VariationalOptimizer, model: nn.Module, loss_fn: LossFunction, batches: list[Any], rates: list[float]
) -> list[float]:
    """The losses of a short training, infinity at the end of one that diverged."""
    losses: list[float] = []
    for i, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                "lr_find: a batch of the loader must be a pair (x, y) with loss_fn(model(x), y) its loss, but it is a "
                f"{type(batch).__name__}"
                + (f" of {len(batch)}. " if isinstance(batch, tuple | list) else ". ")
                + "Several inputs go into one x: a tuple of positional or a dict of keyword arguments."
            )
        x, y = batch
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_lr(group, rate * 0.5 * (1 + math.cos(math.pi * i / len(batches))))
        objective = Objective(model, loss_fn, x, y)
        loss = _over_ranks(float(optimizer.step(objective)), objective)
        if loss is None:
            continue
        losses.append(loss)
        if not math.isfinite(losses[-1]) or losses[-1] > losses[0] + HOPELESS * max(1.0, abs(losses[0])):
            losses.append(math.inf)
            break
    return losses or [math.nan]


def _over_ranks(loss: float, objective: Objective) -> float | None:
    """The mean over the ranks that train together: all of them must give up, and choose, alike.

    ``None`` for a batch in which nothing counts, on no rank: its loss is NaN, but that is not divergence.
    """
    spread = any(is_sharded(p) for p in objective.model.parameters())  # then a forward of one rank alone would hang
    counts = not math.isnan(loss) or spread or objective.has_targets()
    if not spread and objective.process_group is None:
        return loss if counts else None
    device = next(objective.model.parameters()).device
    parts = torch.tensor([loss if counts else 0.0, float(counts)], dtype=torch.float64, device=device)
    total, share = average_over_ranks([parts], objective.process_group)[0].tolist()
    return total / share if share > 0 else None


def _end(losses: list[float]) -> float:
    """The mean loss over the end of a trial."""
    judged = losses[-max(1, round(JUDGED * len(losses))) :]
    return sum(judged) / len(judged)


@contextmanager
def _as_it_was(
    optimizer: VariationalOptimizer, model: nn.Module, loss_fn: LossFunction
) -> Iterator[Callable[[], None]]:
    """Gives a function that puts model and optimizer back to the start; at the end everything is as it was."""
    modules = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]  # a loss may have weights to train, too
    weights = [copy.deepcopy(module.state_dict()) for module in modules]
    state = copy.deepcopy(optimizer.state_dict())
    rates = [(group["lr"], float(group["lr"])) for group in optimizer.param_groups]
    learned = [p for module in modules for p in module.parameters()]
    grads = [(p, None if p.grad is None else p.grad.clone()) for p in learned]
    # A state_dict has not all of them.
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    seed = torch.random.get_rng_state()

    def put_back() -> None:
        for module, own in zip(modules, weights, strict=True):
            module.load_state_dict(own)
        with torch.no_grad():
            for buffer, old in buffers:
                buffer.copy_(old)
        optimizer.load_state_dict(copy.deepcopy(state))
        for group, (rate, value) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the very tensor, if it is one: somebody may hold it
            _set_lr(group, value)

    def start_over() -> None:
        put_back()
        model.train()
        torch.random.set_rng_state(seed)  # of dropout masks, the same in every trial

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # elements that are not finite: the trial says so by its loss
        try:
            yield start_over
        finally:
            put_back()
            for p, grad in grads:
                p.grad = grad
            for module, mode in modes:
                module.training = mode


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


def _check_arguments(optimizer: Any, model: Any, loss_fn: Any, loader: Any) -> None:
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "sampled_params")):  # none of ours
        raise TypeError(
            f"lr_find(optimizer, …): got {type(optimizer).__name__}, must be an optimizer of vprop. Pass e.g. "
            "vprop.Vprop(model.parameters(), num_data=...)."
        )
    check_model(model, "lr_find(…, model, …)")
    check_loss(loss_fn, "lr_find(…, loss_fn, …)")
    if isinstance(loader, str) or not isinstance(loader, Iterable):
        raise TypeError(
            f"lr_find(…, loader): got {shown(loader)}, must be an iterable of (x, y) batches. Pass a DataLoader or a "
            "list of (x, y) batches."
        )
    owned = {id(p) for module in (model, loss_fn) if isinstance(module, nn.Module) for p in module.parameters()}
    foreign = sum(id(p) not in owned for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if foreign:
        raise ValueError(
            f"lr_find(optimizer, model, …): {foreign} of the optimizer's parameters are not parameters of this model. "
            "Pass the module the optimizer was built from, or one that contains all of them."
        )


def _checked(lrs: Sequence[float]) -> list[float]:
    values = list(lrs) if isinstance(lrs, Iterable) else []
    if not values or not all(is_finite(lr) and 0 < lr <= LARGEST for lr in values):
        raise invalid("lrs", lrs, "finite numbers > 0", "E.g. lrs=[0.03, 0.1, 0.3, 1].")
    return [float(lr) for lr in values]

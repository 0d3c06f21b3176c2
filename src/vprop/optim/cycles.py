"""A step size that falls to zero several times: each time the weights rest in a mode, a member of a mixture."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vprop.checks import invalid, is_finite, is_number, shown

LOW, END = 1 / 25, 1 / 25e4
"""Where a cycle starts and ends, as shares of its highest step size: those of torch's OneCycleLR."""


def in_cycles(step: int, ends: Sequence[int], warm_up: float) -> float:
    """The step size of ``step``, counted from 0, as a share of the highest one.

    Cycle k has the steps from ``ends[k-1]`` (0 for the first) up to, and without, ``ends[k]``: up along half a cosine
    in a part ``warm_up`` of it, then down to next to nothing. With one cycle it is torch's ``OneCycleLR``.

    >>> [round(in_cycles(step, (4, 8), 0.5), 2) for step in range(8)]
    [0.04, 1.0, 0.5, 0.0, 0.04, 1.0, 0.5, 0.0]
    """
    number = min(bisect_right(ends, step), len(ends) - 1)
    start = ends[number - 1] if number else 0
    at, steps = step - start, ends[number] - start
    top = warm_up * steps - 1
    if at <= top:
        return _cosine(LOW, 1.0, at / top) if top > 0 else 1.0
    return _cosine(1.0, END, (at - top) / (steps - 1 - top))


def _cosine(first: float, last: float, part: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * part))


def cycle_ends(total: int, cycles: int, first: float) -> tuple[int, ...]:
    """After how many of ``total`` steps (or epochs) each cycle is over: a share ``first`` for the first, others alike.

    >>> cycle_ends(100, 3, 0.5), cycle_ends(10, 1, 0.5)
    ((50, 75, 100), (10,))
    """
    if cycles == 1:
        return (total,)
    rest = (1 - first) / (cycles - 1)
    return (*(round(total * (first + number * rest)) for number in range(cycles - 1)), total)


class CosineCycles(LRScheduler):
    r"""Falls to zero along a cosine ``cycles`` times, so that one training makes several members of a mixture.

    At the end of a cycle the weights rest in a mode, and :attr:`ended` is true: take ``optimizer.posterior(model)``
    there. The next cycle's high step sizes leave that mode for another, from weights that know most of the task
    already. The posteriors together are a :class:`vprop.Mixture` for the price of one training, as snapshot ensembles
    (Huang et al., 2017) are of networks.

    Args:
        optimizer: whose ``lr``, of every group, is the highest step size.
        total_steps: of the whole training, ``epochs * len(loader)`` say. ``step()`` is called after each of them.
        cycles: how many. Five were better than three on held-out images where this was measured (docs/deep.md).
        first: the share of the steps that the first cycle has, which starts from random weights; the others have the
            rest in equal parts.
        warm_up: the part of a cycle in which the step size rises.
        last_epoch: the number of the last step that was made, counted from 0, as all of torch's schedulers have it: 34
            after 35 steps. -1 starts anew.

    All that is trained should be in ``optimizer``: weights of the model that another one trains have no posterior, and
    members of one training share them. As a part of ``SequentialLR`` the last cycle is not seen to end.

    >>> import torch, vprop
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = vprop.Vario([weight], lr=0.1, num_data=10, batch_size=10)
    >>> scheduler = CosineCycles(optimizer, total_steps=20, cycles=3)
    >>> scheduler.ends
    (8, 14, 20)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (weight - 1).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> at_ends = []
    >>> for step in range(1, 21):
    ...     loss = optimizer.step(closure)
    ...     scheduler.step()
    ...     if scheduler.ended:
    ...         at_ends.append(step)
    >>> at_ends
    [8, 14, 20]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        cycles: int = 5,
        first: float = 0.4,
        warm_up: float = 0.05,
        last_epoch: int = -1,
    ) -> None:
        for name, value, remedy in (
            ("total_steps", total_steps, "It is epochs * len(loader), if every batch is a step."),
            ("cycles", cycles, "Each makes a member of the mixture; 5 is the default."),
        ):
            if not is_number(value, whole=True) or not 1 <= value < 2**53:
                raise invalid(name, value, "an integer >= 1", remedy)
        for name, share, low in (("first", first, "(0, 1)"), ("warm_up", warm_up, "[0, 1)")):
            if not is_finite(share) or not 0 <= share < 1 or (share == 0 and name == "first"):
                raise invalid(name, share, f"a number in {low}", "It is a share of the steps.")
        self.total_steps, self.cycles = int(total_steps), int(cycles)
        self.first, self.warm_up = float(first), float(warm_up)
        # of too many cycles a list would fill the memory
        self.ends = cycle_ends(self.total_steps, self.cycles, self.first) if 2 * cycles <= total_steps else (1,)
        shortest = min(end - start for start, end in zip((0, *self.ends), self.ends, strict=False))
        if shortest < 2:
            raise ValueError(
                f"CosineCycles(total_steps={shown(total_steps)}, cycles={shown(cycles)}, first={first}): a cycle would "
                f"have fewer than 2 steps. Take fewer cycles, or another first."
            )
        super().__init__(optimizer, last_epoch)

    @property
    def ended(self) -> bool:
        """Whether the optimizer's last step was the last one of a cycle."""
        return self.last_epoch in self.ends

    def get_lr(self) -> list[Any]:
        """Of every group, for the next step; after the last one it stays where it is."""
        if self.last_epoch > self.total_steps:
            raise ValueError(
                f"CosineCycles(total_steps={self.total_steps}): step() was called {self.last_epoch} times. Pass the "
                "steps of the whole training, epochs * len(loader), and call step() after every one of them."
            )
        share = in_cycles(min(self.last_epoch, self.total_steps - 1), self.ends, self.warm_up)
        return [base * share for base in self.base_lrs]

"""A training in cycles: model and optimizer as they were at the end of each, to predict with all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

import vprop
from vprop.lab.deep.predictions import Forward

State = dict[str, Any]


class Snapshots:
    """Of ``model`` and ``optimizer``, after each of ``ends`` steps; of a training without cycles there are none."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ends: Sequence[int] = ()) -> None:
        self.model, self.optimizer, self.ends = model, optimizer, tuple(ends)
        self.taken: list[State] = []

    def take(self, steps: int) -> None:
        """One, if a cycle is over after so many steps."""
        if steps in self.ends:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self.taken.append(copy.deepcopy(state))

    def state_dict(self) -> list[State]:
        """What was taken."""
        return self.taken

    def load_state_dict(self, state: list[State]) -> None:
        """Go on from what was taken before."""
        self.taken = list(state)

    def networks(self) -> Iterator[Forward]:
        """Each as a network with its weights."""
        for state in self.taken:
            network = copy.deepcopy(self.model)
            network.load_state_dict(state["model"])
            yield network.eval()

    def draws(self, count: int) -> Iterator[Forward]:
        """``count`` draws from all posteriors in turn, so that the first few are already of different ones."""
        assert isinstance(self.optimizer, vprop.VariationalOptimizer)
        makers = list[Callable[[int], Any]]()
        for number, state in enumerate(self.taken):  # the last one is what model and optimizer are now
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            makers.append(partial(self.optimizer.posterior(self.model).sampled_models, seed=number))
        return in_turn(makers, count)


def in_turn(makers: Sequence[Callable[[int], Any]], count: int) -> Iterator[Forward]:
    """``count`` in all, one of each after the other; each is asked for its share at once.

    >>> list(in_turn([lambda n: iter(range(n)), lambda n: iter("abc"[:n])], 5))
    [0, 'a', 1, 'b', 2]
    """
    sources = [iter(make(len(range(first, count, len(makers))))) for first, make in enumerate(makers[:count])]
    for number in range(count):
        yield cast(Forward, next(sources[number % len(sources)]))

"""A training in cycles: what it was at the end of each, to predict with all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

import vprop
from vprop.lab.deep.predictions import Forward
from vprop.posterior import io

State = dict[str, Any]


class Snapshots:
    """After each of ``ends`` steps the posterior of ``optimizer``, or the state of ``model`` if it has none.

    Of a training without cycles there are no ends.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ends: Sequence[int] = ()) -> None:
        self.model, self.optimizer, self.ends = model, optimizer, tuple(ends)
        self.posteriors: list[vprop.Posterior] = []
        self.states: list[State] = []

    def take(self, steps: int) -> None:
        """One, if a cycle is over after so many steps."""
        if steps not in self.ends:
            return
        if isinstance(self.optimizer, vprop.VariationalOptimizer):
            self.posteriors.append(self.optimizer.posterior(self.model))
        else:
            self.states.append(copy.deepcopy(self.model.state_dict()))

    def state_dict(self) -> State:
        """What was taken."""
        return {"posteriors": [io.parts_of(one) for one in self.posteriors], "states": self.states}

    def load_state_dict(self, state: State) -> None:
        """Go on from what was taken before."""
        parts = ((io.sections_of(tensors), settings) for tensors, settings in state["posteriors"])
        self.posteriors = [io.made_of(sections, settings, self.model) for sections, settings in parts]
        self.states = list(state["states"])

    def networks(self) -> Iterator[Forward]:
        """Each as a network with its weights."""
        for state in self.states:
            network = copy.deepcopy(self.model)
            network.load_state_dict(state)
            yield network.eval()

    def draws(self, count: int) -> Iterator[Forward]:
        """``count`` draws, as many of each posterior as their mixture has, in turn: the first few are of several."""
        return in_turn([partial(one.sampled_models, seed=number) for number, one in enumerate(self.posteriors)], count)


def in_turn(makers: Sequence[Callable[[int], Any]], count: int) -> Iterator[Forward]:
    """``count`` in all, one of each after the other; each is asked for its share at once.

    >>> list(in_turn([lambda n: iter(range(n)), lambda n: iter("abc"[:n])], 5))
    [0, 'a', 1, 'b', 2]
    """
    sources = [iter(make(len(range(first, count, len(makers))))) for first, make in enumerate(makers[:count])]
    for number in range(count):
        yield cast(Forward, next(sources[number % len(sources)]))

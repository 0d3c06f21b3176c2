"""What every structure knows of a sample that is in the weights, and weights that are kept for a moment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.sharding import is_sharded, to_local


class Plan(Protocol):
    """A sample of all parameters: which noise goes where."""

    def write(self) -> None:
        """Write the sample into the weights, which hold the mean."""

    def take_out(self) -> None:
        """Put the mean back, from the weights and the noise, generated again. Undoes a half-done write, too."""

    def twin(self) -> Plan:
        """Another one of the same sample, with a memory of its own of whether it is in the weights."""

    def owners(self) -> list[Tensor]:
        """The parameters that it is a sample of."""


@dataclass
class KeptSample:
    """A parameter that holds a sample, and what it held before."""

    p: Tensor
    sample: Tensor
    mean: Tensor = field(init=False)
    done: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.mean = self.p.detach().clone()


class KeptPlan:
    """A plan that keeps the sample and the weights as they were: simple, for two copies of the weights.

    It is made while the weights hold the mean, from each parameter with its sample.
    """

    def __init__(self, samples: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._entries = [KeptSample(p, sample) for p, sample in samples]

    def write(self) -> None:
        """Write the sample into the weights."""
        for entry in self._entries:
            entry.done = True
            entry.p.copy_(entry.sample)

    def take_out(self) -> None:
        """Put the weights back, wherever the sample is in them."""
        for entry in self._entries:
            if entry.done:
                entry.p.copy_(entry.mean)
                entry.done = False

    def twin(self) -> KeptPlan:
        """The same sample, with a memory of its own of where it is in the weights."""
        twin = KeptPlan([])
        twin._entries = [copy.copy(entry) for entry in self._entries]
        return twin

    def owners(self) -> list[Tensor]:
        """The parameters that it is a sample of."""
        return [entry.p for entry in self._entries]


class KeptWeights:
    """What is in the weights, kept while something else is, to be put back bit for bit.

    A graph that was made before can be differentiated afterwards: the weights count as unchanged. A graph that is made
    meanwhile cannot, because what it was made with is gone, and autograd says so. It goes by the number of changes to a
    tensor, so the weights get numbers meanwhile that they never have otherwise.
    """

    _numbers = itertools.count(1 << 30)

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._copies = [to_local(p).detach().clone() for p in self._params]
        self._watched = list({id(t): t for p in self._params for t in (p, to_local(p))}.values())
        self._versions = [tensor._version for tensor in self._watched]

    def mark(self) -> None:
        """Tell autograd that the weights hold something else now."""
        number = next(self._numbers)
        for tensor in self._watched:
            _set_version(tensor, number)

    def put_back(self) -> None:
        """Put the weights back."""
        for p, kept in zip(self._params, self._copies, strict=True):
            to_local(p).detach().copy_(kept)
        for tensor, version in zip(self._watched, self._versions, strict=True):
            _set_version(tensor, version)
        drop_gathered(p for p in self._params if is_sharded(p))


class SetAside:
    """A sample that is out of the weights for a moment, because somebody looks at the mean."""

    def __init__(self, plan: Plan, holder: Any) -> None:
        self.plan, self.holder = plan, holder
        self.looks = 1
        self.out = {id(p) for p in plan.owners()}
        self._kept = KeptWeights(plan.owners())

    def take_out(self) -> None:
        """Put the mean into the weights."""
        self.plan.twin().take_out()
        self._kept.mark()

    def put_back(self) -> None:
        """Put the sample back."""
        self._kept.put_back()


def _set_version(tensor: Tensor, version: int) -> None:
    set_counter: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counter((tensor,), (version,))
    except TypeError:  # as older torch has it
        set_counter(tensor, version)

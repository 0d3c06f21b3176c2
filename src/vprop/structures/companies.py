"""Parameters that are handled together in rotated coordinates, with what is kept of them in one piece of memory.

A small network's step is hundreds of tiny operations; on a GPU each costs its launch, whatever it is about. So all
matrices of a group are one flat tensor for what is done element by element, and those of one shape one batch for
matrix products. State is kept that way from step to step: the tensors of a parameter are views.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vprop.bundles import bundles, limit_for
from vprop.functional import eigenbasis
from vprop.functional.eigenbasis import Basis
from vprop.kernels.table import Table
from vprop.precision import compute_dtype, in_full_precision
from vprop.structures import floors
from vprop.structures.matrices import SIDES, SQUARES, in_a_row
from vprop.structures.members import GroupStep, Member, State, refuse_sparse_gradient

Pair = tuple[Member, State]

KEYS = (*("step", "hess", "momentum", "mean", "size"), *(f"{side}_{what}" for side in SIDES for what in SQUARES))
"""What is kept of a parameter; whatever else a state has is somebody else's."""


def batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Parameters whose matrices can be handled as one batch: of one group, shape, dtype and device, and same sides."""
    return bundles(
        pairs,
        kind=lambda pair: (_kind(pair), pair[0].p.shape, tuple(f"{side}_basis" in pair[1] for side in SIDES)),
        size=lambda pair: pair[0].p.numel(),
        limit=_limit,
    )


def companies(pairs: Iterable[Pair], keep: bool) -> list[Company]:
    """Batches that can share flat tensors, as large as ``foreach`` allows."""
    found = bundles(
        batches(pairs),
        kind=lambda batch: _kind(batch[0]),
        size=lambda batch: sum(member.p.numel() for member, _ in batch),
        limit=lambda batch: _limit(batch[0]),
    )
    return [Company(chosen, keep) for chosen in found]


def parted(leaving: Sequence[State], staying: Iterable[State]) -> list[State]:
    """Give tensors of their own to states that lie in memory which those that stay have left; the others, for later.

    Otherwise the state of one frozen parameter would keep that of all others alive, and be saved with it.
    """
    used = {state[key].untyped_storage().data_ptr() for state in staying for key in KEYS if key in state}
    later: list[State] = []
    for state in leaving:
        for key in KEYS:
            if key in state and state[key].untyped_storage().data_ptr() not in used:
                state[key] = state[key].clone()
            elif key in state and (not later or later[-1] is not state):
                later.append(state)
    return later


def _kind(pair: Pair) -> tuple[object, ...]:
    member, state = pair
    return member.group_number, member.p.dtype, member.p.device, "momentum" in state


def _limit(pair: Pair) -> float:
    return limit_for(pair[0].group["foreach"], pair[0].p.device)


@dataclass
class Batch:
    """Matrices of one shape: which of a company's parameters they are, and where in its flat tensors they lie."""

    members: slice
    elements: slice
    shape: tuple[int, int]
    bases: dict[str, Tensor]
    averages: dict[str, Tensor]

    @property
    def left(self) -> Basis:
        """Q_L of each matrix."""
        return self.bases.get("left")

    @property
    def right(self) -> Basis:
        """Q_R of each matrix."""
        return self.bases.get("right")

    def of(self, flat: Tensor) -> Tensor:
        """Its part of a flat tensor, as matrices."""
        return flat[self.elements].view(self.members.stop - self.members.start, *self.shape)


class Company:
    """Parameters of one group, dtype and device, with their state.

    With ``keep`` the tensors of the state become views of this company's. Otherwise they are copies, unless they lie in
    a row already, and :meth:`give_back` writes what has changed.
    """

    def __init__(self, found: Sequence[Sequence[Pair]], keep: bool) -> None:
        pairs = [pair for batch in found for pair in batch]
        self.members, self.states = [member for member, _ in pairs], [state for _, state in pairs]
        self.kept = keep
        self.with_momentum = ["momentum" in state for state in self.states]
        """When they were put together: those that get one later belong to other batches, as after loading them."""
        self.params = [member.p for member in self.members]
        self.lengths = [p.numel() for p in self.params]
        self.size, self.device, self.dtype = sum(self.lengths), self.params[0].device, compute_dtype(self.params[0])
        self.hess = self._joined("hess")
        self.momentum = self._joined("momentum") if "momentum" in self.states[0] else None
        self.mean = self._joined("mean") if "mean" in self.states[0] else None
        self.counts = self._joined("step")
        self.batches: list[Batch] = []
        for batch in found:
            self._add(batch)
        self.sizes: Tensor | None = self._joined_sizes() if floors.is_relative(self.step) else None
        self.floor: float | Tensor = floors.floor_of(self.step, self.sizes)
        """What h+δ is not below: one number, or one for each parameter."""
        self.table: Table | None = None
        """The same for kernels, once they were at work."""
        self.ahead = [0] * len(self.members)
        """What it was told of steps that some parameters are ahead of the first."""
        self._lengths: Tensor | None = None
        """On the device, once they were asked for: a copy from the host could not be captured in a CUDA graph."""
        self._addresses = [] if torch.compiler.is_compiling() else self._found_addresses()

    @property
    def step(self) -> GroupStep:
        """The group that all are of."""
        return self.members[0].step

    def is_current(self, states: Sequence[State]) -> bool:
        """Whether these are its states, and their tensors lie where they did, whoever may have moved them."""
        return (
            all(mine is found for mine, found in zip(self.states, states, strict=True))
            and self.with_momentum == ["momentum" in state for state in states]
            and self._found_addresses() == self._addresses
            and all(p.dtype == self.params[0].dtype and p.device == self.device for p in self.params)
        )

    def _found_addresses(self) -> list[list[int]]:
        return [[state[key].data_ptr() if key in state else 0 for key in KEYS] for state in self.states]

    # -- flat tensors and their parts ------------------------------------------------------------------------

    def _joined(self, key: str, states: Sequence[State] | None = None) -> Tensor:
        """What the states have under a key, one after the other."""
        states = self.states if states is None else states
        tensors = [state[key] for state in states]
        lying = in_a_row(tensors)
        if lying is not None and not (self.kept and lying.untyped_storage().nbytes() > lying.nbytes):
            return lying  # not beside what a parameter has left that is gone: its memory would stay
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.kept:
            pieces = flat.split([tensor.numel() for tensor in tensors])
            for state, piece, tensor in zip(states, pieces, tensors, strict=True):
                state[key] = piece.view(tensor.shape)
        return flat

    def _joined_sizes(self) -> Tensor:
        missing = [state for state in self.states if "size" not in state]
        if missing and not self.kept:
            return floors.sizes_of(self.params)
        for member, state in zip(self.members, self.states, strict=True):
            if "size" not in state:
                state["size"] = floors.size_of(member.p)
        return self._joined("size")

    def _add(self, batch: Sequence[Pair]) -> None:
        first = self.batches[-1].members.stop if self.batches else 0
        start = self.batches[-1].elements.stop if self.batches else 0
        shape, states = eigenbasis.matrix_shape(batch[0][0].p.shape), [state for _, state in batch]
        square: dict[str, dict[str, Tensor]] = {what: {} for what in SQUARES}
        for what, found in square.items():
            for side, length in zip(SIDES, shape, strict=True):
                if f"{side}_{what}" in states[0]:
                    found[side] = self._joined(f"{side}_{what}", states).view(-1, length, length)
        elements = slice(start, start + len(batch) * math.prod(shape))
        self.batches.append(
            Batch(slice(first, first + len(batch)), elements, shape, square["basis"], square["average"])
        )

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor in pieces like the parameters."""
        return [piece.view(p.shape) for piece, p in zip(flat.split(self.lengths), self.params, strict=True)]

    def spread(self, values: float | Tensor) -> float | Tensor:
        """Numbers of the parameters as one for each element; one for all as it is."""
        if not isinstance(values, Tensor):
            return values
        if self._lengths is None:
            self._lengths = torch.tensor(self.lengths, device="cpu").to(self.device)
        return values.to(self.device).repeat_interleave(self._lengths, output_size=self.size)

    # -- coordinates -----------------------------------------------------------------------------------------

    def into(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Into the coordinates of the bases."""
        out = torch.empty_like(flat) if out is None else out
        for batch in self.batches:
            _rotate(batch.of(flat), batch.left, batch.right, batch.of(out))
        return out

    def back(self, flat: Tensor, onto: Tensor) -> Tensor:
        """What is added in the coordinates of the weights, and what it is added to."""
        out = torch.empty_like(onto)
        for batch in self.batches:
            _rotate_back(batch.of(flat), batch.left, batch.right, batch.of(onto), batch.of(out))
        return out

    # -- weights and gradients -------------------------------------------------------------------------------

    def means(self, remember: bool) -> Tensor:
        """μ, while no sample is active, as :func:`~vprop.structures.members.mean_of` says.

        ``remember`` brings a mean that is kept beside coarse weights up to date, and gives that.
        """
        found = torch.empty(self.size, dtype=self.dtype, device=self.device)
        torch._foreach_copy_(self.pieces(found), [p.detach() for p in self.params])
        if self.mean is None:
            return found
        coarse = self.params[0].dtype
        mean = torch.where(self.mean.to(coarse) == found.to(coarse), self.mean.to(self.dtype), found)
        return self.mean.copy_(mean) if remember else mean

    def write(self, flat: Tensor) -> None:
        """Write into the weights."""
        torch._foreach_copy_([p.detach() for p in self.params], self.pieces(flat))

    def gradients(self) -> Tensor:
        """ĝ of the loss to be minimized; zero where there is none."""
        out = torch.empty(self.size, dtype=self.dtype, device=self.device)
        pieces, grads = self.pieces(out), [p.grad for p in self.params]
        for piece, grad in zip(pieces, grads, strict=True):
            if grad is None:
                piece.zero_()
        present = [(piece, grad.detach()) for piece, grad in zip(pieces, grads, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_([piece for piece, _ in present], [grad for _, grad in present])
        return out.neg_() if self.step.maximize else out

    def refuse_sparse_gradients(self) -> None:
        """An error, before anything is done."""
        for member in self.members:
            if member.p.grad is not None and member.p.grad.layout != torch.strided:
                refuse_sparse_gradient(member)

    def prior_means(self) -> float | Tensor:
        """m₀ of each element, or 0 for all."""
        given = [member.prior_mean for member in self.members]
        tensors = [mean.reshape(-1) for mean in given if isinstance(mean, Tensor)]
        return torch.cat(tensors).to(self.dtype) if tensors else 0.0

    # -- state -----------------------------------------------------------------------------------------------

    def look_at_sizes(self) -> None:
        """Bring the sizes of the weights, which hold the mean, up to date now and then where they limit the noise."""
        if self.sizes is None:
            return
        due = self.counts % floors.STEPS_BETWEEN_LOOKS == 0
        if not self.step.capturable and not torch.compiler.is_compiling() and not bool(due.any()):
            return
        now = floors.sizes_of(self.params)
        self.sizes.copy_(torch.where(due.to(now.device), now, self.sizes))
        assert isinstance(self.floor, Tensor)
        self.floor.copy_(floors.floor_of(self.step, self.sizes))  # type: ignore[arg-type]  # a graph writes there
        if self.table is not None:
            self.table.floors.copy_(self.floor)
        for state, size in zip(self.states, self.sizes.unbind(), strict=True) if not self.kept else []:
            state.setdefault("size", torch.empty_like(size)).copy_(size)

    def match_momentum(self, grad: Tensor) -> None:
        """Let the state have momenta if β₁ > 0, and none otherwise; late ones start as in the diagonal structure."""
        beta1 = self.step.group["betas"][0]
        if (beta1 > 0) == (self.momentum is not None):
            return
        self.table, self.momentum = None, None
        if beta1 > 0:
            counts = self.spread(self.counts.to(grad.dtype))
            late = grad * (1 - beta1**counts)
            self.momentum = torch.where(torch.isfinite(grad), late, 0)  # 0·NaN is NaN, for ever
            for state, piece in zip(self.states, self.pieces(self.momentum), strict=True):
                state["momentum"] = piece if self.kept else piece.clone()
        else:
            for state in self.states:
                state.pop("momentum", None)
        if self._addresses:
            self._addresses = self._found_addresses()

    def give_back(self) -> None:
        """Write what a step has changed into states that are not kept here."""
        if self.kept:
            return
        changed = {"hess": self.hess, "momentum": self.momentum, "mean": self.mean, "step": self.counts}
        for key, flat in changed.items():
            if flat is not None:
                targets = [state[key] for state in self.states]
                values = flat.unbind() if key == "step" else self.pieces(flat)
                torch._foreach_copy_(targets, list(values))
        for batch in self.batches:
            for side, averages in batch.averages.items():
                targets = [state[f"{side}_average"] for state in self.states[batch.members]]
                torch._foreach_copy_(targets, list(averages.unbind()))


@dataclass
class _Entry:
    """A company that may hold a sample, and its means."""

    company: Company
    means: Tensor | None = None
    done: bool = False


class CompanyPlan:
    """A sample of several companies, made as it is written; the means alone are kept: one copy of the weights.

    ``offsets`` gives what the sample adds to the means, in rotated coordinates. ``remember`` says that means which are
    kept beside coarse weights follow these.
    """

    def __init__(self, found: Iterable[Company], offsets: Callable[[Company], Tensor], remember: bool) -> None:
        self._entries = [_Entry(company) for company in found]
        self._offsets, self._remember = offsets, remember

    def write(self) -> None:
        """Write the sample into the weights, which hold the mean."""
        for entry in self._entries:
            offsets = self._offsets(entry.company)
            entry.means = entry.company.means(self._remember)
            entry.done = True
            entry.company.write(entry.company.back(offsets, onto=entry.means))

    def take_out(self) -> None:
        """Put the mean back, wherever the sample is in the weights."""
        for entry in self._entries:
            if entry.done and entry.means is not None:
                entry.company.write(entry.means)
                entry.done = False

    def twin(self) -> CompanyPlan:
        """The same sample, with a memory of its own of where it is in the weights."""
        twin = CompanyPlan([], self._offsets, self._remember)
        twin._entries = [copy.copy(entry) for entry in self._entries]
        return twin

    def owners(self) -> list[Tensor]:
        """The parameters that it is a sample of."""
        return [p for entry in self._entries for p in entry.company.params]


@in_full_precision
def _rotate(x: Tensor, left: Basis, right: Basis, out: Tensor) -> None:
    """``out`` = Q_Lᵀ x Q_R."""
    if left is None and right is None:
        out.copy_(x)
    elif right is None:
        torch.bmm(left.mT, x, out=out)  # type: ignore[union-attr]
    else:
        torch.bmm(x if left is None else left.mT @ x, right, out=out)


@in_full_precision
def _rotate_back(x: Tensor, left: Basis, right: Basis, onto: Tensor, out: Tensor) -> None:
    """``out`` = ``onto`` + Q_L x Q_Rᵀ."""
    if left is None and right is None:
        torch.add(onto, x, out=out)
    elif right is None:
        torch.baddbmm(onto, left, x, out=out)  # type: ignore[arg-type]
    else:
        torch.baddbmm(onto, x if left is None else left @ x, right.mT, out=out)

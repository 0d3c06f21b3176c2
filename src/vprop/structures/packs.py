"""Parameters that a kernel handles together: their addresses in a table, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from vprop import kernels
from vprop.kernels.call import Curvature, Noise
from vprop.kernels.table import COMPUTE, Role, Table, int64
from vprop.noise import Draw, Stream, source_word
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.sharding import block_of, local_grad, to_local
from vprop.structures import floors
from vprop.structures.members import GroupStep, Member, State, gradient_of, local_state, signed_sample
from vprop.structures.written import Written

_KEYS = {Role.HESS: "hess", Role.MOMENTUM: "momentum", Role.MEAN: "mean"}

_DTYPE, _GRAD, _IS_SPARSE = attrgetter("dtype"), attrgetter("grad"), attrgetter("is_sparse")
_IS_NONE = partial(is_, None)

PROBED_ELEMENTS = 256
"""Weights that tell whether a kernel was at work: copying them costs no more than copying one."""


class Pack:
    """Parameters of one group and kind, with their state.

    Their step counts become views of one tensor, so that counting is one operation however many they are.
    """

    def __init__(self, members: list[Member], states: list[State], backend: kernels.Backend) -> None:
        self.members, self.states, self.backend = members, states, backend
        self.step = members[0].step
        self.group = self.step.group
        self.direct: tuple[Curvature, float] | None = None
        """How a kernel makes ĥ of the gradients of a step, if it can without our folding them."""
        self.owners, self.params = [member.p for member in members], [member.local for member in members]
        self.is_sharded = self.owners[0] is not self.params[0]
        self.size = sum(p.numel() for p in self.params)
        self.counts = _as_one([state["step"] for state in states])
        for state, count in zip(states, self.counts.unbind(), strict=True):
            state["step"] = count
        roles = {role: key for role, key in _KEYS.items() if key in states[0]}
        self._getters = [itemgetter(key) for key in (*roles.values(), "step")]
        fixed = {Role.WEIGHT: self.params} | {role: [to_local(s[key]) for s in states] for role, key in roles.items()}
        self._priors: list[list[Tensor]] = []
        for role, prior in ((Role.PRIOR_MEAN, "prior_mean"), (Role.PRIOR_PRECISION, "prior_precision")):
            tensors = getattr(self.step, prior)
            if isinstance(tensors, list):
                self._priors.append(tensors)
                fixed[role] = [to_local(tensors[member.position]) for member in members]
        self.hess = fixed[Role.HESS]
        # Kept, because a sample may be taken out after the group got another prior.
        self.prior_precision, self._prior_mean = fixed.get(Role.PRIOR_PRECISION), fixed.get(Role.PRIOR_MEAN)
        device = self.params[0].device
        self._own_steps = self.counts.device == device
        self._offsets = [0] * len(members)
        steps = self.counts if self._own_steps else torch.zeros(len(members), dtype=torch.int64, device=device)
        blocks = [_first_block(member) for member in members] if self.is_sharded else None
        self.table = Table([member.number for member in members], fixed, steps, blocks)  # type: ignore[arg-type]
        self.sizes: Tensor | None = None
        """Of the weights of each parameter, where the floor is relative to them."""
        if floors.is_relative(self.step):
            self._take_sizes()
        self.take_floors()
        self._addresses = self._current_addresses()
        self.has_momentum = Role.MOMENTUM in self.table.roles
        """Whether the state holds an average of the gradients."""
        self.probe = _corner(max(self.params, key=Tensor.numel).detach())
        """Some weights, to see by whether a kernel was at work when an interrupt came."""

    def _take_sizes(self) -> None:
        """Let the sizes of the parameters be views of one tensor, as the step counts are."""
        for member, state in zip(self.members, self.states, strict=True):
            if "size" not in state:
                state["size"] = floors.size_of(member.p)
        self.sizes = _as_one([state["size"] for state in self.states])
        for state, size in zip(self.states, self.sizes.unbind(), strict=True):
            state["size"] = size
        self._getters.append(itemgetter("size"))

    def take_floors(self) -> None:
        """Tell the table what h+δ is not below. In place: a captured CUDA graph reads it there."""
        floor = floors.floor_of(self.step, self.sizes)
        if isinstance(floor, Tensor):
            self.table.floors.copy_(floor)
        else:
            self.table.floors.fill_(floor)

    def look_at_sizes(self) -> None:
        """Bring the sizes of the weights, which hold the mean, up to date now and then, and the floors with them."""
        assert self.sizes is not None
        due = self.counts % floors.STEPS_BETWEEN_LOOKS == 0
        if not self.step.capturable and not bool(due.any()):
            return
        if not self.is_sharded:  # else they are up to date: all ranks look at them in the same order
            now = floors.sizes_of(self.owners)
            self.sizes.copy_(torch.where(due.to(now.device), now, self.sizes))
        self.take_floors()

    def _current_addresses(self) -> list[list[Any]]:
        # Nothing but built-in functions: a model can have thousands of tensors, and this is done twice a step.
        params, states = self.params, self.states
        if self.is_sharded:
            params, states = list(map(to_local, self.owners)), list(map(local_state, states))
        found: list[list[Any]] = [list(map(len, self.states)), list(map(Tensor.data_ptr, params))]
        for look in (_DTYPE, Tensor.numel, Tensor.stride):
            found.append(list(map(look, params)))
        for getter in self._getters:
            found.append(list(map(Tensor.data_ptr, map(getter, states))))
        for tensors in self._priors:  # the list is the group's own, and its entries may be exchanged
            found.append([to_local(tensors[member.position]).data_ptr() for member in self.members])
        return found

    def is_current(self) -> bool:
        """Whether parameters and tensors of the state are still where they were, whoever may have moved them."""
        try:
            return self._current_addresses() == self._addresses
        except KeyError:  # a tensor of the state is gone
            return False

    def weights_changed(self) -> None:
        """Tell those who should know: a backward that needs the old weights must be an error, as after torch's own."""
        torch.autograd.graph.increment_version(self.params)
        if self.is_sharded:
            drop_gathered(self.owners)

    def gradients(self) -> list[Tensor | None]:
        """``p.grad`` of all parameters."""
        grads = list(map(local_grad, self.owners) if self.is_sharded else map(_GRAD, self.params))
        if any(map(_IS_SPARSE, filterfalse(_IS_NONE, grads))):
            for member in self.members:
                gradient_of(member, copy=False)  # says which, and what to do
        return grads

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, which will read the table whenever it runs."""
        on_cuda = self.step.capturable and self.table.device.type == "cuda"
        return on_cuda and torch.cuda.is_current_stream_capturing()

    def look_at_counts(self) -> None:
        """Let the table know the step counts, where it cannot read them itself."""
        if self._own_steps:
            return
        first = int(self.counts[0])
        self.table.first_step = first
        offsets = self.counts - first
        if bool(offsets.any()) or any(self._offsets):
            counts = offsets.tolist()
            if counts != self._offsets:
                self._offsets = counts
                self.table.steps.copy_(offsets)

    def count_step(self, took_part: Sequence[bool] | None, by: int = 1) -> Tensor | None:
        """Count a step of the parameters that took part in it; ``None`` for all of them.

        Returns the memory that was copied to the device, if any: a graph in capture reads it whenever it runs.
        """
        if took_part is None:
            self.counts += by
            return None
        host = int64(took_part).mul_(by)
        if self.counts.device.type == "cuda":
            host = host.pin_memory()
        self.counts += host.to(self.counts.device, non_blocking=True)
        return host

    def in_layout(self, tensors: list[Any], present: list[Tensor]) -> list[Any]:
        """Tensors like the parameters as kernels read them: laid out like the state. ``None`` stays."""
        if self.table.geometry is None and all(map(Tensor.is_contiguous, present)):
            return tensors
        return [
            t if t is None or t.stride() == h.stride() else torch.empty_like(h, dtype=t.dtype).copy_(t)
            for t, h in zip(tensors, self.hess, strict=True)
        ]


class Packs:
    """The packs of an optimizer, and the parameters that no kernel takes. Rebuilt when anything has changed.

    ``direct_of`` says how a kernel makes ĥ of the gradients of a group, if it can.
    """

    def __init__(self, direct_of: Callable[[GroupStep], tuple[Curvature, float] | None]) -> None:
        self.packs: list[Pack] = []
        self.others: list[Member] = []
        self._direct_of = direct_of
        self._groups: list[GroupStep] = []
        self._states: list[State] = []

    def refresh(self, groups: list[GroupStep], state: dict[Tensor, State], state_of: Callable[[Member], State]) -> None:
        """Look whether the packs still fit, and build them anew if not. ``state_of`` makes missing state."""
        if (
            len(groups) == len(self._groups)
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and all(map(Pack.is_current, self.packs))
        ):
            if all(map(is_, groups, self._groups)):
                return
            if all(map(_alike, groups, self._groups)):  # edited, but of the same parameters
                self._rebind(groups)
                return
        packs, others = [], []
        kinds: dict[tuple[Any, ...], list[tuple[Member, State]]] = {}
        for step in groups:
            for member in step.members:
                if not step.fused or not kernels.takes(member.local) or _first_block(member) is None:
                    others.append(member)
                    continue
                own = state_of(member)
                if _usual(member, own):
                    kinds.setdefault(_kind(member, own), []).append((member, own))
                else:
                    others.append(member)
        for found in kinds.values():
            backend = kernels.backend_for(found[0][0].p.device)
            assert backend is not None
            packs.append(Pack([member for member, _ in found], [own for _, own in found], backend))
            packs[-1].direct = self._direct_of(packs[-1].step)
        # All at once, and last: after an interrupt half-way, the next look must not find everything in order.
        self.packs, self.others, self._states = packs, others, list(state.values())
        self._groups = list(groups)

    def _rebind(self, groups: list[GroupStep]) -> None:
        """Let packs and others be those of groups of which only numbers have changed."""
        new = {(step.number, member.position): member for step in groups for member in step.members}
        for pack in self.packs:
            pack.members = [new[pack.step.number, member.position] for member in pack.members]
            pack.step = pack.members[0].step
            pack.direct = self._direct_of(pack.step)
            pack.take_floors()
        self.others = [new[member.group_number, member.position] for member in self.others]
        self._groups = list(groups)


def _alike(step: GroupStep, other: GroupStep) -> bool:
    """Whether two groups have the same parameters, in the hands of the same kernels."""
    return (
        step.group is other.group
        and step.fused == other.fused
        and step.capturable == other.capturable
        and floors.is_relative(step) == floors.is_relative(other)
        and len(step.members) == len(other.members)
        and all(map(_same_place, step.members, other.members))
        and all(
            getattr(step, name) is getattr(other, name)
            or (not isinstance(getattr(step, name), list) and not isinstance(getattr(other, name), list))
            for name in ("prior_mean", "prior_precision")
        )
    )


def _same_place(one: Member, two: Member) -> bool:
    """Whether two are of the same parameter, with the same noise and prior: frozen ones before it count."""
    return one.local is two.local and one.number == two.number and one.position == two.position


def _as_one(numbers: list[Tensor]) -> Tensor:
    """The numbers as one tensor; if they are views of one, that one, because a CUDA graph may write there."""
    first = numbers[0]
    width = first.element_size()
    if all(number.data_ptr() == first.data_ptr() + width * i for i, number in enumerate(numbers)):
        room = first.untyped_storage().nbytes() // width - first.storage_offset()
        if room >= len(numbers):
            return first.as_strided((len(numbers),), (1,))
    return torch.stack(numbers)


def _corner(tensor: Tensor) -> Tensor:
    """A view of a few elements. One would not do: a sample often rounds to the same bfloat16 number as the mean."""
    room = PROBED_ELEMENTS
    for dim in reversed(range(tensor.dim())):
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], max(1, room)))
        room //= max(1, tensor.shape[dim])
    return tensor


def _first_block(member: Member) -> int | None:
    """A quarter of the number of the first element that lies here; ``None`` if there is no saying for kernels.

    They generate the noise of four elements at a time, of which none may lie elsewhere, and of elements in a row.
    """
    if member.local is member.p:
        return 0
    start = block_of(member.p).start
    return None if start is None or start % 4 or not member.local.numel() else start // 4


def _usual(member: Member, state: State) -> bool:
    """Whether the state is as kernels expect it; a stranger may have put something else there."""
    p = member.local
    lists = (member.step.prior_mean, member.step.prior_precision)
    found = [(state[key], kernels.STATE_DTYPES[role]) for role, key in _KEYS.items() if key in state]
    found += [(tensors[member.position], (COMPUTE,)) for tensors in lists if isinstance(tensors, list)]
    step = state["step"]
    return (
        isinstance(step, Tensor)
        and step.shape == ()
        and step.dtype == torch.int64
        and all(
            type(t) is Tensor and t.dtype in dtypes and t.device == p.device and t.shape == p.shape
            for t, dtypes in [(to_local(tensor), dtypes) for tensor, dtypes in found]
        )
    )


def _kind(member: Member, state: State) -> tuple[Any, ...]:
    p = member.local
    tensors = [p] + [to_local(state[key]) for key in _KEYS.values() if key in state]
    return (
        member.group_number,
        p.device,
        tuple(map(_DTYPE, tensors)),
        state["step"].device,
        "momentum" in state,
        p is not member.p,
        all(tensor.is_contiguous() for tensor in tensors),
        all(tensor.data_ptr() % 16 == 0 for tensor in tensors),
    )


@dataclass
class PackedSample:
    """A sample of a pack's parameters, with all that is needed to generate its noise again."""

    pack: Pack
    noise: Noise
    table: Table
    done: bool = False
    """Whether it is in the weights."""
    means: list[Tensor] | None = None
    """Copies of the weights, where the noise differs from rank to rank: taken out, it would leave them with roundings
    of their own, and the ranks would drift apart."""

    def write(self) -> None:
        """Write the sample into the weights."""
        if self.pack.step.own_noise:
            self.means = [p.detach().clone() for p in self.pack.params]
        self._perturb(1)

    def take_out(self) -> None:
        """Put the mean back."""
        if self.means is None:
            self._perturb(-1)
            return
        torch._foreach_copy_([p.detach() for p in self.pack.params], self.means)
        self.done, self.means = False, None
        self.pack.weights_changed()

    def _perturb(self, direction: int) -> None:
        """Let the kernel work, and note what it did, also when an interrupt comes through just before or after it."""
        pack = self.pack
        before = None if pack.is_captured() else pack.probe.clone()
        try:
            pack.backend.perturb(self.table, self.noise, direction)
            self.done = direction > 0
        except BaseException:
            if before is not None and not torch.equal(before, pack.probe):
                self.done = direction > 0
            raise
        pack.weights_changed()

    def as_written(self) -> list[Written]:
        """The same for the portable path, to take it out with."""
        noise, pack = self.noise, self.pack
        entries = []
        for i, (member, state) in enumerate(zip(pack.members, pack.states, strict=True)):
            count = pack.counts[i]
            step = count if pack.step.capturable else int(count)
            draw = Draw(noise.seed, member.number, step, noise.source & (2**30 - 1), Stream(noise.source >> 30))
            damping = noise.damping if pack.prior_precision is None else pack.prior_precision[i] / noise.ess
            floor = self.table.floors[i].clone()
            mean = to_local(state.get("mean")) if self.means is None else self.means[i]
            hess = pack.hess[i].to(COMPUTE)
            entries.append(Written(member, draw, noise.sign, hess, noise.ess, damping, floor, mean, done=True))
        return entries


def noise_of(step: GroupStep, sample: int, stream: Stream) -> Noise:
    """The noise of a sample of a group."""
    known = step.noises.get((sample, stream))
    if known is not None:
        return known
    number, sign = signed_sample(step, sample) if stream is Stream.TRAINING else (sample, 1)
    damping = 0.0 if isinstance(step.prior_precision, list) else step.damping
    noise = Noise(step.seed, source_word(stream, number), sign, step.ess, damping)
    step.noises[sample, stream] = noise
    return noise

"""Parameters that a kernel handles together: their addresses in a table, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from vprop import kernels
from vprop.kernels.call import Noise
from vprop.kernels.table import Role, Table, int64
from vprop.noise import Stream, source_word
from vprop.optim._members import Member, members_of, signed_sample
from vprop.precision import compute_dtype

_KEYS = {Role.HESS: "hess", Role.MOMENTUM: "momentum", Role.MEAN: "mean"}

_REQUIRES_GRAD = attrgetter("requires_grad")

State = dict[str, Tensor]


class Pack:
    """Parameters of one group and kind, with their state.

    Their step counts become views of one tensor, so that counting is one operation however many they are.
    """

    def __init__(self, members: list[Member], states: list[State], backend: kernels.Backend) -> None:
        self.members, self.states, self.backend = members, states, backend
        self.group, self.group_number = members[0].group, members[0].group_number
        self.params = [member.p for member in members]
        self.size = sum(p.numel() for p in self.params)
        self.counts = torch.stack([state["step"] for state in states])
        for state, count in zip(states, self.counts.unbind(), strict=True):
            state["step"] = count
        roles = {role: key for role, key in _KEYS.items() if key in states[0]}
        self._getters = [itemgetter(key) for key in (*roles.values(), "step")]
        fixed = {Role.WEIGHT: self.params} | {role: [s[key] for s in states] for role, key in roles.items()}
        for role, prior in ((Role.PRIOR_MEAN, "prior_mean"), (Role.PRIOR_PRECISION, "prior_precision")):
            if isinstance(self.group[prior], list):
                fixed[role] = [self.group[prior][member.position] for member in members]
        self._hess = fixed[Role.HESS]
        device = self.params[0].device
        self._own_steps = self.counts.device == device
        self._offsets = [0] * len(members)
        steps = self.counts if self._own_steps else torch.zeros(len(members), dtype=torch.int64, device=device)
        self.table = Table([member.number for member in members], fixed, steps)
        self._addresses = self._current_addresses()

    def _current_addresses(self) -> list[list[int]]:
        # Nothing but built-in functions: a model can have thousands of tensors, and this is done twice a step.
        columns = [self.params, *(map(getter, self.states) for getter in self._getters)]
        return [list(map(Tensor.data_ptr, column)) for column in columns] + [list(map(len, self.states))]

    def is_current(self) -> bool:
        """Whether parameters and tensors of the state are still where they were, whoever may have moved them."""
        try:
            return self._current_addresses() == self._addresses
        except KeyError:  # a tensor of the state is gone
            return False

    def tell_autograd(self) -> None:
        """The weights have changed: a backward that needs the old ones must be an error, as after torch's own."""
        torch.autograd.graph.increment_version(self.params)

    def has_momentum(self) -> bool:
        """Whether the state holds an average of the gradients."""
        return Role.MOMENTUM in self.table.roles

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

    def count_step(self, took_part: Sequence[bool] | None) -> None:
        """Count a step of the parameters that took part in it; ``None`` for all of them."""
        self.counts += 1 if took_part is None else int64(took_part).to(self.counts.device)

    def in_layout(self, tensors: list[Any], present: list[Tensor]) -> list[Any]:
        """Tensors like the parameters as kernels read them: laid out like the state. ``None`` stays."""
        if self.table.geometry is None and all(map(Tensor.is_contiguous, present)):
            return tensors
        return [
            t if t is None or t.stride() == h.stride() else torch.empty_like(h, dtype=t.dtype).copy_(t)
            for t, h in zip(tensors, self._hess, strict=True)
        ]


class Packs:
    """The packs of an optimizer, and the parameters that no kernel takes. Rebuilt when anything has changed."""

    def __init__(self) -> None:
        self.packs: list[Pack] = []
        self.others: list[Member] = []
        self._groups: list[tuple[Any, ...]] = []
        self._params: list[list[Tensor]] = []
        self._states: list[State] = []

    def refresh(
        self,
        param_groups: list[dict[str, Any]],
        state: dict[Tensor, State],
        state_of: Callable[[Member], State],
        allowed: Callable[[dict[str, Any]], bool],
    ) -> None:
        """Look whether the packs still fit, and build them anew if not. ``state_of`` makes missing state."""
        groups = [_fingerprint(group, allowed(group)) for group in param_groups]
        if (
            groups == self._groups
            and all(_same(group["params"], params) for group, params in zip(param_groups, self._params, strict=True))
            and _same(state.values(), self._states)
            and all(pack.is_current() for pack in self.packs)
        ):
            return
        self._groups, self._params = groups, [list(group["params"]) for group in param_groups]
        self.packs, self.others = [], []
        kinds: dict[tuple[Any, ...], list[tuple[Member, State]]] = {}
        for member in members_of(param_groups):
            if not (groups[member.group_number][0] and kernels.takes(member.p)):
                self.others.append(member)
                continue
            own = state_of(member)
            if _usual(member, own):
                kinds.setdefault(_kind(member, own), []).append((member, own))
            else:
                self.others.append(member)
        for found in kinds.values():
            backend = kernels.backend_for(found[0][0].p.device)
            assert backend is not None
            self.packs.append(Pack([member for member, _ in found], [own for _, own in found], backend))
        self._states = list(state.values())


def _same(objects: Collection[Any], known: list[Any]) -> bool:
    """Whether these are the very same objects in the same order."""
    return len(objects) == len(known) and all(map(is_, objects, known))


def _fingerprint(group: dict[str, Any], allowed: bool) -> tuple[Any, ...]:
    """What packs depend on beside the tensors of parameters and state."""
    lists = (group["prior_mean"], group["prior_precision"])
    return (
        allowed,
        group["capturable"],
        list(map(_REQUIRES_GRAD, group["params"])),
        [list(map(Tensor.data_ptr, tensors)) if isinstance(tensors, list) else None for tensors in lists],
    )


def _usual(member: Member, state: State) -> bool:
    """Whether the state is as kernels expect it; a stranger may have put something else there."""
    p = member.p
    lists = (member.group["prior_mean"], member.group["prior_precision"])
    extra = [tensors[member.position] for tensors in lists if isinstance(tensors, list)]
    tensors = [state[key] for key in _KEYS.values() if key in state] + extra
    return all(
        type(t) is Tensor and t.dtype == compute_dtype(p) and t.device == p.device and t.shape == p.shape
        for t in tensors
    )


def _kind(member: Member, state: State) -> tuple[Any, ...]:
    p = member.p
    tensors = [p] + [state[key] for key in _KEYS.values() if key in state]
    return (
        member.group_number,
        p.device,
        p.dtype,
        "momentum" in state,
        all(tensor.is_contiguous() for tensor in tensors),
        all(tensor.data_ptr() % 16 == 0 for tensor in tensors),
    )


@dataclass
class PackedSample:
    """A sample of a pack's parameters, with all that is needed to generate its noise again."""

    pack: Pack
    noise: Noise
    table: Table
    sample: int
    done: bool = False
    """Whether it is in the weights."""

    def write(self) -> None:
        """Write the sample into the weights."""
        self._perturb(1)

    def take_out(self) -> None:
        """Put the mean back."""
        self._perturb(-1)

    def _perturb(self, direction: int) -> None:
        try:
            self.pack.backend.perturb(self.table, self.noise, direction)
        except Exception:
            raise
        except BaseException:  # an interrupt, which backends pass on when their work is done
            self.done = direction > 0
            raise
        self.done = direction > 0
        self.pack.tell_autograd()


def noise_of(group: dict[str, Any], sample: int, stream: Stream) -> Noise:
    """The noise of a sample of a group."""
    number, sign = signed_sample(group, sample) if stream is Stream.TRAINING else (sample, 1)
    ess, precision = group["num_data"] / group["temperature"], group["prior_precision"]
    damping = 0.0 if isinstance(precision, list) else precision / ess
    return Noise(group["seed"], source_word(stream, number), sign, ess, damping)

"""Several structures in one optimizer, each over the groups that ask for it, and independent of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vprop.objective import Objective
from vprop.posterior import ComposedPosterior
from vprop.structures.base import Structure, TensorSpec
from vprop.structures.members import GroupStep, Marginal, State, named_members, refuse_sparse_gradient
from vprop.structures.plans import Plan
from vprop.wrappers import unwrapped


class ComposedPlan:
    """A sample of all parameters, by structure."""

    def __init__(self, plans: dict[str, Plan]) -> None:
        self.plans = plans

    def write(self) -> None:
        """Write the sample into the weights, which hold the mean."""
        for plan in self.plans.values():
            plan.write()

    def take_out(self) -> None:
        """Put the mean back, wherever the sample is in the weights."""
        for plan in self.plans.values():
            plan.take_out()

    def twin(self) -> ComposedPlan:
        """The same sample, with a memory of its own of where it is in the weights."""
        return ComposedPlan({name: plan.twin() for name, plan in self.plans.items()})

    def owners(self) -> list[Tensor]:
        """The parameters that it is a sample of."""
        return [p for plan in self.plans.values() for p in plan.owners()]


class Composed(Structure):
    """Structures by name, of which each group's entry ``structure`` chooses one."""

    name = "composed"

    def __init__(self, optimizer: str, parts: dict[str, Structure]) -> None:
        self.parts = parts
        super().__init__(optimizer)

    def take_over(self, former: Structure) -> None:
        """Each part keeps what outlives a load of a checkpoint."""
        super().take_over(former)
        theirs = former.parts if isinstance(former, Composed) else {former.name: former}
        for name, part in self.parts.items():
            if name in theirs and theirs[name] is not part:
                part.take_over(theirs[name])

    def _of(self, group: Mapping[str, Any]) -> Structure:
        return self.parts[group["structure"]]

    def _by_part(self, groups: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        split: dict[str, list[dict[str, Any]]] = {name: [] for name in self.parts}
        for group in groups:
            split[group["structure"]].append(group)
        return split

    def prepare(self, groups: list[GroupStep], state: dict[Tensor, State]) -> None:
        """Say so to each part of its groups."""
        if groups is not self.groups:
            self._steps: dict[str, list[GroupStep]] = {
                name: [step for step in groups if step.group["structure"] == name] for name in self.parts
            }
        super().prepare(groups, state)
        for name, part in self.parts.items():
            part.prepare(self._steps[name], state)
            part.own_gradients, part.unusable = self.own_gradients, self.unusable

    # -- what the loops ask and say --------------------------------------------------------------------------

    @property
    def has_folded(self) -> bool:  # type: ignore[override]
        """Whether there may be something of this step's samples to forget."""
        return any(part.has_folded for part in self.parts.values())

    @property
    def examples(self) -> int | None:
        """How many examples the objective of this step has, on all ranks."""
        return next(iter(self.parts.values())).examples

    @examples.setter
    def examples(self, count: int | None) -> None:
        for part in self.parts.values():
            part.examples = count

    @property
    def clipped(self) -> dict[int, list[tuple[Tensor, int]]]:
        """Of the last step, by group: (elements at the clip radius, elements) of each bundle."""
        return {number: counts for part in self.parts.values() for number, counts in part.clipped.items()}

    @clipped.setter
    def clipped(self, counts: dict[int, list[tuple[Tensor, int]]]) -> None:
        """Each part counts for itself."""

    # -- what a structure provides ---------------------------------------------------------------------------

    def spec_of(self, group: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        """That of the group's structure."""
        return self._of(group).state_spec

    def kernels_for(self, group: Mapping[str, Any]) -> bool:
        """Whether the group's structure has kernels."""
        return self._of(group).has_kernels

    def check_group(self, group: dict[str, Any]) -> None:
        """As the group's structure does."""
        self._of(group).check_group(group)

    def check_groups(self, groups: list[dict[str, Any]], shared: Iterable[str]) -> None:
        """As each structure does of its groups."""
        shared = list(shared)
        for name, own in self._by_part(groups).items():
            if own:
                self.parts[name].check_groups(own, shared)

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:
        """As each structure does of its groups."""
        for name, part in self.parts.items():
            part.check_state([step for step in groups if step.group["structure"] == name], state)

    def make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""
        for part in self.parts.values():
            part.make_state()

    def plan(self, sample: int, evaluation_draw: int | None) -> ComposedPlan:
        """One of each part; ε is addressed by the parameter's number among all."""
        return ComposedPlan({name: part.plan(sample, evaluation_draw) for name, part in self.parts.items()})

    def observe(self, objective: Objective, sample: int) -> None:
        """Let those estimators look at the objective that need it."""
        for part in self.parts.values():
            if part.needs_objective:
                part.observe(objective, sample)

    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold the gradients of all parameters.

        A part may find out in its update only that it cannot do with a gradient, when others have made their step.
        """
        for member in self.members:
            if member.p.grad is not None and member.p.grad.layout != torch.strided:
                refuse_sparse_gradient(member)
        for part in self.parts.values():
            part.fold(sample, folded_samples)

    def update(self, plan: Plan | None) -> None:
        """One step of all parameters."""
        plans: dict[str, Plan] = plan.plans if isinstance(plan, ComposedPlan) else {}
        for name, part in self.parts.items():
            part.update(plans.get(name))

    def refresh_bases(self, solve: bool | None) -> None:
        """Those of all parts."""
        for part in self.parts.values():
            part.refresh_bases(solve)

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        for part in self.parts.values():
            part.forget()

    def marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        """Of all parameters, in the order of the groups."""
        found = [marginal for part in self.parts.values() for marginal in part.marginals(at_least)]
        yield from sorted(found, key=lambda marginal: marginal.member.number)

    def posterior(self, model: nn.Module, **rest: Any) -> ComposedPosterior:
        """The parts' posteriors, as one."""
        named_members(unwrapped(model), self.members)  # refuses for all parts together what each refuses for itself
        plain = {name: value for name, value in rest.items() if name in ("temperature", "seed", "snapshot")}
        parts = {name: part.posterior(model, **plain) for name, part in self.parts.items() if part.members}
        ess = {part.ess for part in parts.values()}
        return ComposedPosterior.of(parts, ess=ess.pop() if len(ess) == 1 else None, **rest)

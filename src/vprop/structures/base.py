"""What a structure of the posterior is: how a Gaussian over the weights is kept, drawn, updated and asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop.curvature import CurvatureEstimator
from vprop.kernels.table import new_counter
from vprop.objective import Objective
from vprop.parallel.ranks import OwnGradients, average_over_ranks, rank_and_count, require_averaged
from vprop.posterior import Posterior
from vprop.precision import compute_dtype, needs_master_copy
from vprop.structures.members import (
    GroupStep,
    Marginal,
    Member,
    State,
    label_draw_of,
    members_of,
    new_state,
    parameters_in,
)
from vprop.structures.plans import Plan


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a structure keeps of a parameter."""

    like_parameter: bool = True
    """Whether it has the parameter's shape, and is sharded as the parameter is; if not, the structure checks it."""
    needed: bool = False
    """Whether there is no going on without it, once the parameter has a state."""
    dtype: torch.dtype | None = None
    """Its precision; ``None`` is that of the arithmetic on the parameter."""
    positive: bool = False
    may_be_anything: bool = False
    """Whether NaNs in it do no harm, because the update looks before it uses it."""

    def dtype_for(self, p: Tensor) -> torch.dtype:
        """The precision that it is kept in, for a parameter."""
        return compute_dtype(p) if self.dtype is None else self.dtype


MEAN = TensorSpec(may_be_anything=True)
"""The float32 mean of bfloat16 and float16 weights, which every structure keeps beside the step count."""


class Structure(ABC):
    """How a Gaussian over the weights is kept. An optimizer holds one, and delegates to it.

    ``prepare`` comes first: it says which groups, as a step sees them, and whose state. Then a step is ``plan`` (and
    the plan's ``write``) for each sample, ``fold`` of each sample's gradients, ``update``, ``forget``. What a
    structure remembers between two of these calls is its own.
    """

    state_spec: ClassVar[Mapping[str, TensorSpec]] = {"mean": MEAN}
    """The tensors in the state of a parameter, by key, beside ``step``."""
    has_kernels: ClassVar[bool] = False
    """Whether there are kernels for its samples and updates."""

    def __init__(self, optimizer: str) -> None:
        self.optimizer = optimizer
        """The name of the optimizer, for messages."""
        self.groups: list[GroupStep] = []
        self.state: dict[Tensor, State] = {}
        self.own_gradients = OwnGradients()
        """Of ranks with noise of their own, before they were averaged."""
        self.unusable: dict[torch.device, Tensor] = {}
        """Gradient elements left out and not yet reported."""
        self.clipped: dict[int, list[tuple[Tensor, int]]] = {}
        """Of the last step, by group: (elements at the clip radius, elements) of each bundle."""
        self.needs_objective = False
        """Whether the curvature needs more than gradients, so that ``step`` must be given an objective."""
        self.follows_priors = False
        """Whether a prior precision is to be changed after steps."""
        self.has_folded = False
        """Whether there is something of this step's samples to forget."""
        self._ranks_checked = False

    def take_over(self, former: Structure) -> None:
        """Keep what outlives a load of a checkpoint: hooks that watch gradients."""
        self.own_gradients = former.own_gradients

    def prepare(self, groups: list[GroupStep], state: dict[Tensor, State]) -> None:
        """Say which groups the next calls are about, and where the state is."""
        self.state = state
        if groups is not self.groups:
            self.groups = groups
            self.needs_objective = any(step.estimator.needs_objective for step in groups)
            self.follows_priors = any(step.group.get("auto_prior") is not None for step in groups)

    @property
    def members(self) -> list[Member]:
        """All parameters that take part."""
        return list(members_of(self.groups))

    # -- what a structure provides ---------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:  # noqa: B027 (not all have something to check)
        """Refuse hyperparameters or parameters that the structure cannot do with."""

    def check_groups(self, groups: list[dict[str, Any]], shared: Iterable[str]) -> None:  # noqa: B027
        """Refuse groups that do not go together; ``shared`` names what must be the same for one covariance over all."""

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:  # noqa: B027
        """Refuse a loaded state, of which each tensor is as ``state_spec`` says, that does not go together."""

    @abstractmethod
    def make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""

    @abstractmethod
    def plan(self, sample: int, evaluation_draw: int | None) -> Plan:
        """Which noise goes where: all that writing a sample, and taking it out again, needs.

        ``evaluation_draw`` is ``None`` for a sample of the coming step.
        """

    @abstractmethod
    def observe(self, objective: Objective, sample: int) -> None:
        """Let the curvature estimator look at the objective, at the sample that is in the weights."""

    @abstractmethod
    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold ``p.grad`` of all parameters, the gradient at a sample, into this step's statistics.

        ``sample`` is ``None`` where the gradients are those at the mean; ``folded_samples`` were folded before.
        """

    @abstractmethod
    def update(self, plan: Plan | None) -> None:
        """Update mean and curvature from this step's statistics.

        ``plan`` is that of the last sample, if it is still in the weights: take it out, or update from there.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget what was folded of this step's samples."""

    @abstractmethod
    def marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        """Mean and variance of each parameter that has made this many steps; they may share memory with the state."""

    @abstractmethod
    def posterior(self, model: nn.Module, **rest: Any) -> Posterior:
        """A snapshot of the posterior over ``model``'s parameters; ``rest`` are further arguments of its class."""

    # -- state -----------------------------------------------------------------------------------------------

    def new_state(self, member: Member) -> State:
        """The state of a parameter before its first step."""
        return new_state(member)

    def peek_state(self, member: Member) -> State:
        """The state of a parameter, or what it would be, without keeping it."""
        state = self.state.get(member.p, {})
        if state and needs_master_copy(member.p) == ("mean" in state):
            return state
        # None yet, or one from a checkpoint whose weights had another precision.
        complete = self.new_state(member)
        complete.update(state)
        if not needs_master_copy(member.p):
            complete.pop("mean", None)
        return complete

    def state_of(self, member: Member) -> State:
        """The state of a parameter; made, if there is none."""
        state = self.state[member.p] = self.peek_state(member)
        return state

    def steps_of(self, p: Tensor) -> int:
        """How many steps a parameter has made."""
        return int(self.state[p]["step"]) if self.state.get(p) else 0

    # -- reports ---------------------------------------------------------------------------------------------

    def unusable_on(self, device: torch.device) -> Tensor:
        """Where elements that are left out are counted; the sum counts."""
        if device not in self.unusable:
            self.unusable[device] = new_counter(device)
        return self.unusable[device]

    def count_unusable(self, count: Tensor) -> None:
        """Count elements that were left out."""
        self.unusable_on(count.device).view(-1)[0] += count

    # -- objectives and ranks --------------------------------------------------------------------------------

    def observed(
        self, estimator: CurvatureEstimator, objective: Objective, members: list[Member], sample: int
    ) -> list[Tensor]:
        """What the estimator sees in the objective, for each parameter, at the sample that is in the weights."""
        if any(member.local is not member.p for member in members):
            raise RuntimeError(
                f"{self.optimizer} needs more of the model than its gradients, which is not possible where "
                "parameters are spread over ranks (FSDP, tensor parallel). Use DistributedDataParallel, or an "
                "optimizer that needs gradients only: Vprop, IVON, Vadam."
            )
        rank = rank_and_count(objective.process_group)[0] if estimator.draws_labels else 0
        inside = parameters_in(objective, members, self.optimizer)
        draw = label_draw_of(members[0], self.peek_state(members[0]), sample, rank)
        sign = -1 if estimator.signed and members[0].step.maximize else 1
        return [sign * value.detach() for value in estimator.observe(objective, inside, draw)]

    def seen_by_all(self, curvatures: list[Tensor], objective: Objective, step: GroupStep) -> list[Tensor]:
        """Curvatures of a batch, from those of its parts that ranks with the same sample have looked at."""
        if objective.process_group is None or step.own_noise:
            return curvatures
        return average_over_ranks(curvatures, objective.process_group)

    def own_gradient(self, member: Member) -> Tensor:
        """ĝ of this rank alone, at its own sample."""
        grad, p = self.own_gradients.take(member.p), member.local
        if grad is None:
            return torch.zeros_like(p, dtype=compute_dtype(p))
        grad = grad.to(compute_dtype(p))
        return -grad if member.step.maximize else grad

    def require_averaged(self, grads: list[Tensor]) -> None:
        """Look once whether somebody averages the gradients over the ranks."""
        if not self._ranks_checked:
            require_averaged(grads)
            self._ranks_checked = True

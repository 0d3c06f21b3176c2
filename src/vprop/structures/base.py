"""What a structure of the posterior is: how a Gaussian over the weights is kept, drawn, updated and asked."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import invalid
from vprop.curvature import CurvatureEstimator, Evidence, Folded
from vprop.curvature._base import folded_before
from vprop.kernels.table import new_counter
from vprop.objective import Objective
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.ranks import OwnGradients, average_over_ranks, rank_and_count, require_averaged
from vprop.parallel.sharding import full_tensor
from vprop.posterior import GaussianPrior, Posterior
from vprop.precision import compute_dtype, in_precision_of, needs_master_copy
from vprop.structures.checks import refuse_sharded_parameters
from vprop.structures.floors import is_relative
from vprop.structures.members import (
    GroupStep,
    Marginal,
    Member,
    State,
    draw_of,
    gradient_of,
    label_draw_of,
    mean_of,
    members_of,
    named_members,
    parameters_in,
)
from vprop.structures.plans import Plan
from vprop.wrappers import unwrapped


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a structure keeps of a parameter."""

    like_parameter: bool = True
    """Whether it has the parameter's shape, and is sharded as the parameter is; if not, see ``shape``."""
    shape: tuple[int, ...] | None = None
    """The shape of one that is not like the parameter; ``None``: the structure checks it, in ``check_state``."""
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


class Snapshot(NamedTuple):
    """What every posterior is made from, whatever its structure."""

    model: nn.Module
    named: list[tuple[str, Member]]
    """The parameters by name, in the order of the model."""
    mean: dict[str, Tensor]
    prior: GaussianPrior
    ess: float | None


class Structure(ABC):
    """How a Gaussian over the weights is kept. An optimizer holds one, and delegates to it.

    ``prepare`` comes first: it says which groups, as a step sees them, and whose state. Then a step is ``plan`` (and
    the plan's ``write``) for each sample, ``fold`` of each sample's gradients, ``update``, ``forget``. What a
    structure remembers between two of these calls is its own.

    One in which the parameters are independent needs ``new_state``, ``variance``, ``plan``, ``fold``, ``update``,
    ``forget`` and ``posterior``; what they have in common with others' is here (``noises``, ``fold_gradients``,
    ``write_mean``, ``snapshot``). One with correlations has its own ``marginals``.
    """

    name: ClassVar[str] = ""
    """What the argument ``structure`` of optimizers calls it, if it is one of those that they choose from."""
    state_spec: ClassVar[Mapping[str, TensorSpec]] = {"mean": MEAN}
    """The tensors in the state of a parameter, by key, beside ``step``."""
    has_kernels: ClassVar[bool] = False
    """Whether there are kernels for its samples and updates."""
    takes_sharded: ClassVar[bool] = False
    """Whether parameters may be spread over ranks (FSDP, tensor parallel)."""
    takes_own_noise: ClassVar[bool] = False
    """Whether ranks may have noise of their own, so that their curvatures must be averaged (:meth:`own_gradient`)."""
    has_folded = True
    """Whether there may be something of this step's samples to forget. A structure may keep account of it."""

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
        self.asks_objective = False
        """Whether the size of a mini-batch is to be read off an objective."""
        self.has_limits = False
        """Whether noise is limited by the size of the weights, so that they are to be looked at."""
        self.examples: int | None = None
        """How many examples the objective of this step has, on all ranks."""
        self.most_examples = 0
        """The most that the objective of a step had: the last of an epoch may have fewer. 0 if none was seen."""
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
            self.asks_objective = any(step.batch_size == "objective" for step in groups)
            self.has_limits = any(map(is_relative, groups))

    @property
    def members(self) -> list[Member]:
        """All parameters that take part."""
        return list(members_of(self.groups))

    # -- what a structure provides ---------------------------------------------------------------------------

    def spec_of(self, group: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        """``state_spec`` of the parameters of a group."""
        return self.state_spec

    def kernels_for(self, group: Mapping[str, Any]) -> bool:
        """``has_kernels`` for the parameters of a group."""
        return self.has_kernels

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters or parameters that the structure cannot do with. To be extended."""
        if not self.takes_sharded:
            refuse_sharded_parameters(group, self.optimizer)
        if not self.takes_own_noise and group.get("noise") == "per_rank":
            raise invalid("noise", "per_rank", f'"shared" for {self.optimizer}', "Its structure has one noise for all.")

    def check_groups(self, groups: list[dict[str, Any]], shared: Iterable[str]) -> None:  # noqa: B027 (not all have any)
        """Refuse groups that do not go together; ``shared`` names what must be the same for one covariance over all."""

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:  # noqa: B027
        """Refuse a loaded state, of which each tensor is as ``state_spec`` says, that does not go together."""

    def make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""
        for member in self.members:
            self.state_of(member)

    def variance(self, member: Member, state: State) -> Tensor:
        """σ² of each weight of a parameter, like the parameter; for :meth:`marginals`."""
        raise NotImplementedError(f"{type(self).__name__} has neither variance() nor marginals() of its own")

    @abstractmethod
    def plan(self, sample: int, evaluation_draw: int | None) -> Plan:
        """Which noise goes where: all that writing a sample, and taking it out again, needs.

        ``evaluation_draw`` is ``None`` for a sample of the coming step.
        """

    def observe(self, objective: Objective, sample: int) -> None:
        """Let the curvature estimator look at the objective, at the sample that is in the weights.

        Only called for estimators that need it.
        """
        raise NotImplementedError(f"{type(self).__name__} is for estimators of the curvature that need gradients only")

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

    def refresh_bases(self, solve: bool | None) -> None:  # noqa: B027 (not all have any)
        """Let coordinates that follow the gradients follow them now; ``solve`` says how, if it says anything."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was folded of this step's samples."""

    def marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        """Mean and variance of each parameter that has made this many steps; they may share memory with the state."""
        for member in self.members:
            steps = self.steps_of(member.p)
            if steps >= at_least:
                state = self.peek_state(member)
                hess = state.get("hess")
                if hess is not None:  # and if it is h of the weights
                    hess = hess.to(compute_dtype(member.p)) if hess.shape == member.p.shape else None
                yield Marginal(member, mean_of(member.p, state), self.variance(member, state), hess, steps)

    @abstractmethod
    def posterior(self, model: nn.Module, **rest: Any) -> Posterior:
        """A snapshot of the posterior over ``model``'s parameters; ``rest`` are further arguments of its class."""

    # -- state -----------------------------------------------------------------------------------------------

    def new_state(self, member: Member) -> State:
        """The state of a parameter before its first step: the step count, and a mean of its own for coarse weights."""
        p, device = member.p, member.p.device if member.group["capturable"] else "cpu"
        state = {"step": torch.zeros((), dtype=torch.int64, device=device)}
        if needs_master_copy(p):
            state["mean"] = p.detach().to(self.dtype_of("mean", member), copy=True)
        return state

    def dtype_of(self, key: str, member: Member) -> torch.dtype:
        """What a tensor of the state of a parameter is kept in; computed with it is in ``compute_dtype``."""
        return self.state_spec[key].dtype_for(member.p)

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

    # -- mini-batches ------------------------------------------------------------------------------------------

    def batch_size_of(self, step: GroupStep) -> float | None:
        """M, how many independent examples this step's gradients are a mean of; ``None`` if nobody said so."""
        if step.batch_size != "objective":
            return step.batch_size  # type: ignore[return-value]
        if self.examples is None:
            raise ValueError(
                'batch_size="objective" needs step(vprop.Objective(...)), which knows its batch. With other closures '
                "and loops, with targets that do not say how many they are, and with FSDP, give batch_size as a number."
            )
        return self.examples

    def factor_of(self, step: GroupStep) -> float:
        """What an estimator multiplies by: N/τ, or M of the gradients that it sees."""
        size = self.batch_size_of(step) if step.estimator.counts_examples else None
        if size is None:
            return step.ess
        # With noise of its own a rank squares its own gradient, a mean over its part of the examples.
        return size / rank_and_count()[1] if step.own_noise else size

    def require_batch_sizes(self) -> None:
        """Refuse a step that needs to know M and cannot, before anything has changed."""
        for step in self.groups:
            if step.estimator.counts_examples or step.divides_by_root:
                self.batch_size_of(step)

    # -- parts of samples, steps and posteriors ----------------------------------------------------------------

    def noises(self, sample: int, evaluation_draw: int | None) -> Iterator[tuple[Member, State, Tensor]]:
        """Every parameter with its state and ε of a sample, for :meth:`plan`. Evaluation leaves no state behind."""
        members = self.members
        states = [self.state_of(m) if evaluation_draw is None else self.peek_state(m) for m in members]
        draws = [draw_of(m, state, sample, evaluation_draw) for m, state in zip(members, states, strict=True)]
        noises = dict(noise.normals_like([member.p for member in members], [draw for draw, _ in draws]))
        for i, (member, state) in enumerate(zip(members, states, strict=True)):
            yield member, state, noises[i] * draws[i][1]

    def fold_gradients(self, folded: dict[Tensor, Folded], folded_samples: int) -> None:
        """Fold the gradients into ``folded``, by parameter, as each one's estimator does."""
        for member in self.members:
            p, estimator, so_far = member.p, member.step.estimator, folded.get(member.p)
            if so_far is None and p.grad is None:
                continue
            grad = gradient_of(member, copy=member.step.samples > 1 and so_far is None)
            if so_far is None:
                so_far = folded_before(estimator, grad, folded_samples)
            folded[p] = estimator.fold(so_far, Evidence(grad))

    def write_mean(self, member: Member, state: State, mean: Tensor) -> None:
        """Write a new mean into the weights, and beside them where they are too coarse for it."""
        member.p.copy_(mean)
        if "mean" in state:
            state["mean"].copy_(mean)

    def snapshot(self, model: nn.Module) -> Snapshot:
        """What :meth:`posterior` needs beyond the variances, in memory of its own; sharded parameters whole."""
        model = unwrapped(model)
        drop_gathered(member.p for member in self.members if member.local is not member.p)
        named = named_members(model, self.members)
        mean, prior_mean, prior_precision = {}, {}, {}
        for name, member in named:
            mean[name] = full_tensor(mean_of(member.p, self.peek_state(member))).clone()
            prior_mean[name] = in_precision_of(full_tensor(member.prior_mean), mean[name]).clone()
            prior_precision[name] = in_precision_of(full_tensor(member.prior_precision), mean[name]).clone()
        sizes = {member.ess for _, member in named}
        ess = sizes.pop() if len(sizes) == 1 else None
        return Snapshot(model, named, mean, GaussianPrior(prior_mean, prior_precision), ess)

    # -- reports ---------------------------------------------------------------------------------------------

    def unusable_on(self, device: torch.device) -> Tensor:
        """Where elements that are left out are counted; the sum counts."""
        if device not in self.unusable:
            self.unusable[device] = new_counter(device)
        return self.unusable[device]

    def count_unusable(self, count: Tensor) -> None:
        """Count elements that were left out."""
        self.unusable_on(count.device).view(-1)[0] += count

    def report_unusable(self, deferred: bool) -> None:
        """Warn of gradient elements that were left out. Looking is free on a CPU and stalls the queue elsewhere."""
        if torch.compiler.is_compiling():
            return
        for device, total in self.unusable.items():
            count = int(total.sum()) if deferred or device.type == "cpu" else 0
            if count:
                total.zero_()  # in place: a captured CUDA graph goes on counting here
                warnings.warn(
                    f"{count} gradient elements were NaN or infinite and were left out of the step: their mean and "
                    "curvature are unchanged. Look for an overflow in the loss, lower lr, or clip the gradients.",
                    RuntimeWarning,
                    stacklevel=3,
                )

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

    def watch_own_gradients(self) -> None:
        """Note the gradients of ranks with noise of their own, before they are averaged."""
        for step in self.groups:
            if step.own_noise:
                self.own_gradients.watch(member.p for member in step.members)

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

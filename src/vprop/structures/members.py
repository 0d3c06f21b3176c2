"""A parameter group as one step sees it, its parameters, and what every structure does with one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import invalid
from vprop.curvature import CurvatureEstimator
from vprop.kernels.call import Rule as KernelRule
from vprop.objective import Objective
from vprop.parallel.ranks import rank_and_count
from vprop.parallel.sharding import local_grad, to_local
from vprop.precision import compute_dtype
from vprop.structures.rules import Rule

State = dict[str, Tensor]
"""Of one parameter."""
RateFactor = float | Callable[[Tensor], Tensor]
"""A number, or a function of δ where that is a tensor, whose values may be changed in place."""


@dataclass(frozen=True, eq=False)
class GroupStep:
    """What one step needs of a parameter group, decided when its first sample is drawn and only read afterwards.

    ``group`` is the group itself, of which ``lr``, ``betas`` and ``clip_radius`` are read when the update is made.
    """

    number: int
    group: dict[str, Any]
    estimator: CurvatureEstimator
    rule: Rule
    ess: float
    """N/τ."""
    prior_precision: Any
    """λ: a number, a list of tensors like the parameters, or a matrix."""
    prior_mean: list[Tensor] | None
    seed: int
    samples: int
    antithetic: bool
    maximize: bool
    own_noise: bool
    """Whether samples differ from rank to rank."""
    fused: bool
    """Whether kernels may be used."""
    capturable: bool
    """Whether step counts are on the device."""
    rate_factor: RateFactor
    """What ``lr`` is multiplied by."""
    batch_size: float | str | None = None
    """M; "objective": as many as the objective of a step has; ``None``: squared gradients stand for all N."""
    divides_by_root: bool = False
    """Whether the step divides as Adam does."""
    divides: bool = True
    """Or by nothing, as SGD does."""
    kernel: KernelRule | None = None
    """What kernels call the update; ``None`` if they do not have it."""
    init_steps: float | None = None
    """How many steps the first curvature counts for; ``None``: as many as the average remembers."""
    hess_floor: float = 0.0
    """What h+δ is not below."""
    noise_limit: float = math.inf
    """What σ is not above, as a share of the root mean square of a parameter's weights."""
    members: list[Member] = field(default_factory=list)
    noises: dict[Any, Any] = field(default_factory=dict)
    """What kernels are told of the noise of a sample, by sample: it is the same in every step."""

    @property
    def damping(self) -> float:
        """δ = λ/ess, where λ is a number."""
        return self.prior_precision / self.ess

    @property
    def start_weight(self) -> float:
        """What the first curvature weighs, of the weights of all values that the average remembers."""
        if self.init_steps is None:
            return 1.0
        if not self.rule.forgets_start:  # of a group that was edited: the constructors refuse it
            raise invalid("init_steps", self.init_steps, "None with a riemannian average", "It keeps its start.")
        return min(1.0, self.init_steps * (1 - self.group["betas"][1]))


@dataclass(eq=False)
class Member:
    """A parameter that takes part."""

    p: Tensor
    local: Tensor
    """The part of it that lies on this rank, to compute with: itself, if it is not sharded."""
    number: int
    """Position among all parameters of the optimizer, which addresses its noise."""
    position: int
    """Position inside the group, which addresses its prior."""
    step: GroupStep

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group."""
        return self.step.group

    @property
    def group_number(self) -> int:
        """Position of the group."""
        return self.step.number

    @property
    def ess(self) -> float:
        """N/τ."""
        return self.step.ess

    @property
    def prior_precision(self) -> float | Tensor:
        """λ, one number or one per weight."""
        precision = self.step.prior_precision
        return precision[self.position] if isinstance(precision, list) else precision

    @property
    def damping(self) -> float | Tensor:
        """δ = λ/ess."""
        return self.prior_precision / self.step.ess

    @property
    def prior_mean(self) -> float | Tensor:
        """m₀, 0 or one per weight."""
        means = self.step.prior_mean
        return 0.0 if means is None else means[self.position]


@dataclass
class Marginal:
    """What the posterior says of one parameter by itself."""

    member: Member
    mean: Tensor
    variance: Tensor
    hess: Tensor | None
    """h of its weights, where the optimizer has one; of a full covariance, the diagonal of H."""
    steps: int
    """How many steps the parameter has made. Before the first, the rest is what it starts from."""

    @property
    def parameter(self) -> Tensor:
        """The parameter that it is about."""
        return self.member.p

    def copied(self) -> Marginal:
        """The same in memory of its own, which no step changes."""
        hess = None if self.hess is None else self.hess.clone()
        return replace(self, mean=self.mean.clone(), hess=hess)


def members_of(groups: Iterable[GroupStep]) -> Iterator[Member]:
    """All parameters that take part."""
    for step in groups:
        yield from step.members


def fill_members(step: GroupStep, first_number: int) -> None:
    """Give a group its members; a parameter with ``requires_grad=False`` is a constant and is none."""
    for position, p in enumerate(step.group["params"]):
        if p.requires_grad:
            step.members.append(Member(p, to_local(p), first_number + position, position, step))


def local_state(state: State) -> State:
    """The state of the part of a parameter that lies on this rank, in the same memory."""
    return {key: to_local(value) for key, value in state.items()}


def mean_of(p: Tensor, state: State) -> Tensor:
    """μ, while no sample is active.

    Where coarse weights no longer match their float32 mean, somebody else wrote to them (loaded a checkpoint,
    re-initialised a layer): what is in the weights counts.
    """
    if "mean" not in state:
        return p.detach()
    mean = state["mean"].to(compute_dtype(p))
    return torch.where(mean.to(p.dtype) == p, mean, p.to(mean.dtype))


def refuse_sparse_gradient(member: Member) -> NoReturn:
    """An error for a gradient that says nothing of most elements."""
    raise RuntimeError(
        f"Parameter {member.number} has a sparse gradient, which is not supported: its posterior needs the "
        "gradient of every element. Build the embedding with sparse=False."
    )


def gradient_of(member: Member, copy: bool) -> Tensor:
    """ĝ in the precision of the arithmetic: of the loss to be minimized, and zero where there is none."""
    p, grad = member.local, local_grad(member.p)
    if grad is None:
        return torch.zeros_like(p, dtype=compute_dtype(p))
    if grad.layout != torch.strided:
        refuse_sparse_gradient(member)
    grad = grad.detach().to(compute_dtype(p), copy=copy)
    return -grad if member.step.maximize else grad


def draw_of(member: Member, state: State, sample: int, evaluation_draw: int | None) -> tuple[noise.Draw, int]:
    """The address of a sample's noise, and its sign: −1 for the second of an antithetic pair."""
    seed = member.step.seed
    if evaluation_draw is not None:
        return noise.Draw(seed, member.number, evaluation_draw, stream=noise.Stream.EVALUATION), 1
    # Traced, a number would become a symbol of the graph, with which Inductor does not get along.
    as_tensor = member.step.capturable or torch.compiler.is_compiling()
    step: noise.Word = state["step"] if as_tensor else int(state["step"])
    number, sign = signed_sample(member.step, sample)
    return noise.Draw(seed, member.number, step, number), sign


def signed_sample(step: GroupStep, sample: int) -> tuple[int, int]:
    """Which noise a sample uses, and its sign: two antithetic ones share theirs.

    Ranks with noise of their own count on, so that R of them with K samples each draw what one process draws with RK.
    """
    first = rank_and_count()[0] if step.group.get("noise") == "per_rank" else 0
    if step.antithetic:
        return first * ((step.samples + 1) // 2) + sample // 2, -1 if sample % 2 else 1
    return first * step.samples + sample, 1


def label_draw_of(member: Member, state: State, sample: int, rank: int = 0) -> noise.Draw:
    """Where the labels of a sample are drawn from."""
    draw, _ = draw_of(member, state, sample, None)
    number = rank * max(1, member.step.samples) + sample
    return draw._replace(sample=number, stream=noise.Stream.LABELS)


def parameters_in(objective: Objective, members: list[Member], optimizer: str) -> dict[str, Tensor]:
    """The members' parameters by their names in the objective's model, in the order of the members."""
    names = {id(p): name for name, p in objective.model.named_parameters()}
    missing = [member.number for member in members if id(member.p) not in names]
    if missing:
        raise ValueError(
            f"{optimizer} holds parameters (numbers {missing[:5]}) that are not in the objective's model. Build the "
            "objective with the module whose parameters the optimizer got."
        )
    return {names[id(member.p)]: member.p for member in members}


def named_members(model: nn.Module, members: Iterable[Member]) -> list[tuple[str, Member]]:
    """The members by their names in ``model``, in the model's order; all of them must be there."""
    by_id = {id(member.p): member for member in members}
    named = [(name, by_id.pop(id(p))) for name, p in model.named_parameters() if id(p) in by_id]
    if by_id:
        raise ValueError(
            f"posterior(model): {len(by_id)} of the optimizer's parameters are not parameters of this model. "
            "Pass the module the optimizer was built from, or one that contains all of them."
        )
    if not named:
        raise ValueError(
            "posterior(model): none of the optimizer's parameters requires a gradient, so none has a posterior."
        )
    return named


def require_finite(name: str, *tensors: Tensor) -> None:
    """Refuse a posterior with NaN or infinity in it."""
    for tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(
                f"The posterior of {name!r} is not finite: its weights or curvature hold NaN or infinity. "
                "Go back to an earlier checkpoint and lower lr or clip the gradients."
            )

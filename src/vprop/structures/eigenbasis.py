"""The eigenbasis structure: each weight matrix has a diagonal Gaussian in coordinates that follow its gradients.

The mathematics is in :mod:`vprop.functional.eigenbasis`. State and noise are those of the diagonal structure, of the
weights in rotated coordinates; what is added are the bases, and averages of gradients' products that they follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import invalid
from vprop.curvature import SquaredGradient
from vprop.functional import diagonal
from vprop.functional.eigenbasis import gram, is_solved, matrix_shape
from vprop.posterior import EigenbasisPosterior
from vprop.precision import compute_dtype
from vprop.structures import floors
from vprop.structures.base import MEAN, TensorSpec
from vprop.structures.checks import broken
from vprop.structures.matrices import SIDES, FoldedBatch, Rotation, batches, refresh, sides_of
from vprop.structures.members import GroupStep, Marginal, Member, State, draw_of, mean_of, members_of, require_finite
from vprop.structures.plans import PassingPlan, Plan
from vprop.structures.portable import PortableDiagonal
from vprop.structures.rotated import RotatedKernels, kernels_take


class Eigenbasis(PortableDiagonal):
    """A Gaussian that is diagonal in the eigenbasis of each parameter's gradients.

    State per parameter, seen as a matrix of m×n: ``step`` (int64); ``hess`` (h̃) and, if β₁ > 0, ``momentum``, both in
    rotated coordinates; ``mean`` (float32) for bfloat16 and float16 weights; ``size`` where ``noise_limit`` is relative
    to it; and of each side that has a basis ``left_basis`` and ``left_average`` (m×m), ``right_basis`` and
    ``right_average`` (n×n). Which sides have one is decided when the state is made.
    """

    name = "eigenbasis"
    has_kernels = True
    state_spec: ClassVar[Mapping[str, TensorSpec]] = {
        "hess": TensorSpec(needed=True),
        "momentum": TensorSpec(),
        "mean": MEAN,
        "size": TensorSpec(like_parameter=False, shape=()),
        **{f"{side}_{what}": TensorSpec(like_parameter=False) for side in SIDES for what in ("basis", "average")},
    }

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self._batches: list[FoldedBatch] = []
        self._kernels = RotatedKernels()

    # -- what it refuses -------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse what a rotation does not leave as it is, and curvatures that are seen in the objective."""
        super().check_group(group)
        if isinstance(group["prior_precision"], list | tuple | Tensor):
            raise invalid(
                "prior_precision",
                "one for each weight",
                'one number for the group with structure="eigenbasis"',
                "In rotated coordinates a prior with a precision for each weight is not diagonal. Give such parameters "
                'a group with structure="diagonal".',
            )
        if group["capturable"]:
            raise invalid(
                "capturable",
                True,
                'False with structure="eigenbasis"',
                "Which bases are refreshed is decided on the CPU. Capture forward and backward, and step outside.",
            )
        if group.get("sampled_fisher"):
            raise invalid(
                "sampled_fisher",
                True,
                'False with structure="eigenbasis"',
                "Its curvature is made of the gradients of the loss; pass batch_size for mini-batches.",
            )

    def prepare(self, groups: list[GroupStep], state: dict[Tensor, State]) -> None:
        """Refuse estimators that need more than gradients and noise."""
        for step in groups if groups is not self.groups else []:
            if step.estimator.needs_objective:
                raise ValueError(
                    f"{type(step.estimator).__name__} sees the curvature of each weight in the objective, which says "
                    'nothing of rotated coordinates. With structure="eigenbasis" use an estimator of gradients and '
                    "noise: SquaredGradient, AntitheticSpread, SampleSpread, Price."
                )
        super().prepare(groups, state)

    # -- state -----------------------------------------------------------------------------------------------

    def new_state(self, member: Member) -> State:
        """h̃ starts at ``hess_init``, and the bases as those of the weights."""
        state, p = super().new_state(member), member.p
        state["hess"] = state["hess"].contiguous()
        for side, length in sides_of(p.shape, member.group["max_basis_dim"]):
            dtype = self.state_spec["hess"].dtype_for(p)
            state[f"{side}_basis"] = torch.eye(length, dtype=dtype, device=p.device)
            state[f"{side}_average"] = torch.zeros(length, length, dtype=dtype, device=p.device)
        return state

    def peek_state(self, member: Member) -> State:
        """In the precision that it is kept in, also of a model that was brought into another one meanwhile."""
        state = super().peek_state(member)
        if state["hess"].dtype == self.dtype_of("hess", member):
            return state
        kept = self.state_spec.keys()
        return {key: v.to(self.dtype_of(key, member)) if key in kept else v for key, v in state.items()}

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:
        """Refuse bases that are not those of the parameter, or none at all."""
        super().check_state(groups, state)
        for member in members_of(groups):
            own = state.get(member.p, {})
            for side, length in sides_of(member.p.shape, max(member.p.numel(), 1)):
                basis, average = own.get(f"{side}_basis"), own.get(f"{side}_average")
                if basis is None and average is None:
                    limit = member.group["max_basis_dim"]
                    if length <= limit and int(own.get("step", 0)) > 0:
                        raise broken(
                            f"the state of parameter {member.number} has neither '{side}_basis' nor '{side}_average', "
                            f"which max_basis_dim={limit} of the checkpoint's group asks for (if it was raised after "
                            "the first step, put the former number into the checkpoint's group)"
                        )
                    continue
                for key, value in ((f"{side}_basis", basis), (f"{side}_average", average)):
                    if value is None or tuple(value.shape) != (length, length):
                        found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                        what = f"{key!r} of parameter {member.number} is {found}, must have {(length, length)}"
                        raise broken(what)
                assert basis is not None
                error = gram(basis) - torch.eye(length, dtype=basis.dtype, device=basis.device)
                if float(error.abs().max()) > 1e-2:
                    raise broken(f"'{side}_basis' of parameter {member.number} is not orthogonal")

    # -- samples ---------------------------------------------------------------------------------------------

    def plan(self, sample: int, evaluation_draw: int | None) -> PassingPlan:
        """Which noise goes where."""
        if evaluation_draw is None:
            self._look_at_sizes()
        params = [member.p for member in self.members]
        return PassingPlan(params, lambda: self._offsets(sample, evaluation_draw))

    def _offsets(self, sample: int, evaluation_draw: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every parameter with its mean and what a sample adds to it: Q_L(σ̃ε)Q_Rᵀ."""
        training = evaluation_draw is None
        pairs = [(member, self.state_of(member) if training else self.peek_state(member)) for member in self.members]
        for batch in batches(pairs):
            members, states = [member for member, _ in batch], [state for _, state in batch]
            rotation, step = Rotation.of(members, states), members[0].step
            draws = [draw_of(member, state, sample, evaluation_draw) for member, state in batch]
            floor = self._floors(members, states)
            if training and kernels_take(members, states):
                scaled = self._kernels.offsets(members, states, sample, floor).view(-1, *rotation.shape)
            else:
                noises = dict(noise.normals_like([member.p for member in members], [draw for draw, _ in draws]))
                hess = rotation.stack([state["hess"] for state in states])
                eps = rotation.stack([noises[i] for i in range(len(members))]) * draws[0][1]
                scaled = diagonal.perturbation(hess, eps, step.ess, members[0].damping, floor)
            offsets = rotation.back(scaled)
            for member, state, offset in zip(members, states, offsets, strict=True):
                mean = mean_of(member.p, state)
                if "mean" in state and training:
                    mean = state["mean"].copy_(mean)
                yield member.p, mean, offset.reshape(member.p.shape)

    def _floors(self, members: list[Member], states: list[State]) -> float | Tensor:
        """f of each matrix of a batch."""
        values = [self._floor(member, state) for member, state in zip(members, states, strict=True)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return torch.stack(tensors)[:, None, None] if tensors else values[0]

    def _look_at_sizes(self) -> None:
        """Bring the sizes of the weights, which hold the mean, up to date where they limit the noise."""
        for member in self.members if self.has_limits else []:
            if floors.is_relative(member.step):
                self._look_at_size(member)

    # -- the step --------------------------------------------------------------------------------------------

    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold the gradients, rotated, as the estimators do."""
        if self.groups and self.groups[0].samples == 0:  # else the plan of a sample has looked
            self._look_at_sizes()
        self.has_folded = True
        known = {id(member.p) for batch in self._batches for member in batch.members}
        joining = [m for m in self.members if m.p.grad is not None and id(m.p) not in known]
        for batch in batches([(member, self.state_of(member)) for member in joining]):
            self._batches.append(FoldedBatch([m for m, _ in batch], [s for _, s in batch], folded_samples))
        for folding in self._batches:
            noises = self._noises(folding.members, sample)
            folding.fold(None if noises[0] is None else noises)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        super().forget()
        self._batches = []

    def update(self, plan: Plan | None) -> None:
        """One step of all parameters that had a gradient, and a new basis for those whose turn it is."""
        if plan is not None:
            plan.take_out()
        self.clipped = {}
        for batch in self._batches:
            self._update_batch(batch)
        self._refresh([item for batch in self._batches for item in zip(batch.members, batch.states, strict=True)])

    def _update_batch(self, batch: FoldedBatch) -> None:
        members, states, rotation = batch.members, batch.states, batch.rotation
        self._match_momenta(batch)
        for state in states:
            state["step"] += 1
        means = rotation.stack([mean_of(member.p, state) for member, state in zip(members, states, strict=True)])
        distance = rotation.into(means - self._prior_means(batch))
        move = self._step_by_kernel if batch.by_kernels else self._step
        new_means = means + rotation.back(move(batch, distance) - distance)
        for member, state, mean in zip(members, states, new_means, strict=True):
            self.write_mean(member, state, mean.reshape(member.p.shape))
        batch.fold_into_averages(batch.step.group["basis_beta"])

    def _batch_estimate(self, batch: FoldedBatch, hess: Tensor, floor: float | Tensor) -> Tensor:
        """ĥ of the matrices of a batch, in rotated coordinates."""
        step, precision = batch.step, None
        assert batch.folded is not None
        if step.estimator.needs_noise:
            precision = diagonal.precision(hess, step.ess, batch.members[0].damping, floor)
        return step.estimator.hess(batch.folded, self.factor_of(step), precision)

    def _gradient_scale(self, step: GroupStep) -> float | None:
        return self.batch_size_of(step) if step.divides_by_root else None

    def _step_by_kernel(self, batch: FoldedBatch, distance: Tensor) -> Tensor:
        """Where the kernel brings the means to; curvature and momentum are changed."""
        members, states, step, folded = batch.members, batch.states, batch.step, batch.folded
        assert folded is not None
        floor, estimate, scale = self._floors(members, states), None, 1.0
        if not batch.squares_later:
            estimate = self._batch_estimate(batch, batch.rotation.stack([state["hess"] for state in states]), floor)
        elif type(step.estimator) is SquaredGradient:
            scale = self.factor_of(step)
        new, clipped = self._kernels.step(
            members,
            states,
            distance,
            folded,
            estimate,
            scale=scale,
            gradient_scale=self._gradient_scale(step),
            floor=floor,
            unusable=self.unusable_on(distance.device),
        )
        if not math.isinf(step.group["clip_radius"]):
            self.clipped.setdefault(step.number, []).append((clipped, distance.numel()))
        return new

    def _step(self, batch: FoldedBatch, distance: Tensor) -> Tensor:
        """The same with torch's own operations."""
        members, states, rotation, step, folded = batch.members, batch.states, batch.rotation, batch.step, batch.folded
        assert folded is not None
        group, floor = step.group, self._floors(members, states)
        hess = rotation.stack([state["hess"] for state in states])
        momentum = rotation.stack([state["momentum"] for state in states]) if "momentum" in states[0] else None
        new = step.rule.function(
            distance,
            hess,
            momentum,
            folded.grad,
            self._batch_estimate(batch, hess, floor),
            step=self._counts(batch),
            lr=group["lr"] * step.rate_factor,
            betas=group["betas"],
            damping=members[0].damping,
            prior_mean=0.0,
            clip_radius=group["clip_radius"],
            floor=floor,
            start_weight=step.start_weight,
            gradient_scale=self._gradient_scale(step),
            divides=step.divides,
            ess=step.ess,
        )
        for i, state in enumerate(states):
            state["hess"].copy_(new.hess[i].reshape(state["hess"].shape))
            if new.momentum is not None:
                state["momentum"].copy_(new.momentum[i].reshape(state["momentum"].shape))
        self.count_unusable(new.unusable)
        if new.clipped is not None:
            self.clipped.setdefault(step.number, []).append((new.clipped, distance.numel()))
        return new.mean

    def _prior_means(self, batch: FoldedBatch) -> float | Tensor:
        given = [member.prior_mean for member in batch.members]
        if not isinstance(given[0], Tensor):
            return 0.0
        return batch.rotation.stack(given).to(compute_dtype(batch.members[0].p))  # type: ignore[arg-type]

    def _counts(self, batch: FoldedBatch) -> Tensor | float:
        """The numbers of this step, which is counted already, where the update asks for them."""
        step = batch.step
        if step.group["betas"][0] == 0 and not step.rule.debiases_hess and step.start_weight == 1:
            return 1.0
        counts = torch.stack([state["step"] for state in batch.states])
        return counts.to(batch.states[0]["hess"])[:, None, None]

    def _match_momenta(self, batch: FoldedBatch) -> None:
        """Let the state have momenta if β₁ > 0, and none otherwise; late ones start as in the diagonal structure."""
        beta1, folded = batch.step.group["betas"][0], batch.folded
        assert folded is not None
        for i, state in enumerate(batch.states):
            if beta1 == 0:
                state.pop("momentum", None)
            elif "momentum" not in state:
                grad = folded.grad[i].reshape(state["hess"].shape)
                late = grad * (1 - beta1 ** state["step"].to(grad.dtype))
                state["momentum"] = torch.where(torch.isfinite(grad), late, 0)  # 0·NaN is NaN, for ever

    def _refresh(self, items: list[tuple[Member, State]]) -> None:
        """Let the bases of those sides follow whose turn it is: every so many steps, spread over them."""
        for side_number, side in enumerate(SIDES):
            due: dict[bool, list[tuple[Member, State]]] = {}
            for member, state in items:
                if f"{side}_basis" in state:
                    every = member.group["basis_every"]
                    count = int(state["step"]) - 1 - (len(SIDES) * member.number + side_number) % every
                    if count >= 0 and count % every == 0:
                        due.setdefault(is_solved(count // every + 1), []).append((member, state))
            for solve, chosen in due.items():
                for batch in batches(chosen):
                    states = [state for _, state in batch]
                    refresh(states, matrix_shape(batch[0][0].p.shape), side, solve)

    # -- the posterior ---------------------------------------------------------------------------------------

    def _rotated_variance(self, member: Member, state: State) -> Tensor:
        """σ̃², of the directions of the bases."""
        return diagonal.variance(*self._width(member, state))

    def variance(self, member: Member, state: State) -> Tensor:
        """σ² of each weight of a parameter."""
        rotation = Rotation.of([member], [state])
        variances = rotation.stack([self._rotated_variance(member, state)])
        return rotation.diagonal_back(variances).reshape(member.p.shape)

    def marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        """Mean and variance of each parameter; h is the diagonal of the curvature in the weights' coordinates."""
        for marginal in super().marginals(at_least):
            state = self.peek_state(marginal.member)
            rotation = Rotation.of([marginal.member], [state])
            hess = rotation.diagonal_back(rotation.stack([state["hess"]])).reshape(marginal.mean.shape)
            yield replace(marginal, hess=hess)

    def posterior(self, model: nn.Module, **rest: Any) -> EigenbasisPosterior:
        """Names come from ``model.named_parameters()``."""
        model, named, mean, prior, ess = self.snapshot(model)
        scale, bases = {}, {side: dict[str, Tensor]() for side in SIDES}
        for name, member in named:
            state = self.peek_state(member)
            scale[name] = self._rotated_variance(member, state)
            require_finite(name, mean[name], scale[name])
            for side in SIDES:
                if f"{side}_basis" in state:
                    bases[side][name] = state[f"{side}_basis"].clone()
        return EigenbasisPosterior(model, mean, scale, bases["left"], bases["right"], prior, ess=ess, **rest)

"""The diagonal structure without kernels: its state, what it folds, and its update with torch's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop import noise
from vprop.bundles import gather, gather_or_number, scatter_
from vprop.curvature import Evidence, Folded
from vprop.curvature._base import folded_before
from vprop.functional import diagonal
from vprop.objective import Objective
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.ranks import average_over_ranks, mean_so_far
from vprop.parallel.sharding import sharded_like, to_local
from vprop.precision import compute_dtype
from vprop.structures import floors
from vprop.structures.base import Structure
from vprop.structures.checks import broken
from vprop.structures.members import GroupStep, Member, State, draw_of, gradient_of, local_state, mean_of, members_of
from vprop.structures.written import Written, bundles_of, like_parameter


@dataclass
class _Ready:
    """A parameter whose samples are folded."""

    member: Member
    state: State
    folded: Folded


class PortableDiagonal(Structure):
    """State, folding and update of a diagonal Gaussian; :class:`~vprop.structures.diagonal.Diagonal` adds kernels."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.has_folded = False
        self._folded: dict[Tensor, Folded] = {}
        """The samples of this step so far, by parameter."""
        self._observed: dict[Tensor, Tensor] = {}
        """What the curvature estimator saw of the objective at the open sample, by parameter."""
        self._shared_gradients: dict[Tensor, Tensor] = {}
        """Where ranks have noise of their own: the mean gradient over ranks and samples, by parameter."""
        self._estimates: dict[Tensor, Tensor] = {}
        """There: ĥ of this step, averaged over ranks, by parameter."""

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        self._folded, self._observed, self._shared_gradients, self._estimates = {}, {}, {}, {}
        self.has_folded = False

    # -- state -----------------------------------------------------------------------------------------------

    def new_state(self, member: Member) -> State:
        """h starts at ``hess_init``."""
        p, state = member.p, super().new_state(member)
        dtype = self.dtype_of("hess", member)
        state["hess"] = torch.full_like(p, member.group["hess_init"], dtype=dtype, requires_grad=False)
        if floors.is_relative(member.step):
            state["size"] = floors.size_of(p)
        return state

    def make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""
        for member in self.members:
            state = self.state_of(member)
            if member.group["betas"][0] > 0:
                state["momentum"] = torch.zeros_like(state["hess"], dtype=self.dtype_of("momentum", member))

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:
        """Refuse a curvature that makes a negative variance."""
        for member in members_of(groups):
            hess = state.get(member.p, {}).get("hess")
            if hess is not None and bool((to_local(hess) + to_local(member.damping) < 0).any()):
                raise broken(f"'hess' of parameter {member.number} makes a variance that is negative")

    # -- samples ---------------------------------------------------------------------------------------------

    def _written(self, member: Member, sample: int, evaluation_draw: int | None) -> Written:
        state = local_state(self.state_of(member) if evaluation_draw is None else self.peek_state(member))
        mean = None
        if "mean" in state:
            mean = mean_of(member.local, state)
            if evaluation_draw is None:
                state["mean"].copy_(mean)
        elif member.step.own_noise:
            mean = member.local.detach().clone()  # so that ranks do not drift apart, by roundings of their own
        draw, sign = draw_of(member, state, sample, evaluation_draw)
        return Written(member, draw, sign, *self._width(member, state), mean)

    def _width(self, member: Member, state: State) -> tuple[Tensor, float, float | Tensor, float | Tensor]:
        """(h, ess, δ, f), which make σ² = 1/(ess·max(h+δ, f))."""
        hess = state["hess"].to(compute_dtype(member.p))
        return hess, member.ess, to_local(member.damping), self._floor(member, state)

    def _floor(self, member: Member, state: State) -> float | Tensor:
        """f, which h+δ is not below."""
        size = state.get("size")
        if size is None and floors.is_relative(member.step):  # asked for since the last step
            size = floors.size_of(member.p)
        return floors.floor_of(member.step, size)

    def _look_at_spread_sizes(self, now_and_then: bool) -> None:
        """Bring the sizes of parameters that are spread over ranks up to date, or only see that they are there.

        In the order of the members: every look adds up over the ranks, which must ask for the same parameter at the
        same time, though some may leave it to a kernel and others not.
        """
        for step in self.groups:
            if not floors.is_relative(step):
                continue
            for member in step.members:
                if member.local is not member.p and (now_and_then or "size" not in self.state_of(member)):
                    self._look_at_size(member)

    def _look_at_size(self, member: Member) -> None:
        """Bring the size of the weights, which hold the mean, up to date now and then."""
        state = self.state_of(member)
        if "size" not in state:
            state["size"] = floors.size_of(member.p)
        as_tensor = member.step.capturable or torch.compiler.is_compiling()
        due = state["step"] % floors.STEPS_BETWEEN_LOOKS == 0
        if as_tensor:
            state["size"].copy_(torch.where(due.to(state["size"].device), floors.size_of(member.p), state["size"]))
        elif bool(due):
            state["size"].copy_(floors.size_of(member.p))

    # -- the step --------------------------------------------------------------------------------------------

    def observe(self, objective: Objective, sample: int) -> None:
        """Keep what the estimators see in the objective until the gradients are folded."""
        self.has_folded = True
        for step in self.groups:
            if not step.estimator.needs_objective or not step.members:
                continue
            observed = self.observed(step.estimator, objective, step.members, sample)
            curvatures = [
                step.estimator.curvature_of(value.to(compute_dtype(member.p)))
                for member, value in zip(step.members, observed, strict=True)
            ]
            for member, value in zip(step.members, self.seen_by_all(curvatures, objective, step), strict=True):
                self._observed[member.p] = value

    def _fold_members(self, members: list[Member], sample: int | None, folded_samples: int) -> None:
        self.has_folded = True
        taking_part = [m for m in members if m.p.grad is not None or m.p in self._folded or self._has_partner(m)]
        noises = self._noises(taking_part, sample)
        for member, eps in zip(taking_part, noises, strict=True):
            p, folded, estimator = member.p, self._folded.get(member.p), member.step.estimator
            grad = gradient_of(member, copy=member.step.samples > 1 and folded is None)
            partner = self._take_partner(member)
            if partner is not None:  # kept for a kernel that will not read it after all
                folded = estimator.fold(None, Evidence(partner))
            if folded is None:
                folded = folded_before(estimator, grad, folded_samples)
            observed = self._observed.pop(p, None)
            if observed is None and estimator.needs_objective:
                observed = torch.zeros_like(grad)
            own = self.own_gradient(member) if member.step.own_noise else grad
            self._folded[p] = estimator.fold(folded, Evidence(own, observed, eps))
            if own is not grad:
                self._shared_gradients[p] = mean_so_far(self._shared_gradients.get(p), grad, self._folded[p].count)

    def _has_partner(self, member: Member) -> bool:
        """Whether a gradient of the parameter was kept for a kernel."""
        return False

    def _take_partner(self, member: Member) -> Tensor | None:
        """That gradient."""
        return None

    def _noises(self, members: list[Member], sample: int | None) -> list[Tensor | None]:
        """ε of a sample, generated again, for the members whose estimators need it."""
        noises: list[Tensor | None] = [None] * len(members)
        needed = [i for i, member in enumerate(members) if member.step.estimator.needs_noise]
        if not needed or sample is None or members[0].step.samples == 0:
            return noises
        draws = [draw_of(members[i], self.state_of(members[i]), sample, None) for i in needed]
        portable = not all(members[i].step.fused for i in needed)
        params = [members[i].p for i in needed]
        for k, eps in noise.normals_like(params, [draw for draw, _ in draws], portable=portable):
            noises[needed[k]] = eps.mul_(draws[k][1])
        return noises

    def _average_over_ranks(self) -> None:
        """Where ranks have noise of their own: the mean over ranks of ĥ, and the gradients that are means already."""
        shared = self._shared_gradients
        if not shared:
            return
        members = [member for member in self.members if member.p in shared and member.p in self._folded]
        if not members:
            return
        self.require_averaged([shared[member.p] for member in members])
        estimates = [self._estimate(m, local_state(self.state_of(m)), self._folded[m.p]) for m in members]
        for member, estimate in zip(members, average_over_ranks(estimates), strict=True):
            self._estimates[member.p] = estimate
            self._folded[member.p].grad = shared[member.p]

    def _estimate(self, member: Member, state: State, folded: Folded) -> Tensor:
        """ĥ of a parameter."""
        if member.p in self._estimates:
            return self._estimates[member.p]
        estimator, precision = member.step.estimator, None
        if estimator.needs_noise:
            precision = diagonal.precision(*self._width(member, state))
        factor = self.factor_of(member.step)
        return estimator.hess(folded, factor, precision).to(compute_dtype(member.p)).expand_as(state["hess"])

    def _update_unfused(self, members: list[Member]) -> None:
        ready = []
        for member in members:
            folded = self._folded.pop(member.p, None)
            if folded is not None:
                ready.append(_Ready(member, local_state(self.state_of(member)), folded))
                ready[-1].state["step"] += 1
        for bundle in bundles_of(ready):
            self._update_bundle(bundle)
        drop_gathered(item.member.p for item in ready if item.member.local is not item.member.p)

    def _update_bundle(self, bundle: list[_Ready]) -> None:
        """One step of parameters of one kind, gathered into flat tensors if they are several."""
        step, group = bundle[0].member.step, bundle[0].member.group
        rate: Any = step.rate_factor
        states, folded = [item.state for item in bundle], [item.folded for item in bundle]
        statistics = Folded(
            gather([f.grad for f in folded]), gather([f.product for f in folded]), count=folded[0].count
        )
        dtype = compute_dtype(bundle[0].member.p)
        hess = gather([s["hess"] for s in states]).to(dtype)
        damping = gather_or_number([to_local(item.member.damping) for item in bundle])
        momentum = gather([state["momentum"] for state in states]).to(dtype) if group["betas"][0] > 0 else None
        floor = gather_or_number([like_parameter(self._floor(i.member, i.state), i.state["hess"]) for i in bundle])
        debiased = momentum is not None or step.rule.debiases_hess or step.start_weight < 1
        new = step.rule.function(
            gather([mean_of(item.member.local, item.state) for item in bundle]),
            hess,
            momentum,
            statistics.grad,
            self._bundled_estimate(bundle, statistics, hess, damping, floor),
            step=_steps(states, dtype) if debiased else 1.0,
            lr=group["lr"] * (rate(damping) if callable(rate) else rate),
            betas=group["betas"],
            damping=damping,
            prior_mean=gather_or_number([to_local(item.member.prior_mean) for item in bundle]),
            clip_radius=group["clip_radius"],
            floor=floor,
            start_weight=step.start_weight,
            gradient_scale=self.batch_size_of(step) if step.divides_by_root else None,
            divides=step.divides,
            ess=step.ess,
        )
        scatter_([item.member.local for item in bundle], new.mean)
        scatter_([state["hess"] for state in states], new.hess)
        if new.momentum is not None:
            scatter_([state["momentum"] for state in states], new.momentum)
        if "mean" in states[0]:
            scatter_([state["mean"] for state in states], new.mean)
        self.count_unusable(new.unusable)
        if new.clipped is not None:
            size = sum(item.member.local.numel() for item in bundle)
            self.clipped.setdefault(step.number, []).append((new.clipped, size))

    def _bundled_estimate(
        self,
        bundle: list[_Ready],
        statistics: Folded,
        hess: Tensor,
        damping: float | Tensor,
        floor: float | Tensor,
    ) -> Tensor:
        """ĥ of parameters that are gathered into flat tensors."""
        averaged = [self._estimates.get(item.member.p) for item in bundle]
        if averaged[0] is not None:  # a bundle is of one group
            return gather([estimate for estimate in averaged if estimate is not None])
        step = bundle[0].member.step
        precision = diagonal.precision(hess, step.ess, damping, floor) if step.estimator.needs_noise else None
        return step.estimator.hess(statistics, self.factor_of(step), precision)

    def _match_momentum(self, member: Member, partner: Tensor | None) -> None:
        """Let a parameter have a momentum if β₁ > 0, and none otherwise.

        Zero at the first step. Later it starts as if all gradients so far had been this one, so that the debiased
        average does too.
        """
        folded, state, beta1 = self._folded.get(member.p), self.state_of(member), member.group["betas"][0]
        if folded is None and partner is None and member.p.grad is None:
            return
        if beta1 == 0:
            state.pop("momentum", None)
        elif "momentum" not in state:
            grad = gradient_of(member, copy=False) if folded is None else folded.grad
            if partner is not None:
                grad = torch.lerp(partner, grad, 0.5)
            if member.step.rule.averages_pull:
                distance = mean_of(member.local, local_state(state)) - to_local(member.prior_mean)
                grad = grad + to_local(member.damping) * distance
            late = grad * (1 - beta1 ** state["step"].to(grad.dtype))
            start = torch.where(torch.isfinite(grad), late, 0)  # 0·NaN is NaN, for ever
            state["momentum"] = sharded_like(start.to(self.dtype_of("momentum", member)), member.p)

    # -- the posterior ---------------------------------------------------------------------------------------

    def _variance(self, member: Member, state: State) -> Tensor:
        """σ² of the part of a parameter that lies on this rank."""
        return diagonal.variance(*self._width(member, state))

    def variance(self, member: Member, state: State) -> Tensor:
        """σ² of each weight of a parameter, sharded as it is."""
        return sharded_like(self._variance(member, local_state(state)), member.p)


def _steps(states: list[State], dtype: torch.dtype) -> Tensor:
    """Step counts to go with gathered tensors: parameters that joined later, or sat out a step, have their own.

    One number for a single parameter, and one copy to the device for a bundle.
    """
    if len(states) == 1:
        return states[0]["step"].to(dtype)
    counts = torch.stack([state["step"] for state in states]).to(states[0]["hess"].device, dtype)
    return gather([count.expand_as(state["hess"]) for count, state in zip(counts, states, strict=True)])

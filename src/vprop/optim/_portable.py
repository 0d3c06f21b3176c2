"""The diagonal structure without kernels: its state, what it folds, and its update with torch's own operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.bundles import gather, gather_or_number, scatter_
from vprop.checks import check_model
from vprop.curvature import CurvatureEstimator, Evidence, Folded
from vprop.functional import diagonal
from vprop.likelihood import LikelihoodLike
from vprop.objective import Objective
from vprop.optim._arguments import check_estimator
from vprop.optim._base import VariationalOptimizer
from vprop.optim._fused import settings_of
from vprop.optim._loading import StateForm, broken
from vprop.optim._members import (
    Marginal,
    Member,
    draw_of,
    gradient_of,
    local_state,
    mean_of,
    members_of,
    named_members,
    new_state,
    require_finite,
)
from vprop.optim._sampling import at_the_mean
from vprop.optim._written import Written, bundles_of
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.ranks import average_over_ranks, has_own_noise, mean_so_far
from vprop.parallel.sharding import full_tensor, sharded_like, to_local
from vprop.posterior import DiagonalPosterior, GaussianPrior
from vprop.precision import as_tensor, compute_dtype, needs_master_copy
from vprop.wrappers import unwrapped


@dataclass
class _Ready:
    """A parameter whose samples are folded."""

    member: Member
    state: dict[str, Tensor]
    folded: Folded


class PortableDiagonal(VariationalOptimizer):
    """State, folding and update of a diagonal Gaussian; :class:`DiagonalOptimizer` adds kernels.

    State per parameter: ``step`` (int64), ``hess`` (h), ``momentum`` if β₁ > 0, and ``mean`` (float32) for bfloat16
    and float16 weights, which are too coarse to hold it.
    """

    _state_form = StateForm(needed=("hess",), like_parameter=("hess", "momentum", "mean"), may_be_anything=("mean",))
    _debiases_hess = False
    """Whether the rule corrects the average of the curvature for its start, and so needs the step count."""

    @abstractmethod
    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        """The estimator of ĥ that the group's hyperparameters ask for."""

    def _rule(self, group: dict[str, Any]) -> Callable[..., diagonal.Step]:
        """The update of mean and curvature, from ``functional/diagonal.py``."""
        return diagonal.natural_gradient_step

    def _step_size(self, group: dict[str, Any], damping: float | Tensor) -> float | Tensor:
        """What the direction is multiplied by."""
        return group["lr"]

    def _averaged(self, member: Member, state: dict[str, Tensor], grad: Tensor) -> Tensor:
        """What the momentum averages."""
        return grad

    def _check_samples(self, group: dict[str, Any]) -> None:
        super()._check_samples(group)
        check_estimator(self._curvature(group), group, type(self).__name__)

    def _members(self) -> Iterator[Member]:
        return members_of(self.param_groups)

    def _may_be_fused(self, group: dict[str, Any]) -> bool:
        """Whether kernels may be used for a group."""
        return False

    # -- state --------------------------------------------------------------------------------------------

    def _new_state(self, member: Member) -> dict[str, Tensor]:
        p, state = member.p, new_state(member)
        state["hess"] = torch.full_like(p, member.group["hess_init"], dtype=compute_dtype(p), requires_grad=False)
        return state

    def _check_state(self, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        for member in members_of(groups):
            hess = state.get(member.p, {}).get("hess")
            if hess is not None and bool((to_local(hess) + to_local(member.damping) < 0).any()):
                raise broken(f"'hess' of parameter {member.number} makes a variance that is negative")

    def _peek_state(self, member: Member) -> dict[str, Tensor]:
        """The state of a parameter, or what it would be, without keeping it."""
        state = self.state.get(member.p, {})
        if state and needs_master_copy(member.p) == ("mean" in state):
            return state
        # None yet, or one from a checkpoint whose weights had another precision.
        complete = self._new_state(member)
        complete.update(state)
        if not needs_master_copy(member.p):
            complete.pop("mean", None)
        return complete

    def _state(self, member: Member) -> dict[str, Tensor]:
        self.state[member.p] = self._peek_state(member)
        return self.state[member.p]

    def _make_state(self) -> None:
        for member in self._members():
            state = self._state(member)
            if member.group["betas"][0] > 0:
                state["momentum"] = torch.zeros_like(state["hess"])

    # -- samples ------------------------------------------------------------------------------------------

    def _written(self, member: Member, sample: int, evaluation_draw: int | None) -> Written:
        state = local_state(self._state(member) if evaluation_draw is None else self._peek_state(member))
        mean = None
        if "mean" in state:
            mean = mean_of(member.local, state)
            if evaluation_draw is None:
                state["mean"].copy_(mean)
        elif has_own_noise(member.group):
            mean = member.local.detach().clone()  # so that ranks do not drift apart, by roundings of their own
        return self._address(member, state, sample, evaluation_draw, mean)

    def _address(
        self,
        member: Member,
        state: dict[str, Tensor],
        sample: int,
        evaluation_draw: int | None,
        mean: Tensor | None,
    ) -> Written:
        draw, sign = draw_of(member, state, sample, evaluation_draw)
        return Written(member, draw, sign, state["hess"], member.ess, to_local(member.damping), mean)

    # -- the step -----------------------------------------------------------------------------------------

    def _needs_objective(self) -> bool:
        return any(self._curvature(group).needs_objective for group in self.param_groups)

    def _observe(self, objective: Objective, sample: int) -> None:
        for group in self.param_groups:
            estimator = self._curvature(group)
            if not estimator.needs_objective:
                continue
            members = [member for member in self._members() if member.group is group]
            if not members:
                continue
            observed = self._observed(estimator, objective, members, sample)
            curvatures = [
                estimator.curvature_of(value.to(compute_dtype(member.p)))
                for member, value in zip(members, observed, strict=True)
            ]
            for member, value in zip(members, self._seen_by_all(curvatures, objective, group), strict=True):
                self._ledger.observed[member.p] = value

    def _fold_members(self, members: list[Member]) -> None:
        ledger = self._ledger
        taking_part = [m for m in members if m.p.grad is not None or m.p in ledger.folded or m.p in ledger.partners]
        noises = self._noises([m for m in taking_part if self._curvature(m.group).needs_noise])
        for member in taking_part:
            p, folded = member.p, self._ledger.folded.get(member.p)
            estimator, several = self._curvature(member.group), member.group["mc_samples"] > 1
            grad = gradient_of(member, copy=several and folded is None)
            partner = ledger.partners.pop(p, None)
            if partner is not None:  # kept for a kernel that will not read it after all
                folded = estimator.fold(None, Evidence(partner))
            if folded is None:
                # Samples in which the parameter took no part count with the gradient they had: zero.
                for _ in range(ledger.folded_samples):
                    folded = estimator.fold(folded, _nothing_seen(grad))
            observed = ledger.observed.pop(p, None)
            if observed is None and estimator.needs_objective:
                observed = torch.zeros_like(grad)
            own = self._own_gradient(member) if has_own_noise(member.group) else grad
            ledger.folded[p] = estimator.fold(folded, Evidence(own, observed, noises.get(p)))
            if own is not grad:
                ledger.shared_gradients[p] = mean_so_far(ledger.shared_gradients.get(p), grad, ledger.folded[p].count)

    def _average_over_ranks(self) -> None:
        """Where ranks have noise of their own: the mean over ranks of ĥ, and the gradients that are means already."""
        ledger, shared = self._ledger, self._ledger.shared_gradients
        members = [member for member in self._members() if member.p in shared and member.p in ledger.folded]
        if not members:
            return
        self._require_averaged([shared[member.p] for member in members])
        estimates = [self._estimate(m, local_state(self._state(m)), ledger.folded[m.p]) for m in members]
        for member, estimate in zip(members, average_over_ranks(estimates), strict=True):
            ledger.estimates[member.p] = estimate
            ledger.folded[member.p].grad = shared[member.p]

    def _noises(self, members: list[Member]) -> dict[Tensor, Tensor]:
        """ε of the open sample, generated again."""
        sample = self._ledger.open_sample
        if not members or sample is None or self.mc_samples == 0:
            return {}
        draws = [draw_of(member, self._state(member), sample, None) for member in members]
        portable = not all(self._may_be_fused(member.group) for member in members)
        generated = noise.normals_like([m.p for m in members], [draw for draw, _ in draws], portable=portable)
        return {members[i].p: eps.mul_(draws[i][1]) for i, eps in generated}

    def _estimate(self, member: Member, state: dict[str, Tensor], folded: Folded) -> Tensor:
        """ĥ of a parameter."""
        if member.p in self._ledger.estimates:
            return self._ledger.estimates[member.p]
        estimator, precision = self._curvature(member.group), None
        if estimator.needs_noise:
            precision = self._sampled_precision([_Ready(member, state, folded)], state["hess"])
        return estimator.hess(folded, member.ess, precision).to(state["hess"].dtype).expand_as(state["hess"])

    def _update_unfused(self, members: list[Member]) -> None:
        ready = []
        for member in members:
            folded = self._ledger.folded.pop(member.p, None)
            if folded is not None:
                ready.append(_Ready(member, local_state(self._state(member)), folded))
                ready[-1].state["step"] += 1
        for bundle in bundles_of(ready):
            self._update_bundle(bundle)
        drop_gathered(item.member.p for item in ready if item.member.local is not item.member.p)

    def _update_bundle(self, bundle: list[_Ready]) -> None:
        """One step of parameters of one kind, gathered into flat tensors if they are several."""
        group = bundle[0].member.group
        states, folded = [item.state for item in bundle], [item.folded for item in bundle]
        statistics = Folded(
            gather([f.grad for f in folded]), gather([f.product for f in folded]), count=folded[0].count
        )
        hess, damping = (
            gather([s["hess"] for s in states]),
            gather_or_number([to_local(i.member.damping) for i in bundle]),
        )
        momentum = gather([state["momentum"] for state in states]) if group["betas"][0] > 0 else None
        debiased = momentum is not None or self._debiases_hess
        new = self._rule(group)(
            gather([mean_of(item.member.local, item.state) for item in bundle]),
            hess,
            momentum,
            statistics.grad,
            self._bundled_estimate(bundle, statistics, hess),
            step=_steps(states) if debiased else 1.0,
            lr=self._step_size(group, damping),
            betas=group["betas"],
            damping=damping,
            prior_mean=gather_or_number([to_local(item.member.prior_mean) for item in bundle]),
            clip_radius=group["clip_radius"],
        )
        scatter_([item.member.local for item in bundle], new.mean)
        scatter_([state["hess"] for state in states], new.hess)
        if new.momentum is not None:
            scatter_([state["momentum"] for state in states], new.momentum)
        if "mean" in states[0]:
            scatter_([state["mean"] for state in states], new.mean)
        self._count_unusable(new.unusable)
        if new.clipped is not None:
            number = bundle[0].member.group_number
            size = sum(item.member.local.numel() for item in bundle)
            self._ledger.clipped.setdefault(number, []).append((new.clipped, size))

    def _bundled_estimate(self, bundle: list[_Ready], statistics: Folded, hess: Tensor) -> Tensor:
        """ĥ of parameters that are gathered into flat tensors."""
        averaged = [self._ledger.estimates.get(item.member.p) for item in bundle]
        if averaged[0] is not None:  # a bundle is of one group
            return gather([estimate for estimate in averaged if estimate is not None])
        estimator, first = self._curvature(bundle[0].member.group), bundle[0].member
        precision = self._sampled_precision(bundle, hess) if estimator.needs_noise else None
        return estimator.hess(statistics, first.ess, precision)

    def _sampled_precision(self, bundle: list[_Ready], hess: Tensor) -> Tensor:
        """1/σ² of this step's samples. The group may have been edited since they were drawn."""
        first = bundle[0].member
        ess, prior = self._ledger.settings.get(first.group_number, settings_of(first.group))
        priors = [prior[item.member.position] if isinstance(prior, list) else prior for item in bundle]
        return diagonal.precision(hess, ess, gather_or_number([to_local(prior) / ess for prior in priors]))

    # -- the posterior ---------------------------------------------------------------------------------------

    def _variance(self, member: Member, state: dict[str, Tensor]) -> Tensor:
        """σ² of the part of a parameter that lies on this rank."""
        return diagonal.variance(state["hess"], member.ess, to_local(member.damping))

    def _sharded_variance(self, member: Member, state: dict[str, Tensor]) -> Tensor:
        """σ² of a parameter."""
        return sharded_like(self._variance(member, local_state(state)), member.p)

    def _marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        for member in self._members():
            steps = self._steps_of(member.p)
            if steps >= at_least:
                state = self._peek_state(member)
                mean, variance = mean_of(member.p, state), self._sharded_variance(member, state)
                yield Marginal(member, mean, variance, state.get("hess"), steps)

    @torch.no_grad()
    @at_the_mean
    def posterior(
        self,
        model: nn.Module,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> DiagonalPosterior:
        """A snapshot of the posterior over ``model``'s parameters.

        Names come from ``model.named_parameters()``. Parameters that the optimizer does not hold, and frozen ones,
        are constants of the model. ``likelihood`` (a kind, or the likelihood module that was the loss) and
        ``noise_variance`` are what ``predict`` assumes by default.
        """
        check_model(model, "posterior(model)")
        model = unwrapped(model)
        drop_gathered(member.p for member in self._members() if member.local is not member.p)
        self._report_unusable(deferred=True)
        named = named_members(model, self._members())
        sizes = {member.ess for _, member in named}
        mean, variance, prior_mean, prior_precision = {}, {}, {}, {}
        for name, member in named:
            state = self._peek_state(member)
            mean[name] = full_tensor(mean_of(member.p, state)).clone()
            variance[name] = full_tensor(self._sharded_variance(member, state))
            require_finite(name, mean[name], variance[name])
            prior_mean[name] = as_tensor(full_tensor(member.prior_mean)).to(mean[name]).clone()
            prior_precision[name] = as_tensor(full_tensor(member.prior_precision)).to(mean[name]).clone()
        return DiagonalPosterior(
            model,
            mean,
            variance,
            GaussianPrior(prior_mean, prior_precision),
            ess=sizes.pop() if len(sizes) == 1 else None,
            seed=self.param_groups[0]["seed"],
            snapshot=self._ledger.next_snapshot(),
            likelihood=likelihood,
            noise_variance=noise_variance,
        )


def _nothing_seen(grad: Tensor) -> Evidence:
    nothing = torch.zeros_like(grad)
    return Evidence(nothing, nothing, nothing)


def _steps(states: list[dict[str, Tensor]]) -> Tensor:
    """Step counts to go with gathered tensors: parameters that joined later, or sat out a step, have their own.

    One number for a single parameter, and one copy to the device for a bundle.
    """
    if len(states) == 1:
        return states[0]["step"].to(states[0]["hess"].dtype)
    counts = torch.stack([state["step"] for state in states]).to(states[0]["hess"])
    return gather([count.expand_as(state["hess"]) for count, state in zip(counts, states, strict=True)])

"""The diagonal structure: one variance per weight. Optimizers of this structure differ in their curvature."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from vprop import noise
from vprop.bundles import gather, gather_or_number, scatter_
from vprop.curvature import CurvatureEstimator, Evidence, Folded
from vprop.functional import diagonal
from vprop.kernels.call import Curvature, Rule, Step
from vprop.kernels.table import Role
from vprop.likelihood import LikelihoodLike
from vprop.noise import Stream
from vprop.objective import Objective
from vprop.optim import _written
from vprop.optim._arguments import check_estimator
from vprop.optim._base import VariationalOptimizer
from vprop.optim._fused import (
    Job,
    any_sparse,
    curvature_in_kernel,
    is_captured,
    rule_in_kernel,
    same_settings,
    settings_of,
)
from vprop.optim._interrupts import interrupts_wait
from vprop.optim._members import (
    Marginal,
    Member,
    draw_of,
    gradient_of,
    label_draw_of,
    mean_of,
    members_of,
    named_members,
    new_state,
    parameters_in,
    require_finite,
)
from vprop.optim._packs import Pack, PackedSample, Packs, noise_of
from vprop.optim._written import Written, bundles_of
from vprop.posterior import DiagonalPosterior, GaussianPrior
from vprop.precision import compute_dtype, needs_master_copy


@dataclass
class Plan:
    """A sample of all parameters: those that kernels handle, and the others."""

    packed: list[PackedSample]
    written: list[Written]


@dataclass
class _Ready:
    """A parameter whose samples are folded."""

    member: Member
    state: dict[str, Tensor]
    folded: Folded


class DiagonalOptimizer(VariationalOptimizer):
    """Sampling and update of a diagonal Gaussian; a subclass chooses the curvature estimator.

    State per parameter: ``step`` (int64), ``hess`` (h), ``momentum`` if β₁ > 0, and ``mean`` (float32) for bfloat16
    and float16 weights, which are too coarse to hold it.
    """

    _has_kernels = True
    _debiases_hess = False
    """Whether the rule corrects the average of the curvature for its start, and so needs the step count."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._packs = Packs()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._packs = Packs()
        super().__setstate__(state)

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

    def _new_state(self, member: Member) -> dict[str, Tensor]:
        p, state = member.p, new_state(member)
        state["hess"] = torch.full_like(p, member.group["hess_init"], dtype=compute_dtype(p), requires_grad=False)
        return state

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

    # -- kernels ---------------------------------------------------------------------------------------------

    def _refreshed_packs(self) -> tuple[list[Pack], list[Member]]:
        """The parameters that kernels handle, and the others."""
        if torch.compiler.is_compiling():  # the portable path can be traced
            return [], list(self._members())
        self._packs.refresh(self.param_groups, self.state, self._state, self._may_be_fused)
        return self._packs.packs, self._packs.others

    def _packs_now(self) -> tuple[list[Pack], list[Member]]:
        """The same without looking again, for where nobody else can have done anything since."""
        return ([], list(self._members())) if torch.compiler.is_compiling() else (self._packs.packs, self._packs.others)

    def _may_be_fused(self, group: dict[str, Any]) -> bool:
        return self._has_kernels and group["fused"] is not False and (group["fused"] or group["foreach"] is None)

    def _job_settings(self, pack: Pack) -> tuple[Rule, float | Tensor] | None:
        """The update that a kernel makes for a pack, and its step size; ``None`` if no kernel makes it."""
        group, damping = pack.group, pack.members[0].damping
        rule, lr = rule_in_kernel(self._rule(group)), self._step_size(group, damping)
        if rule is None or (isinstance(damping, Tensor) and lr is not group["lr"]):
            return None
        return rule, lr

    def _direct(self, pack: Pack) -> tuple[Curvature, float] | None:
        """How a kernel makes ĥ of the gradients of this step, if it can without our folding them."""
        if self._job_settings(pack) is None or not self._unedited(pack.group_number):
            return None
        group = pack.group
        return curvature_in_kernel(self._curvature(group), group["mc_samples"], pack.members[0].ess)

    def _unedited(self, group_number: int) -> bool:
        """Whether a group is as it was when the samples of this step were drawn."""
        drawn, now = self._ledger.settings.get(group_number), settings_of(self.param_groups[group_number])
        return drawn is None or same_settings(drawn, now)

    def _fits_drawn_ahead(self) -> bool:
        with torch.inference_mode(False):
            packs, others = self._refreshed_packs()
        drawn = self._ledger.plan.packed
        fits = (
            self.mc_samples == 1
            and not others
            and len(packs) == len(drawn)
            and all(sample.pack is pack for sample, pack in zip(drawn, packs, strict=True))
            and all(sample.noise == noise_of(sample.pack.group, 0, Stream.TRAINING) for sample in drawn)
        )
        if fits:
            self._note_settings()
        return fits

    def _note_settings(self) -> None:
        self._ledger.settings = {i: settings_of(group) for i, group in enumerate(self.param_groups)}

    # -- samples ---------------------------------------------------------------------------------------------

    def _plan_sample(self, sample: int, evaluation_draw: int | None) -> Plan:
        if evaluation_draw is None:
            packs, others = self._refreshed_packs()
            self._note_settings()
            packed = []
            for pack in packs:
                pack.look_at_counts()
                if is_captured(pack):
                    self._ledger.captured.append(pack.table)
                packed.append(PackedSample(pack, noise_of(pack.group, sample, Stream.TRAINING), pack.table, sample))
            return Plan(packed, [self._written(member, sample, None) for member in others])
        # Evaluation must leave no trace, so where there is no state yet it looks at one that it does not keep.
        if not all(self.state.get(member.p) for member in self._members()):
            return Plan([], [self._written(member, sample, evaluation_draw) for member in self._members()])
        packs, others = self._refreshed_packs()
        packed = [
            PackedSample(pack, noise_of(pack.group, 0, Stream.EVALUATION), pack.table.at_step(evaluation_draw), sample)
            for pack in packs
            if Role.MEAN not in pack.table.roles  # a kernel would bring the float32 mean up to date
        ]
        others = others + [member for pack in packs if Role.MEAN in pack.table.roles for member in pack.members]
        return Plan(packed, [self._written(member, sample, evaluation_draw) for member in others])

    def _written(self, member: Member, sample: int, evaluation_draw: int | None) -> Written:
        state = self._state(member) if evaluation_draw is None else self._peek_state(member)
        mean = None
        if "mean" in state:
            mean = mean_of(member.p, state)
            if evaluation_draw is None:
                state["mean"].copy_(mean)
        return self._address(member, state, sample, evaluation_draw, mean)

    def _write_sample(self, plan: Plan) -> None:
        for sample in plan.packed:
            sample.write()
        _written.write(plan.written)

    def _restore_mean(self, plan: Plan) -> None:
        for sample in plan.packed:
            if sample.done:
                self._take_out(sample)
        _written.restore(plan.written)

    def _take_out(self, sample: PackedSample) -> None:
        """Put the mean back: by the kernel, or without it where the weights have been moved since."""
        if not torch.compiler.is_compiling() and sample.pack.is_current():
            sample.take_out()
        else:
            _written.restore(sample.as_written())
            sample.done = False

    def _address(
        self,
        member: Member,
        state: dict[str, Tensor],
        sample: int,
        evaluation_draw: int | None,
        mean: Tensor | None,
    ) -> Written:
        draw, sign = draw_of(member, state, sample, evaluation_draw)
        return Written(member, draw, sign, state["hess"], member.ess, member.damping, mean)

    # -- the step --------------------------------------------------------------------------------------------

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
            inside = parameters_in(objective, members, type(self).__name__)
            labels = label_draw_of(members[0], self._state(members[0]), sample)
            observed = estimator.observe(objective, inside, labels)
            sign = -1 if estimator.signed and group["maximize"] else 1
            for p, value in zip(inside.values(), observed, strict=True):
                self._ledger.observed[p] = sign * value.detach().to(compute_dtype(p))

    def _fold(self) -> None:
        packs, others = self._refreshed_packs()
        folding = []
        for pack in packs:
            if self._direct(pack) is None:
                folding += pack.members
            elif (self._ledger.open_sample or 0) + 1 < self.mc_samples:
                for member in pack.members:
                    if member.p.grad is not None:
                        self._ledger.partners[member.p] = gradient_of(member, copy=True)
        self._fold_members(folding + others)

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
            ledger.folded[p] = estimator.fold(folded, Evidence(grad, observed, noises.get(p)))

    def _noises(self, members: list[Member]) -> dict[Tensor, Tensor]:
        """ε of the open sample, generated again."""
        sample = self._ledger.open_sample
        if not members or sample is None or self.mc_samples == 0:
            return {}
        draws = [draw_of(member, self._state(member), sample, None) for member in members]
        portable = not all(self._may_be_fused(member.group) for member in members)
        generated = noise.normals_like([m.p for m in members], [draw for draw, _ in draws], portable=portable)
        return {members[i].p: eps.mul_(draws[i][1]) for i, eps in generated}

    def _update(self) -> None:
        self._ledger.clipped = {}
        if self._start_and_stop_momenta():
            self._refreshed_packs()
        packs, others = self._packs_now()
        jobs, unfused = [], list(others)
        for pack in packs:
            job = self._job(pack)
            if job is None:
                unfused += pack.members
            else:
                jobs.append(job)
        draws_ahead = self._draws_ahead() and not unfused
        self._take_out_for(jobs)
        for job in jobs:
            self._run(job, draws_ahead)
        self._update_unfused(unfused)

    def _draws_ahead(self) -> bool:
        """Whether the step leaves the next sample in the weights. A prior that follows the posterior needs the mean."""
        follows = any(group.get("auto_prior") is not None for group in self.param_groups)
        return self._ledger.draws_ahead and self.mc_samples == 1 and not follows

    def _active_samples(self) -> dict[int, PackedSample]:
        """The packs' samples that are in the weights, by the identity of the pack."""
        plan = self._ledger.plan
        return {} if plan is None else {id(sample.pack): sample for sample in plan.packed if sample.done}

    def _job(self, pack: Pack) -> Job | None:
        """What a kernel is asked to do for a pack; ``None`` if the update is not one that it knows."""
        settings, group = self._job_settings(pack), pack.group
        if settings is None:
            return None
        rule, lr = settings
        direct, others = self._direct(pack), list[Tensor | None]()
        grads: list[Tensor | None]
        if direct is None:
            folded = [self._ledger.folded.pop(p, None) for p in pack.params]
            curvature, scale = Curvature.GIVEN, 1.0
            grads = [None if f is None else f.grad for f in folded]
            others = [
                None if f is None else self._estimate(member, state, f)
                for member, state, f in zip(pack.members, pack.states, folded, strict=True)
            ]
        else:
            (curvature, scale), grads = direct, [p.grad for p in pack.params]
            if any_sparse(grads):
                for member in pack.members:
                    gradient_of(member, copy=False)  # says which, and what to do
            if curvature is Curvature.PAIR:
                others = [self._ledger.partners.pop(p, None) for p in pack.params]
                for i, (p, grad, other) in enumerate(zip(pack.params, grads, others, strict=True)):
                    if grad is None and other is not None:
                        grads[i] = torch.zeros_like(p)
                    elif other is None and grad is not None:
                        others[i] = torch.zeros_like(pack.states[i]["hess"])
        noise = noise_of(group, max(1, group["mc_samples"]) - 1, Stream.TRAINING)
        active = self._active_samples().get(id(pack))
        step = Step(
            noise=noise,
            sampled=active is not None and active.noise == noise,
            next_source=None,
            curvature=curvature,
            scale=scale,
            rule=rule,
            lr=lr,
            betas=group["betas"],
            clip_radius=group["clip_radius"],
            grad_sign=-1 if group["maximize"] and direct is not None else 1,
        )
        return Job(pack, step, grads, others)

    def _estimate(self, member: Member, state: dict[str, Tensor], folded: Folded) -> Tensor:
        """ĥ of a parameter."""
        estimator, precision = self._curvature(member.group), None
        if estimator.needs_noise:
            precision = self._sampled_precision([_Ready(member, state, folded)], state["hess"])
        return estimator.hess(folded, member.ess, precision).to(state["hess"].dtype).expand_as(state["hess"])

    def _take_out_for(self, jobs: list[Job]) -> None:
        """Put the mean back wherever no job will."""
        taken_by_jobs = {id(job.pack) for job in jobs if job.step.sampled}
        for pack_id, sample in self._active_samples().items():
            if pack_id not in taken_by_jobs:
                self._take_out(sample)
        if self._ledger.plan is not None:
            _written.restore(self._ledger.plan.written)

    def _run(self, job: Job, draws_ahead: bool) -> None:
        pack = job.pack
        if draws_ahead:
            job.step = replace(job.step, next_source=job.step.noise.source)
        sample = self._active_samples().get(id(pack))
        with interrupts_wait():
            job.run(self._unusable_on(pack.table.device), self._ledger.captured.append)
            if sample is not None:
                sample.done = False
            if draws_ahead:
                self._ledger.next_plan = self._ledger.next_plan or Plan([], [])
                self._ledger.next_plan.packed.append(
                    PackedSample(pack, job.step.noise, pack.table, sample=0, done=True)
                )
        if job.step.clips:
            self._ledger.clipped.setdefault(pack.group_number, []).append((pack.table.clipped, pack.size))

    def _start_and_stop_momenta(self) -> bool:
        """Make the state match β₁, which can be edited between steps; returns whether that changed a pack."""
        packs, others = self._packs_now()
        wrong = [pack.members for pack in packs if pack.has_momentum() != (pack.group["betas"][0] > 0)]
        if any("momentum" not in self._state(m) and m.group["betas"][0] > 0 for m in chain(*wrong, others)):
            self._take_out_for([])  # what is averaged may depend on the mean
        for member in chain(*wrong, others):
            folded, state, beta1 = self._ledger.folded.get(member.p), self._state(member), member.group["betas"][0]
            partner = self._ledger.partners.get(member.p)
            if folded is None and partner is None and member.p.grad is None:
                continue
            if beta1 == 0:
                state.pop("momentum", None)
            elif "momentum" not in state:
                # Zero at the first step. Later it starts as if all gradients so far had been this one, so that the
                # debiased average does too.
                grad = gradient_of(member, copy=False) if folded is None else folded.grad
                if partner is not None:
                    grad = torch.lerp(partner, grad, 0.5)
                averaged = self._averaged(member, state, grad)
                late = averaged * (1 - beta1 ** state["step"].to(state["hess"].dtype))
                state["momentum"] = torch.where(torch.isfinite(averaged), late, 0)  # 0·NaN is NaN, for ever
        return bool(wrong)

    def _update_unfused(self, members: list[Member]) -> None:
        ready = []
        for member in members:
            folded = self._ledger.folded.pop(member.p, None)
            if folded is not None:
                ready.append(_Ready(member, self._state(member), folded))
                ready[-1].state["step"] += 1
        for bundle in bundles_of(ready):
            self._update_bundle(bundle)

    def _update_bundle(self, bundle: list[_Ready]) -> None:
        """One step of parameters of one kind, gathered into flat tensors if they are several."""
        group, ess = bundle[0].member.group, bundle[0].member.ess
        states, folded = [item.state for item in bundle], [item.folded for item in bundle]
        statistics = Folded(
            gather([f.grad for f in folded]), gather([f.product for f in folded]), count=folded[0].count
        )
        hess, damping = gather([s["hess"] for s in states]), gather_or_number([i.member.damping for i in bundle])
        estimator, precision = self._curvature(group), None
        if estimator.needs_noise:
            precision = self._sampled_precision(bundle, hess)
        momentum = gather([state["momentum"] for state in states]) if group["betas"][0] > 0 else None
        debiased = momentum is not None or self._debiases_hess
        new = self._rule(group)(
            gather([mean_of(item.member.p, item.state) for item in bundle]),
            hess,
            momentum,
            statistics.grad,
            estimator.hess(statistics, ess, precision),
            step=_steps(states) if debiased else 1.0,
            lr=self._step_size(group, damping),
            betas=group["betas"],
            damping=damping,
            prior_mean=gather_or_number([item.member.prior_mean for item in bundle]),
            clip_radius=group["clip_radius"],
        )
        scatter_([item.member.p for item in bundle], new.mean)
        scatter_([state["hess"] for state in states], new.hess)
        if new.momentum is not None:
            scatter_([state["momentum"] for state in states], new.momentum)
        if "mean" in states[0]:
            scatter_([state["mean"] for state in states], new.mean)
        self._count_unusable(new.unusable)
        if new.clipped is not None:
            number = bundle[0].member.group_number
            size = sum(item.member.p.numel() for item in bundle)
            self._ledger.clipped.setdefault(number, []).append((new.clipped, size))

    def _sampled_precision(self, bundle: list[_Ready], hess: Tensor) -> Tensor:
        """1/σ² of this step's samples. The group may have been edited since they were drawn."""
        first = bundle[0].member
        ess, prior = self._ledger.settings.get(first.group_number, settings_of(first.group))
        dampings = [(prior[item.member.position] if isinstance(prior, list) else prior) / ess for item in bundle]
        return diagonal.precision(hess, ess, gather_or_number(dampings))

    # -- the posterior ---------------------------------------------------------------------------------------

    def _variance(self, member: Member, state: dict[str, Tensor]) -> Tensor:
        """σ² of a parameter."""
        return diagonal.variance(state["hess"], member.ess, member.damping)

    def _marginals(self) -> Iterator[Marginal]:
        for member in self._members():
            state = self.state.get(member.p)
            if state and int(state["step"]) > 0:
                yield Marginal(member, mean_of(member.p, state), self._variance(member, state), state.get("hess"))

    @torch.no_grad()
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
        self._refuse_inside_sample("posterior()")
        self._leave()
        self._report_unusable(deferred=True)
        named = named_members(model, self._members())
        sizes = {member.ess for _, member in named}
        mean, variance, prior_mean, prior_precision = {}, {}, {}, {}
        for name, member in named:
            state = self._peek_state(member)
            mean[name] = mean_of(member.p, state).clone()
            variance[name] = self._variance(member, state)
            require_finite(name, mean[name], variance[name])
            prior_mean[name] = torch.as_tensor(member.prior_mean).to(mean[name]).clone()
            prior_precision[name] = torch.as_tensor(member.prior_precision).to(mean[name]).clone()
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

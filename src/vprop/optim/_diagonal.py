"""The diagonal structure: one variance per weight. Optimizers of this structure differ in their curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from vprop.kernels.call import Curvature, Rule, Step
from vprop.kernels.table import Role
from vprop.noise import Stream
from vprop.optim import _written
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
from vprop.optim._members import Member, gradient_of, local_state
from vprop.optim._packs import Pack, PackedSample, Packs, noise_of
from vprop.optim._portable import PortableDiagonal
from vprop.optim._written import Written
from vprop.parallel.ranks import has_own_noise
from vprop.parallel.sharding import sharded_like


@dataclass
class DiagonalPlan:
    """A sample of all parameters: those that kernels handle, and the others."""

    packed: list[PackedSample]
    written: list[Written]

    def write(self) -> None:
        """Write the sample into the weights, which hold the mean."""
        for sample in self.packed:
            sample.write()
        _written.write(self.written)

    def take_out(self) -> None:
        """Put the mean back, wherever the sample is in the weights."""
        for sample in self.packed:
            if sample.done:
                _take_out(sample)
        _written.restore(self.written)

    def twin(self) -> DiagonalPlan:
        """The same sample, with a memory of its own of where it is in the weights."""
        return DiagonalPlan([replace(sample) for sample in self.packed], [replace(entry) for entry in self.written])

    def owners(self) -> list[Tensor]:
        """The parameters that it is a sample of."""
        packed = [p for sample in self.packed for p in sample.pack.owners]
        return packed + [entry.member.p for entry in self.written]


def _take_out(sample: PackedSample) -> None:
    """Put the mean back: by the kernel, or without it where the weights have been moved since."""
    if not torch.compiler.is_compiling() and sample.pack.is_current():
        sample.take_out()
    else:
        _written.restore(sample.as_written())
        sample.done = False


class DiagonalOptimizer(PortableDiagonal):
    """Sampling and update of a diagonal Gaussian, by kernels where they can; a subclass chooses the curvature."""

    _has_kernels = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._packs = Packs()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._packs = Packs()
        super().__setstate__(state)

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
        group = pack.group
        if self._job_settings(pack) is None or not self._unedited(pack.group_number) or has_own_noise(group):
            return None
        return curvature_in_kernel(self._curvature(group), group["mc_samples"], pack.members[0].ess)

    def _unedited(self, group_number: int) -> bool:
        """Whether a group is as it was when the samples of this step were drawn."""
        drawn, now = self._ledger.settings.get(group_number), settings_of(self.param_groups[group_number])
        return drawn is None or same_settings(drawn, now)

    def _note_settings(self) -> None:
        self._ledger.settings = {i: settings_of(group) for i, group in enumerate(self.param_groups)}

    # -- samples ---------------------------------------------------------------------------------------------

    def _plan_sample(self, sample: int, evaluation_draw: int | None) -> DiagonalPlan:
        if evaluation_draw is None:
            packs, others = self._refreshed_packs()
            self._note_settings()
            packed = []
            for pack in packs:
                pack.look_at_counts()
                if is_captured(pack):
                    self._ledger.captured.append(pack.table)
                packed.append(PackedSample(pack, noise_of(pack.group, sample, Stream.TRAINING), pack.table))
            return DiagonalPlan(packed, [self._written(member, sample, None) for member in others])
        # Evaluation must leave no trace, so where there is no state yet it looks at one that it does not keep.
        if not all(self.state.get(member.p) for member in self._members()):
            return DiagonalPlan([], [self._written(member, sample, evaluation_draw) for member in self._members()])
        packs, others = self._refreshed_packs()
        packed = [
            PackedSample(pack, noise_of(pack.group, 0, Stream.EVALUATION), pack.table.at_step(evaluation_draw))
            for pack in packs
            if Role.MEAN not in pack.table.roles  # a kernel would bring the float32 mean up to date
        ]
        others = others + [member for pack in packs if Role.MEAN in pack.table.roles for member in pack.members]
        return DiagonalPlan(packed, [self._written(member, sample, evaluation_draw) for member in others])

    # -- the step --------------------------------------------------------------------------------------------

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

    def _update(self) -> None:
        self._ledger.clipped = {}
        self._average_over_ranks()
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
        self._take_out_for(jobs)
        for job in jobs:
            self._run(job)
        self._update_unfused(unfused)

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
            folded = [self._ledger.folded.pop(p, None) for p in pack.owners]
            curvature, scale = Curvature.GIVEN, 1.0
            grads = [None if f is None else f.grad for f in folded]
            others = [
                None if f is None else self._estimate(member, local_state(state), f)
                for member, state, f in zip(pack.members, pack.states, folded, strict=True)
            ]
        else:
            (curvature, scale), grads = direct, pack.gradients()
            if any_sparse(grads):
                for member in pack.members:
                    gradient_of(member, copy=False)  # says which, and what to do
            if curvature is Curvature.PAIR:
                others = [self._ledger.partners.pop(p, None) for p in pack.owners]
                for i, (p, grad, other) in enumerate(zip(pack.params, grads, others, strict=True)):
                    if grad is None and other is not None:
                        grads[i] = torch.zeros_like(p)
                    elif other is None and grad is not None:
                        others[i] = torch.zeros_like(pack.hess[i])
        noise = noise_of(group, max(1, group["mc_samples"]) - 1, Stream.TRAINING)
        active = self._active_samples().get(id(pack))
        step = Step(
            noise=noise,
            sampled=active is not None and active.noise == noise and active.means is None,
            curvature=curvature,
            scale=scale,
            rule=rule,
            lr=lr,
            betas=group["betas"],
            clip_radius=group["clip_radius"],
            grad_sign=-1 if group["maximize"] and direct is not None else 1,
        )
        return Job(pack, step, grads, others)

    def _take_out_for(self, jobs: list[Job]) -> None:
        """Put the mean back wherever no job will."""
        taken_by_jobs = {id(job.pack) for job in jobs if job.step.sampled}
        for pack_id, sample in self._active_samples().items():
            if pack_id not in taken_by_jobs:
                _take_out(sample)
        if self._ledger.plan is not None:
            _written.restore(self._ledger.plan.written)

    def _run(self, job: Job) -> None:
        pack = job.pack
        sample = self._active_samples().get(id(pack))
        with interrupts_wait():
            job.run(self._unusable_on(pack.table.device), self._ledger.captured.append)
            if sample is not None:
                sample.done = False
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
                averaged = self._averaged(member, local_state(state), grad)
                late = averaged * (1 - beta1 ** state["step"].to(grad.dtype))
                start = torch.where(torch.isfinite(averaged), late, 0)  # 0·NaN is NaN, for ever
                state["momentum"] = sharded_like(start, member.p)
        return bool(wrong)

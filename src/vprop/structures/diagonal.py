"""The diagonal structure: one variance per weight. What kernels can do is done by them, the rest in ``portable.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop.kernels.call import Curvature, Step
from vprop.kernels.table import COMPUTE, Role
from vprop.noise import Stream
from vprop.parallel.sharding import full_tensor
from vprop.posterior import DiagonalPosterior
from vprop.structures import floors, written
from vprop.structures.base import MEAN, Structure, TensorSpec
from vprop.structures.fused import Job, curvature_in_kernel
from vprop.structures.members import GroupStep, Member, gradient_of, local_state, require_finite
from vprop.structures.packs import Pack, PackedSample, Packs, noise_of
from vprop.structures.plans import Plan
from vprop.structures.portable import PortableDiagonal
from vprop.structures.written import Written


@dataclass
class DiagonalPlan:
    """A sample of all parameters: those that kernels handle, and the others."""

    packed: list[PackedSample]
    written: list[Written]

    def write(self) -> None:
        """Write the sample into the weights, which hold the mean."""
        for sample in self.packed:
            sample.write()
        if self.written:
            written.write(self.written)

    def take_out(self) -> None:
        """Put the mean back, wherever the sample is in the weights."""
        for sample in self.packed:
            if sample.done:
                _take_out(sample)
        if self.written:
            written.restore(self.written)

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
        written.restore(sample.as_written())
        sample.done = False


def _direct(step: GroupStep) -> tuple[Curvature, float] | None:
    """How a kernel makes ĥ of the gradients of a step, if it can without our folding them."""
    if step.kernel is None or step.own_noise or callable(step.rate_factor):
        return None
    known = step.batch_size if step.estimator.counts_examples else None
    return curvature_in_kernel(step.estimator, step.samples, known if isinstance(known, float) else step.ess)


class Diagonal(PortableDiagonal):
    """A diagonal Gaussian, by kernels where they can.

    State per parameter: ``step`` (int64), ``hess`` (h), ``momentum`` if β₁ > 0, ``mean`` (float32) for bfloat16 and
    float16 weights, which are too coarse to hold it, and ``size`` (one number) where ``noise_limit`` is relative to it.
    """

    name = "diagonal"
    state_spec: ClassVar[Mapping[str, TensorSpec]] = {
        "hess": TensorSpec(needed=True),
        "momentum": TensorSpec(),
        "mean": MEAN,
        "size": TensorSpec(like_parameter=False, shape=()),
    }
    has_kernels = True
    takes_sharded = True
    takes_own_noise = True

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self._packs = Packs(_direct)
        self._partners: dict[Tensor, Tensor] = {}
        """The gradients of the first sample of a pair, which a kernel will read, by parameter."""
        self._captured: list[Any] = []
        """What CUDA graphs read: it must live as long as they may run."""

    def take_over(self, former: Structure) -> None:
        """Graphs that were captured before may still run."""
        super().take_over(former)
        if isinstance(former, Diagonal):
            self._captured = former._captured

    # -- samples ---------------------------------------------------------------------------------------------

    def plan(self, sample: int, evaluation_draw: int | None) -> DiagonalPlan:
        """Which noise goes where."""
        if evaluation_draw is not None:
            return self._evaluation_plan(sample, evaluation_draw)
        packs, others = self._packs_after_looks() if self.has_limits else self._refreshed_packs()
        packed = []
        for pack in packs:
            pack.look_at_counts()
            if pack.is_captured():
                self._captured.append(pack.table)
            packed.append(PackedSample(pack, noise_of(pack.step, sample, Stream.TRAINING), pack.table))
        return DiagonalPlan(packed, [self._written(member, sample, None) for member in others] if others else [])

    def _evaluation_plan(self, sample: int, evaluation_draw: int) -> DiagonalPlan:
        # Evaluation must leave no trace, so where there is no state yet it looks at one that it does not keep.
        if not all(self.state.get(member.p) for member in self.members):
            return DiagonalPlan([], [self._written(member, sample, evaluation_draw) for member in self.members])
        if self.has_limits:
            self._look_at_spread_sizes(now_and_then=False)
        packs, others = self._refreshed_packs()
        packed = [
            PackedSample(pack, noise_of(pack.step, 0, Stream.EVALUATION), pack.table.at_step(evaluation_draw))
            for pack in packs
            if Role.MEAN not in pack.table.roles  # a kernel would bring the float32 mean up to date
        ]
        others = others + [member for pack in packs if Role.MEAN in pack.table.roles for member in pack.members]
        return DiagonalPlan(packed, [self._written(member, sample, evaluation_draw) for member in others])

    def _refreshed_packs(self) -> tuple[list[Pack], list[Member]]:
        """The parameters that kernels handle, and the others."""
        if torch.compiler.is_compiling():  # the portable path can be traced
            return [], self.members
        self._packs.refresh(self.groups, self.state, self.state_of)
        return self._packs.packs, self._packs.others

    def _packs_after_looks(self) -> tuple[list[Pack], list[Member]]:
        """The same, after a look at the weights, which hold the mean, where their sizes limit the noise."""
        self._look_at_spread_sizes(now_and_then=True)
        packs, others = self._refreshed_packs()
        for pack in packs:
            if pack.sizes is not None:
                pack.look_at_sizes()
                if pack.is_captured():
                    self._captured.append(pack.sizes)
        for member in others:
            if floors.is_relative(member.step) and member.local is member.p:
                self._look_at_size(member)
        return packs, others

    # -- the step --------------------------------------------------------------------------------------------

    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold the gradients that no kernel reads itself."""
        unseen = self.has_limits and self.groups[0].samples == 0  # else the plan of a sample has looked
        packs, others = self._packs_after_looks() if unseen else self._refreshed_packs()
        folding = list(others)
        for pack in packs:
            if pack.direct is None:
                folding += pack.members
            elif (sample or 0) + 1 < pack.step.samples:
                self.has_folded = True
                for member in pack.members:
                    if member.p.grad is not None:
                        self._partners[member.p] = gradient_of(member, copy=True)
        if folding:
            self._fold_members(folding, sample, folded_samples)

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        super().forget()
        if self._partners:
            self._partners = {}

    def update(self, plan: Plan | None) -> None:
        """One pass of a kernel over the parameters of each pack; the others with torch's own operations."""
        self.clipped = {}
        if self._shared_gradients:
            self._average_over_ranks()
        packs, others = ([], self.members) if torch.compiler.is_compiling() else (self._packs.packs, self._packs.others)
        active: dict[int, PackedSample] = {}
        if plan is not None:
            for sample in plan.packed:  # type: ignore[attr-defined]
                if sample.done:
                    active[id(sample.pack)] = sample
        if self._start_and_stop_momenta(packs, others, plan):
            packs, others = self._refreshed_packs()
        jobs, unfused = [], list(others)
        for pack in packs:
            sample = active.get(id(pack))
            job = self._job(pack, sample)
            if job is None:
                unfused += pack.members
            else:
                jobs.append(job)
                if job.step.sampled:
                    job.sample = active.pop(id(pack))
        for sample in active.values():  # those that no job takes out
            if sample.done:
                _take_out(sample)
        if plan is not None and plan.written:  # type: ignore[attr-defined]
            written.restore(plan.written)  # type: ignore[attr-defined]
        for job in jobs:
            self._run(job)
        if unfused:
            self._update_unfused(unfused)

    def _has_partner(self, member: Member) -> bool:
        return member.p in self._partners

    def _take_partner(self, member: Member) -> Tensor | None:
        return self._partners.pop(member.p, None)

    def _job(self, pack: Pack, active: PackedSample | None) -> Job | None:
        """What a kernel is asked to do for a pack; ``None`` if the update is not one that it knows."""
        step, group = pack.step, pack.group
        if step.kernel is None or callable(step.rate_factor):
            return None
        direct, others = pack.direct, list[Tensor | None]()
        grads: list[Tensor | None]
        if direct is None:
            folded = [self._folded.pop(p, None) for p in pack.owners]
            curvature, scale = Curvature.GIVEN, 1.0
            grads = [None if f is None else f.grad for f in folded]
            others = [
                None if f is None else self._estimate(member, local_state(state), f)
                for member, state, f in zip(pack.members, pack.states, folded, strict=True)
            ]
        else:
            (curvature, scale), grads = direct, pack.gradients()
            if step.batch_size == "objective" and step.estimator.counts_examples:
                scale = self.factor_of(step)
            if curvature is Curvature.PAIR:
                others = self._pair_partners(pack, grads)
        noise = noise_of(step, max(1, step.samples) - 1, Stream.TRAINING)
        request = Step(
            noise=noise,
            sampled=active is not None and active.done and active.noise == noise and active.means is None,
            curvature=curvature,
            scale=scale,
            rule=step.kernel,
            lr=group["lr"] if step.rate_factor == 1.0 else group["lr"] * step.rate_factor,
            betas=group["betas"],
            clip_radius=group["clip_radius"],
            grad_sign=-1 if step.maximize and direct is not None else 1,
            start_weight=1.0 if step.init_steps is None else step.start_weight,
            gradient_scale=self.batch_size_of(step) or 1.0 if step.divides_by_root else 1.0,
        )
        return Job(pack, request, grads, others)

    def _pair_partners(self, pack: Pack, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The first gradients of pairs; where only one of a pair is there, the other is zero."""
        others = [self._partners.pop(p, None) for p in pack.owners]
        for i, (p, grad, other) in enumerate(zip(pack.params, grads, others, strict=True)):
            if grad is None and other is not None:
                grads[i] = torch.zeros_like(p)
            elif other is None and grad is not None:
                others[i] = torch.zeros_like(pack.hess[i], dtype=COMPUTE)
        return others

    def _run(self, job: Job) -> None:
        job.run(self.unusable_on(job.pack.table.device), self._captured.append)
        if not math.isinf(job.step.clip_radius):
            self.clipped.setdefault(job.pack.step.number, []).append((job.pack.table.clipped, job.pack.size))

    def _start_and_stop_momenta(self, packs: list[Pack], others: list[Member], plan: Plan | None) -> bool:
        """Make the state match β₁, which can be edited between steps; returns whether that changed a pack."""
        wrong: list[list[Member]] = []
        for pack in packs:
            if pack.has_momentum != (pack.group["betas"][0] > 0):
                wrong.append(pack.members)
        if not wrong and not others:
            return False
        if plan is not None and (
            wrong or any("momentum" not in self.state_of(m) and m.group["betas"][0] > 0 for m in others)
        ):
            plan.take_out()  # what is averaged may depend on the mean; and as long as the kernel knows its packs
        for member in chain(*wrong, others):
            self._match_momentum(member, self._partners.get(member.p))
        return bool(wrong)

    # -- the posterior ---------------------------------------------------------------------------------------

    def posterior(self, model: nn.Module, **rest: Any) -> DiagonalPosterior:
        """Names come from ``model.named_parameters()``."""
        model, named, mean, prior, ess = self.snapshot(model)
        variance = {name: full_tensor(self.variance(member, self.peek_state(member))) for name, member in named}
        for name in mean:
            require_finite(name, mean[name], variance[name])
        return DiagonalPosterior(model, mean, variance, prior, ess=ess, **rest)

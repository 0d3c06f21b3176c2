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
from vprop.functional.eigenbasis import gram
from vprop.kernels.call import Curvature
from vprop.kernels.table import Role
from vprop.posterior import EigenbasisPosterior
from vprop.structures import rotated
from vprop.structures.base import MEAN, Structure, TensorSpec
from vprop.structures.checks import broken
from vprop.structures.companies import Company, CompanyPlan, companies, parted
from vprop.structures.foldings import Folding
from vprop.structures.matrices import SIDES, SQUARES, Rotation, sides_of
from vprop.structures.members import GroupStep, Marginal, Member, State, draw_of, members_of, require_finite
from vprop.structures.plans import Plan
from vprop.structures.portable import PortableDiagonal
from vprop.structures.refreshes import Refreshes
from vprop.structures.rotated import Scratch, kernels_take


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
        **{f"{side}_{what}": TensorSpec(like_parameter=False) for side in SIDES for what in SQUARES},
    }

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self._foldings: list[Folding] = []
        self._companies: list[Company] = []
        self._companies_of: list[GroupStep] | None = None
        """The groups that the companies are made of."""
        self._left: list[State] = []
        """Of parameters that take part no longer, in the memory of those that do."""
        self._scratch = Scratch()
        self._refreshes = Refreshes()
        self._captured: list[Any] = []
        """What CUDA graphs use: it must live as long as they may run."""

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
            for member in step.members:
                self._require_bases(member, state.get(member.p, {}))
        super().prepare(groups, state)

    def _require_bases(self, member: Member, state: State) -> None:
        """Refuse a limit that was raised after a step: there are no bases for such sides, and none could be loaded."""
        limit = member.group["max_basis_dim"]
        lacking = {s: n for s, n in sides_of(member.p.shape, limit) if "hess" in state and f"{s}_basis" not in state}
        if lacking and int(state["step"]) > 0:
            raise invalid(
                "max_basis_dim",
                limit,
                f"less than {min(lacking.values())}, as it was when the state of parameter {member.number} was made",
                "Put that back; a new optimizer can have bases for longer sides.",
            )
        for side, length in lacking.items():
            state.update(self._first_basis(member, side, length))

    def _first_basis(self, member: Member, side: str, length: int) -> State:
        """Of a side that nothing is known of: the coordinates of the weights."""
        dtype, device = self.state_spec["hess"].dtype_for(member.p), member.p.device
        return {
            f"{side}_basis": torch.eye(length, dtype=dtype, device=device),
            f"{side}_average": torch.zeros(length, length, dtype=dtype, device=device),
        }

    # -- state -----------------------------------------------------------------------------------------------

    def new_state(self, member: Member) -> State:
        """h̃ starts at ``hess_init``, and the bases as those of the weights."""
        state, p = super().new_state(member), member.p
        state["hess"] = state["hess"].contiguous()
        for side, length in sides_of(p.shape, member.group["max_basis_dim"]):
            state.update(self._first_basis(member, side, length))
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

    # -- companies -------------------------------------------------------------------------------------------

    def _kept_companies(self) -> list[Company]:
        """All parameters in companies, the same ones from step to step unless something has changed."""
        states = [self.state_of(member) for member in self.members]
        by_param = {id(member.p): state for member, state in zip(self.members, states, strict=True)}
        if torch.compiler.is_compiling():
            return companies(zip(self.members, states, strict=True), keep=False)
        if self._companies_of is not self.groups or not all(
            company.is_current([by_param[id(p)] for p in company.params]) for company in self._companies
        ):
            self._companies_of = None  # until all is done, should an interrupt come through
            gone = [(p, state) for c in self._companies for p, state in zip(c.params, c.states, strict=True)]
            self._left += [state for p, state in gone if id(p) not in by_param and self.state.get(p) is state]
            self._companies = companies(zip(self.members, states, strict=True), keep=True)
            here = set(map(id, states))
            self._left = parted([state for state in self._left if id(state) not in here], states)
            self._scratch.make_room([company for company in self._companies if kernels_take(company)])
            self._companies_of = self.groups
        return self._companies

    def _companies_with_gradients(self, joining: list[Member], first: bool) -> list[Company]:
        """Those that take part from now on: kept ones as a whole, and others for a step where some have no gradient."""
        joining_ids, found = {id(member.p) for member in joining}, list[Company]()
        for company in self._kept_companies() if first else []:
            if joining_ids.issuperset(map(id, company.params)):
                found.append(company)
        whole = {id(p) for company in found for p in company.params}
        rest = [(member, self.state_of(member)) for member in joining if id(member.p) not in whole]
        if rest and self._is_capturing():
            raise RuntimeError(
                'In a CUDA graph all parameters of a group with structure="eigenbasis" need a gradient. Freeze those '
                "that have none (requires_grad=False), or give them a group of their own."
            )
        return found + companies(rest, keep=False)

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return (
            any(step.capturable and step.members and step.members[0].p.is_cuda for step in self.groups)
            and torch.cuda.is_current_stream_capturing()
        )

    def _keep_for_graphs(self) -> None:
        """A graph that is being captured will use companies and scratch memory whenever it runs."""
        if self._is_capturing():
            self._captured.append((self._companies, self._scratch.everything()))

    def take_over(self, former: Structure) -> None:
        """Graphs that were captured before may still run."""
        super().take_over(former)
        if isinstance(former, Eigenbasis):
            self._captured = former._captured

    # -- samples ---------------------------------------------------------------------------------------------

    def plan(self, sample: int, evaluation_draw: int | None) -> CompanyPlan:
        """Which noise goes where."""
        if evaluation_draw is not None:
            pairs = [(member, self.peek_state(member)) for member in self.members]
            entries = companies(pairs, keep=False)
        else:
            entries = self._kept_companies()
            for company in entries:
                company.look_at_sizes()
        training = evaluation_draw is None

        def offsets(company: Company) -> Tensor:
            if training and kernels_take(company):
                return rotated.offsets(company, sample, self._scratch)
            return self._portable_offsets(company, sample, evaluation_draw)

        return CompanyPlan(entries, offsets, remember=training)

    def _portable_offsets(self, company: Company, sample: int, evaluation_draw: int | None) -> Tensor:
        """σ̃ε with torch's own operations."""
        pairs = zip(company.members, company.states, strict=True)
        draws = [draw_of(member, state, sample, evaluation_draw) for member, state in pairs]
        noises = dict(noise.normals_like(company.params, [draw for draw, _ in draws]))
        eps = torch.cat([noises[i].reshape(-1) for i in range(len(draws))]) * draws[0][1]
        damping, floor = company.members[0].damping, company.spread(company.floor)
        return diagonal.perturbation(company.hess, eps, company.step.ess, damping, floor)

    # -- the step --------------------------------------------------------------------------------------------

    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold the gradients, rotated, as the estimators do."""
        if self.groups and self.groups[0].samples == 0:  # else the plan of a sample has looked
            for company in self._kept_companies():
                company.look_at_sizes()
        self.has_folded = True
        known = {id(p) for folding in self._foldings for p in folding.company.params}
        joining = [m for m in self.members if m.p.grad is not None and id(m.p) not in known]
        for company in self._companies_with_gradients(joining, first=not self._foldings) if joining else []:
            self._foldings.append(Folding(company, folded_samples))
        for folding in self._foldings:
            noises = [] if folding.direct is not None else self._noises(folding.company.members, sample)
            known_noises = [eps.reshape(-1) for eps in noises if eps is not None]
            folding.fold(torch.cat(known_noises) if known_noises else None)

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        super().forget()
        self._foldings = []

    def update(self, plan: Plan | None) -> None:
        """One step of all parameters that had a gradient, and a new basis for those whose turn it is."""
        if plan is not None:
            plan.take_out()
        self.clipped = {}
        self._keep_for_graphs()
        for folding in self._foldings:
            self._update_company(folding)
        if not self._is_capturing():
            self._refreshes.due([folding.company for folding in self._foldings], self.groups)

    def _update_company(self, folding: Folding) -> None:
        company = folding.company
        if folding.direct is not None:
            folding.take_gradient(self._scratch)
        assert folding.folded is not None
        company.match_momentum(folding.folded.grad)
        company.counts += 1
        means, prior = company.means(remember=False), company.prior_means()
        distance = company.into(means if isinstance(prior, float) else means - prior)
        move = self._step_by_kernel if folding.by_kernels else self._step
        new_means = company.back(move(folding, distance) - distance, onto=means)
        company.write(new_means)
        if company.mean is not None:
            company.mean.copy_(new_means)
        folding.fold_into_averages(company.step.group["basis_beta"])
        company.give_back()

    def _company_estimate(self, folding: Folding) -> Tensor:
        """ĥ of the matrices of a company, in rotated coordinates."""
        company, step, precision = folding.company, folding.step, None
        assert folding.folded is not None
        if step.estimator.needs_noise:
            damping, floor = company.members[0].damping, company.spread(company.floor)
            precision = diagonal.precision(company.hess, step.ess, damping, floor)
        return step.estimator.hess(folding.folded, self.factor_of(step), precision)

    def _gradient_scale(self, step: GroupStep) -> float | None:
        return self.batch_size_of(step) if step.divides_by_root else None

    def _step_by_kernel(self, folding: Folding, distance: Tensor) -> Tensor:
        """Where the kernel brings the means to; curvature and momentum are changed."""
        company, step, estimate = folding.company, folding.step, None
        assert folding.folded is not None
        if folding.direct is None:
            estimate = self._company_estimate(folding)
        self._scratch.of(Role.WEIGHT, company).copy_(distance)
        new, clipped = rotated.step(
            company,
            folding.folded,
            folding.direct if folding.direct is not None else Curvature.GIVEN,
            estimate,
            self._scratch,
            scale=self.factor_of(step) if type(step.estimator) is SquaredGradient and estimate is None else 1.0,
            gradient_scale=self._gradient_scale(step),
            unusable=self.unusable_on(company.device),
        )
        if not math.isinf(step.group["clip_radius"]):
            self.clipped.setdefault(step.number, []).append((clipped, company.size))
        return new

    def _step(self, folding: Folding, distance: Tensor) -> Tensor:
        """The same with torch's own operations."""
        company, step, folded = folding.company, folding.step, folding.folded
        assert folded is not None
        group = step.group
        counted = group["betas"][0] > 0 or step.rule.debiases_hess or step.start_weight < 1
        new = step.rule.function(
            distance,
            company.hess,
            company.momentum,
            folded.grad,
            self._company_estimate(folding),
            step=company.spread(company.counts.to(company.hess)) if counted else 1.0,
            lr=group["lr"] * step.rate_factor,
            betas=group["betas"],
            damping=company.members[0].damping,
            prior_mean=0.0,
            clip_radius=group["clip_radius"],
            floor=company.spread(company.floor),
            start_weight=step.start_weight,
            gradient_scale=self._gradient_scale(step),
            divides=step.divides,
            ess=step.ess,
        )
        company.hess.copy_(new.hess)
        if new.momentum is not None:
            assert company.momentum is not None
            company.momentum.copy_(new.momentum)
        self.count_unusable(new.unusable)
        if new.clipped is not None:
            self.clipped.setdefault(step.number, []).append((new.clipped, company.size))
        return new.mean

    def refresh_bases(self, solve: bool | None) -> None:
        """Let all bases follow, whosever turn it is: for captured steps, which cannot."""
        self._refreshes.all(self._kept_companies(), solve)

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

"""The full structure: one covariance over all weights. Optimizers of this structure differ in their curvature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop.checks import invalid
from vprop.curvature import CurvatureEstimator, Evidence, Folded
from vprop.functional import full
from vprop.functional.diagonal import newest_weight
from vprop.objective import Objective
from vprop.parallel.ranks import average_over_ranks, mean_so_far
from vprop.posterior import FullPosterior, GaussianPrior
from vprop.precision import compute_dtype
from vprop.structures.base import MEAN, Structure, TensorSpec
from vprop.structures.checks import broken, check_shared, check_size, other_shape
from vprop.structures.curvature_matrix import CurvatureMatrix, KeptFactor
from vprop.structures.members import (
    GroupStep,
    Marginal,
    Member,
    State,
    gradient_of,
    mean_of,
    named_members,
    require_finite,
)
from vprop.structures.plans import KeptPlan, Plan
from vprop.wrappers import unwrapped

_WIDE = torch.float64
"""The matrix and its factors: in float32 a curvature of condition 10⁷ is no longer positive definite."""


class Full(Structure):
    """A Gaussian with a full covariance.

    State per parameter: ``step`` (int64), ``shape`` (its own, so that the rows of the matrix can be told apart),
    ``momentum`` if β₁ > 0, ``mean`` (float32) for bfloat16 and float16 weights; and, with the first of them, ``hess``:
    the matrix H over all parameters that have a state, in float64.
    """

    name = "full"
    state_spec: ClassVar[Mapping[str, TensorSpec]] = {
        "hess": TensorSpec(like_parameter=False, dtype=_WIDE),
        "momentum": TensorSpec(),
        "mean": MEAN,
    }
    takes_own_noise = True

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.has_folded = False
        self._taking_part: dict[Tensor, bool] = {}
        """The parameters that had a gradient in some sample of this step."""
        self._folded: Folded | None = None
        self._observation: Tensor | None = None
        """What the curvature estimator saw of the objective at the open sample."""
        self._shared_gradient: Tensor | None = None
        """Where ranks have noise of their own: the mean over ranks and samples."""
        self._kept_factor: KeptFactor | None = None

    def forget(self) -> None:
        """Forget what was folded of this step's samples."""
        self._taking_part = {}
        self._folded = self._observation = self._shared_gradient = None
        self.has_folded = False

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse what is for diagonals: one matrix has neither other steps nor a floor under its diagonal."""
        super().check_group(group)
        for name, only in (("preconditioner", "precision"), ("hess_floor", 0.0), ("noise_limit", math.inf)):
            value = group.get(name, only)
            if value != only:
                remedy = "Steps of Adam's and of SGD's kind, and bounds on σ, are for diagonals: set it so in the "
                remedy += "group, with an lr for natural-gradient steps (0.1)."
                allowed = 'float("inf")' if only == math.inf else repr(only)
                raise invalid(name, value, f"{allowed} for a full covariance", remedy)

    def check_groups(self, groups: list[dict[str, Any]], shared: Iterable[str]) -> None:
        """Refuse groups that cannot have one covariance, or too large a one."""
        check_shared(groups, shared)
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        check_size(self.optimizer, params, max(group["max_parameters"] for group in groups))

    @property
    def _estimator(self) -> CurvatureEstimator:
        return self.groups[0].estimator

    # -- state -----------------------------------------------------------------------------------------------

    def check_state(self, groups: list[GroupStep], state: dict[Any, State]) -> None:
        """Refuse a matrix of other parameters."""
        known = [p for step in groups for p in step.group["params"] if state.get(p)]
        for i, p in enumerate(known):
            shape = tuple(state[p]["shape"].tolist()) if "shape" in state[p] else tuple(p.shape)
            if shape != tuple(p.shape):
                raise other_shape(f"parameter {i} of those with a state", shape, p)
        matrices = [state[p]["hess"] for p in known if "hess" in state[p]]
        size = sum(p.numel() for p in known)
        if known and [tuple(matrix.shape) for matrix in matrices] != [(size, size)]:
            found = [tuple(matrix.shape) for matrix in matrices] or "none"
            raise broken(f"there must be one 'hess' of shape {(size, size)} in the state, but there is {found}")

    def new_state(self, member: Member) -> State:
        """With the shape: the matrix does not say whose rows it has."""
        state = super().new_state(member)
        state["shape"] = torch.tensor(member.p.shape, dtype=torch.int64, device=member.p.device)
        return state

    def peek_state(self, member: Member) -> State:
        """A copy, because it is completed."""
        state = dict(super().peek_state(member))
        state.setdefault("shape", torch.tensor(member.p.shape, dtype=torch.int64, device=member.p.device))
        return state

    def make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""
        members = self.members
        if members:
            self._matrix(members, keep=True)
        for member in members:
            if member.group["betas"][0] > 0:
                state = self.state[member.p]
                state["momentum"] = torch.zeros_like(member.p, dtype=compute_dtype(member.p), requires_grad=False)

    def _matrix(self, members: list[Member], keep: bool) -> CurvatureMatrix:
        """The curvature over ``members``; ``keep`` gives those that have no state one."""
        everyone = [p for step in self.groups for p in step.group["params"]]
        known = [p for p in everyone if self.state.get(p)]
        stored = next((self.state[p]["hess"] for p in known if "hess" in self.state[p]), None)
        if keep:
            for member in members:
                self.state[member.p] = self.peek_state(member)
            wanted = [p for p in everyone if self.state.get(p)]
            if stored is None or len(wanted) > len(known):
                stored = self._grown(stored, known, wanted)
                for p in wanted:
                    self.state[p].pop("hess", None)
                self.state[wanted[0]]["hess"] = stored
            known = wanted
        elif stored is None or any(not self.state.get(member.p) for member in members):
            present = {id(p) for p in known} | {id(member.p) for member in members}
            wanted = [p for p in everyone if id(p) in present]
            stored, known = self._grown(stored, known, wanted), wanted
        return CurvatureMatrix(stored, known, [member.p for member in members])

    def _grown(self, stored: Tensor | None, known: list[Tensor], wanted: list[Tensor]) -> Tensor:
        """The matrix over more parameters: the new ones start with ``hess_init`` and without correlations."""
        inits = {id(p): step.group["hess_init"] for step in self.groups for p in step.group["params"]}
        device = wanted[0].device
        diagonals = [torch.full((p.numel(),), inits[id(p)], dtype=_WIDE, device=device) for p in wanted]
        grown = torch.diag(torch.cat(diagonals))
        if stored is not None:
            rows = CurvatureMatrix(grown, wanted, known).rows
            grown[rows[:, None], rows] = stored.to(grown.device)
        return grown

    def _damping(self, members: list[Member]) -> float | Tensor:
        """δ over ``members``: a number, one per weight, or a matrix."""
        ess, precision = members[0].ess, members[0].step.prior_precision
        if isinstance(precision, Tensor):
            all_params = members[0].group["params"]
            return CurvatureMatrix(precision, all_params, [member.p for member in members]).sub / ess
        precisions = [member.prior_precision for member in members]
        if all(not isinstance(value, Tensor) and value == precisions[0] for value in precisions):
            return members[0].damping
        return _flat([_like(member, value) for member, value in zip(members, precisions, strict=True)]) / ess

    # -- samples ---------------------------------------------------------------------------------------------

    def plan(self, sample: int, evaluation_draw: int | None) -> KeptPlan:
        """All parameters at once."""
        members = self.members
        if not members:
            return KeptPlan([])
        matrix = self._matrix(members, keep=evaluation_draw is None)
        factor = self._factor(matrix, self._damping(members))
        drawn = list(self.noises(sample, evaluation_draw))
        offset = full.perturbation(factor, _flat([eps for _, _, eps in drawn]), members[0].ess)
        means = [mean_of(member.p, state) for member, state, _ in drawn]
        pieces = [piece.view(mean.shape) for mean, piece in zip(means, _pieces(offset, members), strict=True)]
        return KeptPlan(
            (member.p, (mean + piece).to(member.p.dtype))
            for member, mean, piece in zip(members, means, pieces, strict=True)
        )

    def _factor(self, matrix: CurvatureMatrix, damping: float | Tensor) -> Tensor:
        """The Cholesky factor of H + Δ, kept from one sample to the next, and from an update to the next sample."""
        kept = self._kept_factor
        if kept is not None and kept.fits(matrix, damping):
            return kept.factor
        factor = full.factorize(matrix.sub, damping).factor
        self._kept_factor = KeptFactor.of(matrix, damping, factor)
        return factor

    # -- the step --------------------------------------------------------------------------------------------

    def observe(self, objective: Objective, sample: int) -> None:
        """Keep what the estimator sees in the objective until the gradients are folded."""
        self.has_folded = True
        members = self.members
        estimator = self._estimator
        observed = self.observed(estimator, objective, members, sample)
        sizes = [member.p.numel() for member in members]
        rows = [value.reshape(size, -1) for size, value in zip(sizes, observed, strict=True) if size]
        curvature = estimator.curvature_of(torch.cat(rows).squeeze(-1).to(_WIDE))
        (self._observation,) = self.seen_by_all([curvature], objective, members[0].step)

    def fold(self, sample: int | None, folded_samples: int) -> None:
        """Fold the gradients of all parameters as one vector."""
        self.has_folded = True
        members = self.members
        for member in members:
            if member.p.grad is not None:
                self._taking_part[member.p] = True
        if not self._taking_part:
            return
        grad = _flat([gradient_of(member, copy=False) for member in members])
        apart = members[0].step.own_noise
        own = _flat([self.own_gradient(member) for member in members]) if apart else grad
        folded = self._estimator.fold(self._folded, Evidence(own, self._observation))
        self._folded, self._observation = folded, None
        if apart:
            self._shared_gradient = mean_so_far(self._shared_gradient, grad, folded.count)

    def update(self, plan: Plan | None) -> None:
        """One step of all parameters that had a gradient."""
        if plan is not None:
            plan.take_out()
        folded, everyone = self._folded, self.members
        if folded is None:
            return
        size = len(folded.grad)
        estimate = self._estimator.hess(folded, self.factor_of(everyone[0].step)).reshape(size, size)
        if self._shared_gradient is not None:
            folded.grad = self._shared_gradient
            self.require_averaged([folded.grad])
            (estimate,) = average_over_ranks([estimate])
        # A parameter that had no gradient in any sample stays as it is.
        members = [member for member in everyone if member.p in self._taking_part]
        part = CurvatureMatrix(estimate, [member.p for member in everyone], [member.p for member in members])
        grad, estimate = folded.grad[part.rows], part.sub
        matrix, damping = self._matrix(members, keep=True), self._damping(members)
        betas = members[0].group["betas"]
        momentum, steps = self._momentum(members, grad, betas[0])
        weight = self._newest_weight(members)
        new = full.natural_gradient_step(
            _flat([mean_of(member.p, self.state[member.p]) for member in members]),
            matrix.sub,
            momentum,
            grad,
            estimate,
            step=steps,
            lr=_flat([_like(member, member.group["lr"]) for member in members]),
            betas=betas,
            damping=damping,
            prior_mean=_flat([_like(member, member.prior_mean) for member in members]),
            clip_radius=_flat([_like(member, member.group["clip_radius"]) for member in members]),
            newest_weight=weight,
        )
        if new is None:
            self.count_unusable(torch.tensor(size, device=grad.device))
            return
        self._write_back(members, new)
        self.clipped = {}
        for member, piece in zip(members, _pieces(new.clipped, members), strict=True):
            if not math.isinf(member.group["clip_radius"]):
                self.clipped.setdefault(member.group_number, []).append((piece.sum(), piece.numel()))
        matrix.write_(new.curvature.hess, decay=1 - weight)
        self._kept_factor = KeptFactor.of(matrix, damping, new.curvature.factor)

    def _newest_weight(self, members: list[Member]) -> float:
        """What Ĥ of this step, which is counted already, weighs in the average."""
        step = members[0].step
        count = max(int(self.state[member.p]["step"]) for member in members)
        return float(newest_weight(step.group["betas"][1], count, step.start_weight))

    def _momentum(self, members: list[Member], grad: Tensor, beta1: float) -> tuple[Tensor | None, Tensor | float]:
        """The momentum average before the step, and the step's number for every weight."""
        for member, piece in zip(members, _pieces(grad, members), strict=True):
            state = self.state[member.p]
            if beta1 == 0:
                state.pop("momentum", None)
            elif "momentum" not in state:
                # As in the diagonal structure: late momentum starts as if all gradients so far had been this one.
                late = 1 - beta1 ** int(state["step"])
                start = torch.where(torch.isfinite(piece), piece * late, 0)  # 0·NaN is NaN, for ever
                state["momentum"] = start.view(member.p.shape).to(compute_dtype(member.p))
            state["step"] += 1
        if beta1 == 0:
            return None, 1.0
        momentum = _flat([self.state[member.p]["momentum"] for member in members])
        return momentum, _flat([_like(member, int(self.state[member.p]["step"])) for member in members])

    def _write_back(self, members: list[Member], new: full.Step) -> None:
        for member, piece in zip(members, _pieces(new.mean, members), strict=True):
            self.write_mean(member, self.state[member.p], piece.view(member.p.shape))
        if new.momentum is not None:
            for member, piece in zip(members, _pieces(new.momentum, members), strict=True):
                self.state[member.p]["momentum"].copy_(piece.view(member.p.shape))

    def marginals(self, at_least: int = 1) -> Iterator[Marginal]:
        """Mean and variance of each parameter that has made this many steps."""
        members = [member for member in self.members if self.steps_of(member.p) >= at_least]
        if not members:
            return
        matrix = self._matrix(members, keep=False)
        variances = torch.cholesky_inverse(self._factor(matrix, self._damping(members))).diagonal() / members[0].ess
        diagonals = zip(members, _pieces(variances, members), _pieces(matrix.sub.diagonal(), members), strict=True)
        for member, variance, hess in diagonals:
            mean, steps = mean_of(member.p, self.peek_state(member)), self.steps_of(member.p)
            yield Marginal(member, mean, variance.view(mean.shape), hess.view(mean.shape), steps)

    # -- the posterior ---------------------------------------------------------------------------------------

    def posterior(self, model: nn.Module, **rest: Any) -> FullPosterior:
        """Names, and the order of the covariance's rows, are those of ``model.named_parameters()``."""
        model = unwrapped(model)
        named = named_members(model, self.members)
        members = [member for _, member in named]
        mean = {name: mean_of(member.p, self.peek_state(member)).clone() for name, member in named}
        damping, ess = self._damping(members), members[0].ess
        curvature = full.factorize(self._matrix(members, keep=False).sub, damping)
        for name, value in mean.items():
            require_finite(name, value, curvature.factor)
        precision = ess * full.damped(curvature.hess, damping)
        return FullPosterior(model, mean, precision, self._prior(named), ess=ess, **rest)

    def _prior(self, named: list[tuple[str, Member]]) -> GaussianPrior:
        members, damping = [member for _, member in named], self._damping([member for _, member in named])
        matrix = damping * members[0].ess if isinstance(damping, Tensor) and damping.dim() == 2 else None
        diagonals = [None] * len(members) if matrix is None else _pieces(matrix.diagonal(), members)
        mean, precision = {}, {}
        for (name, member), diagonal in zip(named, diagonals, strict=True):
            device, dtype = member.p.device, compute_dtype(member.p)
            mean[name] = torch.as_tensor(member.prior_mean, dtype=dtype, device=device).clone()
            own = member.prior_precision if diagonal is None else diagonal.view(member.p.shape)
            precision[name] = torch.as_tensor(own, dtype=dtype, device=device).clone()
        return GaussianPrior(mean, precision, matrix)


def _flat(tensors: list[Tensor]) -> Tensor:
    """All tensors as one wide vector."""
    return torch.cat([tensor.detach().flatten().to(_WIDE) for tensor in tensors])


def _like(member: Member, value: float | Tensor) -> Tensor:
    """A number, or a tensor like the parameter, as a tensor like the parameter."""
    return torch.as_tensor(value, dtype=_WIDE, device=member.p.device).expand(member.p.shape)


def _pieces(vector: Tensor, members: list[Member]) -> tuple[Tensor, ...]:
    return vector.split([member.p.numel() for member in members])

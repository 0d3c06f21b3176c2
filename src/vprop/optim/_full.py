"""The full structure: one covariance over all weights. Optimizers of this structure differ in their curvature."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import check_model
from vprop.curvature import CurvatureEstimator, Evidence
from vprop.functional import full
from vprop.likelihood import LikelihoodLike
from vprop.objective import Objective
from vprop.optim._arguments import check_shared, check_size, refuse_sharded_parameters
from vprop.optim._base import VariationalOptimizer
from vprop.optim._curvature_matrix import CurvatureMatrix, KeptFactor
from vprop.optim._loading import StateForm, broken, other_shape
from vprop.optim._members import (
    Marginal,
    Member,
    draw_of,
    gradient_of,
    mean_of,
    members_of,
    named_members,
    new_state,
    require_finite,
)
from vprop.optim._sampling import at_the_mean
from vprop.parallel.ranks import average_over_ranks, has_own_noise, mean_so_far
from vprop.posterior import FullPosterior, GaussianPrior
from vprop.precision import as_tensor, compute_dtype, needs_master_copy
from vprop.wrappers import unwrapped

_WIDE = torch.float64
"""The matrix and its factors: in float32 a curvature of condition 10⁷ is no longer positive definite."""


@dataclass
class _Written:
    """A parameter that holds a sample. Its mean is kept: a vector is nothing beside the matrix."""

    member: Member
    mean: Tensor
    sample: Tensor
    done: bool = False


@dataclass
class _FullPlan:
    """A sample of all parameters."""

    entries: list[_Written]

    def write(self) -> None:
        for entry in self.entries:
            entry.done = True
            entry.member.p.copy_(entry.sample)

    def take_out(self) -> None:
        for entry in self.entries:
            if entry.done:
                entry.member.p.copy_(entry.mean)
                entry.done = False

    def twin(self) -> _FullPlan:
        return _FullPlan([replace(entry) for entry in self.entries])

    def owners(self) -> list[Tensor]:
        return [entry.member.p for entry in self.entries]


class FullOptimizer(VariationalOptimizer):
    """Sampling and update of a Gaussian with a full covariance; a subclass chooses the curvature estimator.

    State per parameter: ``step`` (int64), ``shape`` (its own, so that the rows of the matrix can be told apart),
    ``momentum`` if β₁ > 0, ``mean`` (float32) for bfloat16 and float16 weights; and, with the first of them, ``hess``:
    the matrix H over all parameters that have a state, in float64.
    """

    _state_form = StateForm(needed=(), like_parameter=("momentum", "mean"), shared=("hess",), may_be_anything=("mean",))

    @abstractmethod
    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        """The estimator of Ĥ that the hyperparameters, the same in all groups, ask for."""

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse_sharded_parameters(group, type(self).__name__)

    def _check_groups_together(self, groups: list[dict[str, Any]]) -> None:
        super()._check_groups_together(groups)
        check_shared(groups, self._hyperparameters)
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        check_size(type(self).__name__, params, max(group["max_parameters"] for group in groups))

    def _members(self) -> list[Member]:
        return list(members_of(self.param_groups))

    def _estimator(self) -> CurvatureEstimator:
        return self._curvature(self.param_groups[0])

    # -- state -----------------------------------------------------------------------------------------------

    def _state_dtype(self, key: str, p: Tensor) -> torch.dtype:
        return _WIDE if key == "hess" else super()._state_dtype(key, p)

    def _check_state(self, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        known = [p for group in groups for p in group["params"] if state.get(p)]
        for i, p in enumerate(known):
            shape = tuple(state[p]["shape"].tolist()) if "shape" in state[p] else tuple(p.shape)
            if shape != tuple(p.shape):
                raise other_shape(f"parameter {i} of those with a state", shape, p)
        matrices = [state[p]["hess"] for p in known if "hess" in state[p]]
        size = sum(p.numel() for p in known)
        if known and [tuple(matrix.shape) for matrix in matrices] != [(size, size)]:
            found = [tuple(matrix.shape) for matrix in matrices] or "none"
            raise broken(f"there must be one 'hess' of shape {(size, size)} in the state, but there is {found}")

    def _peek_state(self, member: Member) -> dict[str, Tensor]:
        """The state of a parameter, or what it would be, without keeping it."""
        complete = new_state(member)
        complete["shape"] = torch.tensor(member.p.shape, dtype=torch.int64, device=member.p.device)
        complete.update(self.state.get(member.p, {}))
        if not needs_master_copy(member.p):
            complete.pop("mean", None)
        return complete

    def _make_state(self) -> None:
        members = self._members()
        if members:
            self._matrix(members, keep=True)
        for member in members:
            if member.group["betas"][0] > 0:
                state = self.state[member.p]
                state["momentum"] = torch.zeros_like(member.p, dtype=compute_dtype(member.p), requires_grad=False)

    def _matrix(self, members: list[Member], keep: bool) -> CurvatureMatrix:
        """The curvature over ``members``; ``keep`` gives those that have no state one."""
        self._check_groups_together(self.param_groups)
        everyone = [p for group in self.param_groups for p in group["params"]]
        known = [p for p in everyone if self.state.get(p)]
        stored = next((self.state[p]["hess"] for p in known if "hess" in self.state[p]), None)
        if keep:
            for member in members:
                self.state[member.p] = self._peek_state(member)
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
        inits = {id(p): group["hess_init"] for group in self.param_groups for p in group["params"]}
        device = wanted[0].device
        diagonals = [torch.full((p.numel(),), inits[id(p)], dtype=_WIDE, device=device) for p in wanted]
        grown = torch.diag(torch.cat(diagonals))
        if stored is not None:
            rows = CurvatureMatrix(grown, wanted, known).rows
            grown[rows[:, None], rows] = stored.to(grown.device)
        return grown

    def _damping(self, members: list[Member]) -> float | Tensor:
        """δ over ``members``: a number, one per weight, or a matrix."""
        ess, precision = members[0].ess, members[0].group["prior_precision"]
        if isinstance(precision, Tensor):
            all_params = members[0].group["params"]
            return CurvatureMatrix(precision, all_params, [member.p for member in members]).sub / ess
        precisions = [member.prior_precision for member in members]
        if all(not isinstance(value, Tensor) and value == precisions[0] for value in precisions):
            return members[0].damping
        return _flat([_like(member, value) for member, value in zip(members, precisions, strict=True)]) / ess

    # -- samples ---------------------------------------------------------------------------------------------

    def _plan_sample(self, sample: int, evaluation_draw: int | None) -> _FullPlan:
        members = self._members()
        if not members:
            return _FullPlan([])
        matrix = self._matrix(members, keep=evaluation_draw is None)
        factor = self._factor(matrix, self._damping(members))
        states = [self._peek_state(member) for member in members]
        draws = [draw_of(m, state, sample, evaluation_draw) for m, state in zip(members, states, strict=True)]
        noises = dict(noise.normals_like([member.p for member in members], [draw for draw, _ in draws]))
        eps = _flat([noises[i] * sign for i, (_, sign) in enumerate(draws)])
        means = [mean_of(member.p, state) for member, state in zip(members, states, strict=True)]
        offset = full.perturbation(factor, eps, members[0].ess)
        return _FullPlan(
            [
                _Written(member, member.p.detach().clone(), (mean + piece.view(mean.shape)).to(member.p.dtype))
                for member, mean, piece in zip(members, means, _pieces(offset, members), strict=True)
            ]
        )

    def _factor(self, matrix: CurvatureMatrix, damping: float | Tensor) -> Tensor:
        """The Cholesky factor of H + Δ, kept from one sample to the next, and from an update to the next sample."""
        kept = self._ledger.factor
        if kept is not None and kept.fits(matrix, damping):
            return kept.factor
        factor = full.factorize(matrix.sub, damping).factor
        self._ledger.factor = KeptFactor.of(matrix, damping, factor)
        return factor

    # -- the step --------------------------------------------------------------------------------------------

    def _needs_objective(self) -> bool:
        return self._estimator().needs_objective

    def _observe(self, objective: Objective, sample: int) -> None:
        members = self._members()
        estimator = self._estimator()
        observed = self._observed(estimator, objective, members, sample)
        sizes = [member.p.numel() for member in members]
        rows = [value.reshape(size, -1) for size, value in zip(sizes, observed, strict=True) if size]
        curvature = estimator.curvature_of(torch.cat(rows).squeeze(-1).to(_WIDE))
        (self._ledger.observed_all,) = self._seen_by_all([curvature], objective, members[0].group)

    def _fold(self) -> None:
        members = self._members()
        for member in members:
            if member.p.grad is not None:
                self._ledger.folded[member.p] = True
        if not self._ledger.folded:
            return
        grad = _flat([gradient_of(member, copy=False) for member in members])
        apart = has_own_noise(members[0].group)
        own = _flat([self._own_gradient(member) for member in members]) if apart else grad
        folded = self._estimator().fold(self._ledger.folded_all, Evidence(own, self._ledger.observed_all))
        self._ledger.folded_all, self._ledger.observed_all = folded, None
        if apart:
            self._ledger.shared_gradient = mean_so_far(self._ledger.shared_gradient, grad, folded.count)

    def _update(self) -> None:
        self._leave()
        folded, everyone = self._ledger.folded_all, self._members()
        if folded is None:
            return
        size = len(folded.grad)
        estimate = self._estimator().hess(folded, everyone[0].ess).reshape(size, size)
        if self._ledger.shared_gradient is not None:
            folded.grad = self._ledger.shared_gradient
            self._require_averaged([folded.grad])
            (estimate,) = average_over_ranks([estimate])
        # A parameter that had no gradient in any sample stays as it is.
        members = [member for member in everyone if member.p in self._ledger.folded]
        part = CurvatureMatrix(estimate, [member.p for member in everyone], [member.p for member in members])
        grad, estimate = folded.grad[part.rows], part.sub
        matrix, damping = self._matrix(members, keep=True), self._damping(members)
        betas = members[0].group["betas"]
        momentum, steps = self._momentum(members, grad, betas[0])
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
        )
        if new is None:
            self._count_unusable(torch.tensor(size, device=grad.device))
            return
        self._write_back(members, new)
        self._ledger.clipped = {}
        for member, piece in zip(members, _pieces(new.clipped, members), strict=True):
            if not math.isinf(member.group["clip_radius"]):
                self._ledger.clipped.setdefault(member.group_number, []).append((piece.sum(), piece.numel()))
        matrix.write_(new.curvature.hess, decay=betas[1])
        self._ledger.factor = KeptFactor.of(matrix, damping, new.curvature.factor)

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
            state = self.state[member.p]
            member.p.copy_(piece.view(member.p.shape))
            if "mean" in state:
                state["mean"].copy_(piece.view(member.p.shape))
        if new.momentum is not None:
            for member, piece in zip(members, _pieces(new.momentum, members), strict=True):
                self.state[member.p]["momentum"].copy_(piece.view(member.p.shape))

    def _marginals(self) -> Iterator[Marginal]:
        members = [m for m in self._members() if self.state.get(m.p) and int(self.state[m.p]["step"]) > 0]
        if not members:
            return
        matrix = self._matrix(members, keep=False)
        variances = torch.cholesky_inverse(self._factor(matrix, self._damping(members))).diagonal() / members[0].ess
        diagonals = zip(members, _pieces(variances, members), _pieces(matrix.sub.diagonal(), members), strict=True)
        for member, variance, hess in diagonals:
            mean = mean_of(member.p, self.state[member.p])
            yield Marginal(member, mean, variance.view(mean.shape), hess.view(mean.shape))

    # -- the posterior ---------------------------------------------------------------------------------------

    @torch.no_grad()
    @at_the_mean
    def posterior(
        self,
        model: nn.Module,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> FullPosterior:
        """A snapshot of the posterior over ``model``'s parameters, with one covariance over all of them.

        Names, and the order of the covariance's rows, are those of ``model.named_parameters()``.
        """
        check_model(model, "posterior(model)")
        model = unwrapped(model)
        self._report_unusable(deferred=True)
        named = named_members(model, self._members())
        members = [member for _, member in named]
        mean = {name: mean_of(member.p, self._peek_state(member)).clone() for name, member in named}
        damping, ess = self._damping(members), members[0].ess
        curvature = full.factorize(self._matrix(members, keep=False).sub, damping)
        for name, value in mean.items():
            require_finite(name, value, curvature.factor)
        return FullPosterior(
            model,
            mean,
            ess * full.damped(curvature.hess, damping),
            self._prior(named),
            ess=ess,
            seed=self.param_groups[0]["seed"],
            snapshot=self._ledger.next_snapshot(),
            likelihood=likelihood,
            noise_variance=noise_variance,
        )

    def _prior(self, named: list[tuple[str, Member]]) -> GaussianPrior:
        members, damping = [member for _, member in named], self._damping([member for _, member in named])
        matrix = damping * members[0].ess if isinstance(damping, Tensor) and damping.dim() == 2 else None
        diagonals = [None] * len(members) if matrix is None else _pieces(matrix.diagonal(), members)
        mean, precision = {}, {}
        for (name, member), diagonal in zip(named, diagonals, strict=True):
            device, dtype = member.p.device, compute_dtype(member.p)
            mean[name] = as_tensor(member.prior_mean).to(device, dtype).clone()
            own = member.prior_precision if diagonal is None else diagonal.view(member.p.shape)
            precision[name] = as_tensor(own).to(device, dtype).clone()
        return GaussianPrior(mean, precision, matrix)


def _flat(tensors: list[Tensor]) -> Tensor:
    """All tensors as one wide vector."""
    return torch.cat([tensor.detach().flatten().to(_WIDE) for tensor in tensors])


def _like(member: Member, value: float | Tensor) -> Tensor:
    """A number, or a tensor like the parameter, as a tensor like the parameter."""
    return torch.as_tensor(value, dtype=_WIDE, device=member.p.device).expand(member.p.shape)


def _pieces(vector: Tensor, members: list[Member]) -> tuple[Tensor, ...]:
    return vector.split([member.p.numel() for member in members])

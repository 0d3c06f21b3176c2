"""The diagonal structure: one variance per weight. Optimizers of this structure differ in their curvature."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.bundles import bundles, gather, gather_or_number, limit_for, scatter_, scatter_add_
from vprop.curvature import CurvatureEstimator, Folded
from vprop.functional import diagonal
from vprop.optim._base import VariationalOptimizer
from vprop.posterior import DiagonalPosterior, GaussianPrior, Likelihood
from vprop.precision import compute_dtype, needs_master_copy


@dataclass
class _Member:
    """A parameter with what its group says of it."""

    p: Tensor
    number: int
    """Position among all parameters of the optimizer, which addresses its noise."""
    group: dict[str, Any]
    group_number: int
    position: int
    """Position inside the group, which addresses its prior."""

    @property
    def ess(self) -> float:
        return self.group["num_data"] / self.group["temperature"]

    @property
    def prior_precision(self) -> float | Tensor:
        precision = self.group["prior_precision"]
        return precision[self.position] if isinstance(precision, list) else precision

    @property
    def damping(self) -> float | Tensor:
        """δ = λ/ess."""
        return self.prior_precision / self.ess

    @property
    def prior_mean(self) -> float | Tensor:
        means = self.group["prior_mean"]
        return 0.0 if means is None else means[self.position]


@dataclass
class _Written:
    """A parameter that holds a sample, with all that is needed to generate its noise again.

    ``ess`` and ``damping`` are those of the moment of writing: a group can be edited while the sample is active.
    """

    member: _Member
    draw: noise.Draw
    sign: int
    hess: Tensor
    ess: float
    damping: float | Tensor
    mean: Tensor | None
    done: bool = False
    """Whether the sample is in the weights: the truth also when an interrupt strikes half-way."""


@dataclass
class _Ready:
    """A parameter whose samples are folded."""

    member: _Member
    state: dict[str, Tensor]
    folded: Folded


_Item = TypeVar("_Item", _Written, _Ready)


def _bundles(items: list[_Item]) -> Iterator[list[_Item]]:
    """Items that can be handled as one flat tensor: of one group, device and dtype."""
    return bundles(
        items,
        kind=lambda item: (item.member.group_number, item.member.p.device, item.member.p.dtype),
        size=lambda item: item.member.p.numel(),
        limit=lambda item: limit_for(item.member.group["foreach"], item.member.p.device),
    )


class DiagonalOptimizer(VariationalOptimizer):
    """Sampling and update of a diagonal Gaussian; a subclass chooses the curvature estimator.

    State per parameter: ``step`` (int64), ``hess`` (h), ``momentum`` if β₁ > 0, and ``mean`` (float32) for bfloat16
    and float16 weights, which are too coarse to hold it.
    """

    @abstractmethod
    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        """The estimator of ĥ that the group's hyperparameters ask for."""

    def _members(self) -> Iterator[_Member]:
        """All parameters that take part; one with ``requires_grad=False`` is a constant and does not."""
        number = 0
        for group_number, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if p.requires_grad:
                    yield _Member(p, number, group, group_number, position)
                number += 1

    def _new_state(self, member: _Member) -> dict[str, Tensor]:
        p, group = member.p, member.group
        state = {
            "step": torch.zeros((), dtype=torch.int64, device=p.device if group["capturable"] else "cpu"),
            "hess": torch.full_like(p, group["hess_init"], dtype=compute_dtype(p), requires_grad=False),
        }
        if needs_master_copy(p):
            state["mean"] = p.detach().to(compute_dtype(p), copy=True)
        return state

    def _peek_state(self, member: _Member) -> dict[str, Tensor]:
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

    def _state(self, member: _Member) -> dict[str, Tensor]:
        self.state[member.p] = self._peek_state(member)
        return self.state[member.p]

    def _mean(self, p: Tensor, state: dict[str, Tensor]) -> Tensor:
        """μ, while no sample is active.

        Where coarse weights no longer match their float32 mean, somebody else wrote to them (loaded a checkpoint,
        re-initialised a layer): what is in the weights counts.
        """
        if "mean" not in state:
            return p.detach()
        mean = state["mean"]
        return torch.where(mean.to(p.dtype) == p, mean, p.to(mean.dtype))

    # -- samples ---------------------------------------------------------------------------------------------

    def _plan_sample(self, sample: int, evaluation_draw: int | None) -> list[_Written]:
        plan = []
        for member in self._members():
            # Evaluation must leave no trace, so it looks at a state that it does not keep.
            state = self._state(member) if evaluation_draw is None else self._peek_state(member)
            mean = None
            if "mean" in state:
                mean = self._mean(member.p, state)
                if evaluation_draw is None:
                    state["mean"].copy_(mean)
            plan.append(self._address(member, state, sample, evaluation_draw, mean))
        return plan

    def _write_sample(self, plan: list[_Written]) -> None:
        for bundle in _bundles(plan):
            params, offset = [entry.member.p for entry in bundle], _offset(bundle)
            if bundle[0].mean is None:
                scatter_add_(params, offset)
            else:
                scatter_(params, gather([entry.mean for entry in bundle if entry.mean is not None]) + offset)
            for entry in bundle:
                entry.done = True

    def _restore_mean(self, plan: list[_Written]) -> None:
        for bundle in _bundles([entry for entry in plan if entry.done]):
            if bundle[0].mean is None:
                scatter_add_([entry.member.p for entry in bundle], -_offset(bundle))
            for entry in bundle:
                if entry.mean is not None:
                    entry.member.p.copy_(entry.mean)
                entry.done = False

    def _address(
        self,
        member: _Member,
        state: dict[str, Tensor],
        sample: int,
        evaluation_draw: int | None,
        mean: Tensor | None,
    ) -> _Written:
        group, seed = member.group, member.group["seed"]
        sign = 1
        if evaluation_draw is not None:
            draw = noise.Draw(seed, member.number, evaluation_draw, stream=noise.Stream.EVALUATION)
        else:
            step: noise.Word = state["step"] if group["capturable"] else int(state["step"])
            if group["antithetic"]:
                sample, sign = sample // 2, -1 if sample % 2 else 1
            draw = noise.Draw(seed, member.number, step, sample)
        return _Written(member, draw, sign, state["hess"], member.ess, member.damping, mean)

    # -- the step --------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        for member in self._members():
            p, folded = member.p, self._ledger.folded.get(member.p)
            if p.grad is None and folded is None:
                continue
            estimator, several = self._curvature(member.group), member.group["mc_samples"] > 1
            grad = self._gradient(member, copy=several and folded is None)
            if folded is None:
                # Samples in which the parameter took no part count with the gradient they had: zero.
                for _ in range(self._ledger.folded_samples):
                    folded = estimator.fold(folded, torch.zeros_like(grad))
            self._ledger.folded[p] = estimator.fold(folded, grad)

    def _gradient(self, member: _Member, copy: bool) -> Tensor:
        p, grad = member.p, member.p.grad
        if grad is None:
            return torch.zeros_like(p, dtype=compute_dtype(p))
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Parameter {member.number} has a sparse gradient, which is not supported: its posterior needs the "
                "gradient of every element. Build the embedding with sparse=False."
            )
        grad = grad.detach().to(compute_dtype(p), copy=copy)
        return -grad if member.group["maximize"] else grad

    def _update(self) -> None:
        ready = []
        for member in self._members():
            folded = self._ledger.folded.pop(member.p, None)
            if folded is None:
                continue
            state, beta1 = self._state(member), member.group["betas"][0]
            if beta1 == 0:
                state.pop("momentum", None)
            elif "momentum" not in state:
                # Zero at the first step. Later it starts as if all gradients so far had been this one, so that the
                # debiased average does too.
                state["momentum"] = folded.grad * (1 - beta1 ** state["step"].to(state["hess"].dtype))
            state["step"] += 1
            ready.append(_Ready(member, state, folded))
        for bundle in _bundles(ready):
            self._update_bundle(bundle)

    def _update_bundle(self, bundle: list[_Ready]) -> None:
        """One step of parameters of one kind, gathered into flat tensors if they are several."""
        group, ess = bundle[0].member.group, bundle[0].member.ess
        states, folded = [item.state for item in bundle], [item.folded for item in bundle]
        statistics = Folded(
            gather([f.grad for f in folded]), gather([f.product for f in folded]), count=folded[0].count
        )
        momentum: Tensor | None = None
        step: float | Tensor = 1.0
        if group["betas"][0] > 0:
            momentum = gather([state["momentum"] for state in states])
            step = _steps(states)
        new = diagonal.natural_gradient_step(
            gather([self._mean(item.member.p, item.state) for item in bundle]),
            gather([state["hess"] for state in states]),
            momentum,
            statistics.grad,
            self._curvature(group).hess(statistics, ess),
            step=step,
            lr=group["lr"],
            betas=group["betas"],
            damping=gather_or_number([item.member.damping for item in bundle]),
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

    # -- the posterior ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def posterior(
        self, model: nn.Module, *, likelihood: Likelihood | None = None, noise_variance: float | Tensor = 1.0
    ) -> DiagonalPosterior:
        """A snapshot of the posterior over ``model``'s parameters.

        Names come from ``model.named_parameters()``. Parameters that the optimizer does not hold, and frozen ones,
        are constants of the model. ``likelihood`` and ``noise_variance`` are what ``predict`` assumes by default.
        """
        self._refuse_inside_sample("posterior()")
        self._leave()
        self._report_unusable(deferred=True)
        members = {id(member.p): member for member in self._members()}
        named = [(name, members.pop(id(p))) for name, p in model.named_parameters() if id(p) in members]
        if members:
            raise ValueError(
                f"posterior(model): {len(members)} of the optimizer's parameters are not parameters of this model. "
                "Pass the module the optimizer was built from, or one that contains all of them."
            )
        if not named:
            raise ValueError(
                "posterior(model): none of the optimizer's parameters requires a gradient, so none has a posterior."
            )
        sizes = {member.ess for _, member in named}
        mean, variance, prior_mean, prior_precision = {}, {}, {}, {}
        for name, member in named:
            state = self._peek_state(member)
            mean[name] = self._mean(member.p, state).clone()
            variance[name] = diagonal.variance(state["hess"], member.ess, member.damping)
            if not bool((torch.isfinite(mean[name]) & torch.isfinite(variance[name])).all()):
                raise FloatingPointError(
                    f"The posterior of {name!r} is not finite: its weights or curvature hold NaN or infinity. "
                    "Go back to an earlier checkpoint and lower lr or clip the gradients."
                )
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


def _steps(states: list[dict[str, Tensor]]) -> Tensor:
    """Step counts to go with gathered tensors: parameters that joined later, or sat out a step, have their own.

    One number for a single parameter, and one copy to the device for a bundle.
    """
    if len(states) == 1:
        return states[0]["step"].to(states[0]["hess"].dtype)
    counts = torch.stack([state["step"] for state in states]).to(states[0]["hess"])
    return gather([count.expand_as(state["hess"]) for count, state in zip(counts, states, strict=True)])


def _offset(bundle: list[_Written]) -> Tensor:
    """σ·ε of a bundle, gathered."""
    noises = dict(noise.normals_like([entry.member.p for entry in bundle], [entry.draw for entry in bundle]))
    perturbation = diagonal.perturbation(
        gather([entry.hess for entry in bundle]),
        gather([noises[i] for i in range(len(bundle))]),
        bundle[0].ess,
        gather_or_number([entry.damping for entry in bundle]),
    )
    return perturbation.mul_(bundle[0].sign)

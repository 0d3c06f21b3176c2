"""Natural-gradient descent with a running average of the Fisher matrix, online and Bayesian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vprop.baselines._online import OnlineMethod, check_finite, check_positive, identity
from vprop.checks import invalid, is_number
from vprop.likelihood import Likelihood
from vprop.precision import in_precision_of

FisherKind = Literal["model", "gradient"]
StepSize = float | Callable[[int], float]

_STEPS = "1 / (t + 1) averages all observations alike, a constant forgets the old ones."


class OnlineNaturalGradient(OnlineMethod):
    r"""Natural-gradient descent on one observation at a time, t = 1, 2, …:

        F ← (1−γₜ)·F + γₜ·I(θ),   θ ← θ − γₜ·F⁻¹·∇[−log p(yₜ|xₜ,θ)]                    (with the new F)

    I(θ) is the Fisher information of the observation: with the labels averaged out (``fisher="model"``), or the
    outer product of the observed gradient (``fisher="gradient"``). F starts as the prior precision, λI. A batch
    counts as one joint observation, its gradients and Fisher matrices summed.

    With the default ``step_size=None``, γₜ = 1/(t+1), and ``fisher="model"`` this *is* the extended Kalman filter
    (Ollivier, 2018): the means are the same and F/γₜ is the inverse of its covariance. ``covariance`` is therefore
    γₜ·F⁻¹, for other steps too, where it belongs to a filter that forgets. ``step_size`` may be a number or a
    function of t, with values in (0, 1].

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> method = OnlineNaturalGradient(model, prior_precision=1.0, likelihood="gaussian", noise_variance=0.5)
    >>> method.update(torch.ones(1, 1), torch.tensor([[3.0]]))
    >>> round(float(method.mean), 12), round(float(method.covariance), 12)
    (2.0, 0.333333333333)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        prior_precision: float,
        likelihood: Likelihood,
        noise_variance: float = 1.0,
        step_size: StepSize | None = None,
        fisher: FisherKind = "model",
        max_parameters: int = 5000,
    ) -> None:
        super().__init__(
            model,
            prior_precision=prior_precision,
            likelihood=likelihood,
            noise_variance=noise_variance,
            max_parameters=max_parameters,
        )
        self._step_size: StepSize = (lambda t: 1 / (t + 1)) if step_size is None else step_size
        self._kind = _checked(fisher)
        _step_at(self._step_size, 1)
        self._last_step = 1.0
        self.fisher = self.prior_precision * identity(self.mean)
        """F, the averaged Fisher matrix."""

    @property
    def covariance(self) -> Tensor:
        """γₜ·F⁻¹; the prior's I/λ before any observation."""
        return self._last_step * torch.cholesky_inverse(_cholesky(self.fisher))

    @torch.no_grad()
    def update(self, x: Any, y: Tensor) -> None:
        """One step on ``y`` observed at ``x``: a batch, its first dimension of any length, taken jointly."""
        seen = self._observe(x, y)
        gradient = seen.gradient()
        step = _step_at(self._step_size, self.observations + 1)
        estimate = seen.fisher() if self._kind == "model" else torch.outer(gradient, gradient)
        fisher = (1 - step) * self.fisher + step * estimate
        mean = self.mean - step * _solve(fisher, gradient)
        check_finite(mean)
        self.fisher, self._last_step = fisher, step
        self._move(mean)


class RegularizedNaturalGradient(OnlineMethod):
    r"""The same for a data set of N examples that is gone through many times, with the prior N(m₀, I/λ) in each step.

    With ĝ the gradient of the mean loss over the batch, δ = λ/N, steps α (``lr``) and β (``step_size``):

        F ← (1−β)·F + β·F̂,   θ ← θ − α·(F + δI)⁻¹(ĝ + δ(θ − m₀))                       (with the new F)

    F̂ is N·ĝĝᵀ for ``fisher="gradient"``, which makes this VONG without sampling, or the mean over the batch of the
    examples' Fisher matrices for ``fisher="model"``, which is free of the bias of ĝĝᵀ. F starts as ``hess_init``·I,
    θ as the model's weights. ``covariance`` is (N·(F + δI))⁻¹. ``prior_mean`` is a number or a flat vector.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: float,
        prior_precision: float,
        likelihood: Likelihood,
        noise_variance: float = 1.0,
        prior_mean: float | Tensor = 0.0,
        lr: float = 0.1,
        step_size: StepSize = 0.001,
        fisher: FisherKind = "gradient",
        hess_init: float = 1.0,
        max_parameters: int = 5000,
    ) -> None:
        super().__init__(
            model,
            prior_precision=prior_precision,
            likelihood=likelihood,
            noise_variance=noise_variance,
            max_parameters=max_parameters,
        )
        check_positive("num_data", num_data, "Pass the number of training examples, e.g. num_data=len(train_set).")
        check_positive("lr", lr, "0.1 is a good first try.")
        check_positive("hess_init", hess_init, "It is the curvature of the mean loss before any data.")
        self.num_data, self.lr, self.damping = float(num_data), float(lr), self.prior_precision / float(num_data)
        self.prior_mean = in_precision_of(prior_mean, self.mean)
        if self.prior_mean.dim() and self.prior_mean.shape != self.mean.shape:
            raise ValueError(
                f"Invalid prior_mean: has shape {tuple(self.prior_mean.shape)}, must be a number or have shape "
                f"{tuple(self.mean.shape)}. Flatten and join the parameters in the order of named_parameters()."
            )
        self._step_size, self._kind = step_size, _checked(fisher)
        _step_at(self._step_size, 1)
        self.fisher = float(hess_init) * identity(self.mean)
        """F, the averaged Fisher matrix of one example."""

    @property
    def covariance(self) -> Tensor:
        """(N·(F + δI))⁻¹."""
        return torch.cholesky_inverse(_cholesky(self._damped(self.fisher))) / self.num_data

    @torch.no_grad()
    def update(self, x: Any, y: Tensor) -> None:
        """One step on a batch, its first dimension of any length."""
        seen = self._observe(x, y)
        gradient = seen.gradient() / seen.examples
        step = _step_at(self._step_size, self.observations + 1)
        if self._kind == "model":
            estimate = seen.fisher() / seen.examples
        else:
            estimate = self.num_data * torch.outer(gradient, gradient)
        fisher = (1 - step) * self.fisher + step * estimate
        pull = self.damping * (self.mean - self.prior_mean)
        mean = self.mean - self.lr * _solve(self._damped(fisher), gradient + pull)
        check_finite(mean)
        self.fisher = fisher
        self._move(mean)

    def _damped(self, fisher: Tensor) -> Tensor:
        return fisher + self.damping * identity(fisher)


def _step_at(step_size: StepSize, t: int) -> float:
    step = step_size(t) if callable(step_size) else step_size
    if not is_number(step) or not 0 < step <= 1:
        raise invalid("step_size", step, "a number in (0, 1], or a function of t = 1, 2, … with such values", _STEPS)
    return float(step)


def _checked(fisher: FisherKind) -> FisherKind:
    if fisher not in get_args(FisherKind):
        raise invalid("fisher", fisher, "'model' or 'gradient'", "'model' averages the labels out exactly.")
    return fisher


def _solve(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector[:, None], _cholesky(matrix))[:, 0]


def _cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise RuntimeError(
            "The averaged Fisher matrix is not positive definite: it is singular, or x or y has NaN. Use smaller "
            "steps, which keep more of its initial value, or a larger prior_precision."
        )
    return factor

"""Vprop: variational inference with the update of RMSprop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from vprop.curvature import CurvatureEstimator, from_gradients
from vprop.optim._arguments import NOT_HYPERPARAMETERS
from vprop.optim.auto_prior import PriorPrecision
from vprop.optim.optimizer import VariationalOptimizer


class Vprop(VariationalOptimizer):
    r"""Diagonal Gaussian variational inference with the cost of RMSprop (Khan et al., 2017).

    The loss ℓ is a mean over the mini-batch; N is ``num_data``, λ ``prior_precision``, m₀ ``prior_mean``, τ
    ``temperature``; ess = N/τ and δ = λ/ess. One step is

        θₖ = μ + εₖ/√(ess·(h+δ)),  εₖ ~ N(0, I)           k = 1…K, K = ``mc_samples`` (K = 0: θ = μ)
        ĝ  = mean over k of ∇ℓ(θₖ)
        ĥ  = ess · mean over k of ∇ℓ(θₖ)²                  plain: Vprop-0, Vprop-1, Vprop-K
             ess · spread over k of ∇ℓ(θₖ)                 ``centered=True``
             M · mean over k of g̃ₖ²                        ``sampled_fisher=True``: g̃ on M labels drawn from the model
        h  ← β₂·h + (1−β₂)·ĥ
        μ  ← μ − lr·(m̂ + δ(μ−m₀))/(h+δ)                    m̂ = ĝ, or its debiased average when β₁ > 0

    and the posterior is q = N(μ, 1/(ess·(h+δ))). In the paper's letters s = N·h, α = lr, β = 1−β₂.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer. All hyperparameters can be
            set per group, except ``mc_samples``, which all groups share.
        lr: step size, a number or a one-element tensor. The step is Newton-like, so 1 is a full step; 0.1 is the
            value to start from.
        num_data: N, how many training examples the mean loss stands for.
        prior_precision: λ of the prior N(m₀, I/λ); or a list of tensors like ``params``, one λ per weight.
        prior_mean: m₀ as a list of tensors like ``params``; ``None`` is 0.
        betas: (β₁, β₂), momentum of the gradient and decay of the curvature.
        mc_samples: K, weight samples per step.
        antithetic: samples 2j and 2j+1 use +ε and −ε.
        centered: take the curvature from the spread of the samples' gradients, which removes the bias of the
            squared mean and of the mini-batch noise. Needs ``mc_samples >= 2``; best with ``antithetic``.
        temperature: τ; 1 is Bayes, below 1 a colder and narrower posterior.
        hess_init: h before the first step, in units of the mean loss's curvature.
        clip_radius: bound on each element of the preconditioned step, before ``lr``.
        seed: key of the noise.
        noise: in a run on several ranks (DistributedDataParallel), ``"shared"`` draws the same sample on all of them,
            and ``"per_rank"`` one of its own on each: more samples for the same work, at the price of one more
            reduction per step and a copy of the weights.
        maximize: the loss is a log-likelihood to maximize.
        foreach: ask for torch's own operations, which run on any device and can be compiled, in place of kernels:
            ``True`` for all parameters of a group as one flat tensor, ``False`` for one at a time. The same result to
            rounding.
        fused: ``True`` asks for kernels that sample and update in one pass over memory, and is an error where there
            are none; ``False`` forbids them; ``None`` takes them where they are, unless ``foreach`` is given. There are
            kernels for float32, bfloat16 and float16 parameters on CUDA (Triton) and CPU.
        capturable: keep the step count on the device, so that a CUDA graph can capture sampling and step.
        sampled_fisher: take the curvature from labels drawn from the model in place of the observed ones, which makes
            it the Fisher; ``step`` then needs a :class:`vprop.Objective`, and each sample costs a second gradient.

    A gradient element that is NaN or infinite is left out: its mean and curvature keep their values, and a
    warning says so (on CPU in that step; on other devices, where looking would stall the queue, when
    :meth:`posterior` or :meth:`state_dict` is called).

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = Vprop([weight], lr=0.5, num_data=100)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = 0.5 * (weight - torch.tensor([1.0, -1.0])).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(200):
    ...     loss = optimizer.step(closure)
    >>> bool((weight - torch.tensor([1.0, -1.0])).abs().max() < 0.3)
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        num_data: float,
        prior_precision: PriorPrecision = 1.0,
        prior_mean: Sequence[Tensor] | None = None,
        betas: tuple[float, float] = (0.0, 0.999),
        mc_samples: int = 1,
        antithetic: bool = False,
        centered: bool = False,
        temperature: float = 1.0,
        hess_init: float = 1.0,
        clip_radius: float = float("inf"),
        seed: int = 0,
        noise: str = "shared",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        sampled_fisher: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in NOT_HYPERPARAMETERS}
        super().__init__(params, defaults)

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        return from_gradients(
            torch.mul,
            centered=group["centered"],
            antithetic=group["antithetic"],
            sampled_fisher=group["sampled_fisher"],
        )

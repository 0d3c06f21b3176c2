"""A floor under the curvature: a bound on σ, the same for all weights or relative to their size in each parameter.

Without data that say otherwise σ grows to the prior's 1/√λ. For one layer of logits that is right; in a network the
weights whose curvature is small are most of them, their noise adds up over layers and drowns the signal. A floor is a
smaller family of Gaussians: σⱼ ≤ r, and inside it the best one has the precision max(ess·(h+δ), 1/r²), which is what a
floor f = 1/(ess·r²) on h+δ makes. Prior and likelihood stay what they are, so that the KL divergence and the ELBO of
the result are those of any Gaussian, and the ELBO is a bound on the evidence as always, if not the tightest.

The bound r is a number, or a share of the root mean square of the parameter's weights: multiplicative noise, in which
the size of a layer that a normalization behind it makes meaningless drops out. It follows the weights slowly, so that
it is looked at in every sixteenth step only; what was seen is part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vprop.parallel.sharding import full_tensor
from vprop.precision import compute_dtype
from vprop.structures.members import GroupStep

STEPS_BETWEEN_LOOKS = 16
LEAST_SIZE = 1e-3
"""Of the weights of a parameter, for a bound on their noise: those that start at zero must be free to leave it."""


def is_relative(step: GroupStep) -> bool:
    """Whether the sizes of the parameters are to be known."""
    return not math.isinf(step.noise_limit)


def size_of(p: Tensor) -> Tensor:
    """The root mean square of a parameter's weights, all of them wherever they lie, as one number."""
    norm = torch.linalg.vector_norm(p.detach(), dtype=compute_dtype(p))
    return full_tensor(norm) / math.sqrt(max(1, p.numel()))


def sizes_of(params: Sequence[Tensor]) -> Tensor:
    """The same of several parameters of one dtype and device, none of them spread over ranks, in a few launches."""
    if compute_dtype(params[0]) != params[0].dtype or torch.compiler.is_compiling():
        return torch.stack([size_of(p) for p in params])
    norms = torch._foreach_norm([p.detach() for p in params])
    return torch.stack(torch._foreach_div(norms, [math.sqrt(max(1, p.numel())) for p in params]))


def floor_of(step: GroupStep, sizes: Tensor | None) -> float | Tensor:
    """f, which h+δ is not below; ``sizes`` of one parameter or of several, where the bound is relative to them."""
    if sizes is None or not is_relative(step):
        return step.hess_floor
    bound = step.noise_limit * sizes.clamp_min(LEAST_SIZE)
    return (step.ess * bound.square()).reciprocal().clamp_min(step.hess_floor)

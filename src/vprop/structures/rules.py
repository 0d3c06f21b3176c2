"""The updates of a diagonal Gaussian that optimizers choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from vprop.functional import diagonal
from vprop.kernels.call import Rule as KernelRule


@dataclass(frozen=True)
class Rule:
    """An update of mean and curvature, from ``functional/diagonal.py``, and what goes with it."""

    function: Callable[..., diagonal.Step]
    kernels: Mapping[str, KernelRule] = field(default_factory=dict)
    """What kernels call it, by what the step divides by, as far as they have it."""
    debiases_hess: bool = False
    """Whether it corrects the average of the curvature for its start, and so needs the step count."""
    averages_pull: bool = False
    """Whether the momentum averages ĝ + δ(μ−m₀), and not ĝ alone."""
    forgets_start: bool = True
    """Whether its average of the curvature can forget its start."""


NATURAL = Rule(
    diagonal.natural_gradient_step,
    {
        "precision": KernelRule.CLAMPED,
        "root": KernelRule.CLAMPED_ROOT,
        "identity": KernelRule.CLAMPED_IDENTITY,
    },
)
RIEMANNIAN = Rule(
    partial(diagonal.natural_gradient_step, riemannian=True),
    {
        "precision": KernelRule.RIEMANNIAN,
        "root": KernelRule.RIEMANNIAN_ROOT,
        "identity": KernelRule.RIEMANNIAN_IDENTITY,
    },
    forgets_start=False,
)
VADAM = Rule(diagonal.vadam_step, {"precision": KernelRule.VADAM}, debiases_hess=True, averages_pull=True)

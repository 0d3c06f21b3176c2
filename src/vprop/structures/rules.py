"""The updates of a diagonal Gaussian that optimizers choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vprop.functional import diagonal
from vprop.kernels.call import Rule as KernelRule


@dataclass(frozen=True)
class Rule:
    """An update of mean and curvature, from ``functional/diagonal.py``, and what goes with it."""

    function: Callable[..., diagonal.Step]
    kernel: KernelRule | None = None
    """What kernels call it; ``None`` if they do not have it."""
    root_kernel: KernelRule | None = None
    """The same where it divides by the root of the curvature."""
    debiases_hess: bool = False
    """Whether it corrects the average of the curvature for its start, and so needs the step count."""
    averages_pull: bool = False
    """Whether the momentum averages ĝ + δ(μ−m₀), and not ĝ alone."""
    forgets_start: bool = True
    """Whether its average of the curvature can forget its start."""


NATURAL = Rule(diagonal.natural_gradient_step, KernelRule.CLAMPED, KernelRule.CLAMPED_ROOT)
RIEMANNIAN = Rule(
    partial(diagonal.natural_gradient_step, riemannian=True),
    KernelRule.RIEMANNIAN,
    KernelRule.RIEMANNIAN_ROOT,
    forgets_start=False,
)
VADAM = Rule(diagonal.vadam_step, KernelRule.VADAM, debiases_hess=True, averages_pull=True)

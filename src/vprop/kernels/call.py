"""What a kernel is asked to do: the numbers of ``functional/diagonal.py``, one object for each kind of pass."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from torch import Tensor

LEAST_PRECISION = 1e-3
"""As in ``functional/diagonal.py``, which lies above; a test holds the two together."""
SMALLEST_SIZE = 1e-8
"""Likewise."""


class Curvature(enum.IntEnum):
    """Where ĥ comes from."""

    SQUARE = 0
    """scale·ĝ²"""
    PRICE = 1
    """ĝ·ε/σ, with the noise generated again"""
    PAIR = 2
    """scale·((ĝ₁−ĝ₂)/2)² of two samples; ĝ is their mean, and the first one is ``Role.OTHER``"""
    GIVEN = 3
    """``Role.OTHER``"""


class Rule(enum.IntEnum):
    """How mean and curvature follow."""

    CLAMPED = 0
    """the natural-gradient step, h not below zero"""
    RIEMANNIAN = 1
    """the natural-gradient step with the term that keeps h+δ positive"""
    VADAM = 2
    CLAMPED_ROOT = 3
    """the first, divided as Adam does: by √(h/M + δ²((μ−m₀)²+σ²))"""
    RIEMANNIAN_ROOT = 4
    """the second, likewise"""
    CLAMPED_IDENTITY = 5
    """the first, divided by nothing, as SGD does"""
    RIEMANNIAN_IDENTITY = 6
    """the second, likewise"""


@dataclass(frozen=True)
class Noise:
    """Which noise, and how wide: θ = μ + sign·ε·σ with σ² = 1/(ess·max(h+δ, f)), f the table's floor of the row."""

    seed: int
    source: int
    """Stream and sample, as one word of the counter."""
    sign: int
    ess: float
    damping: float
    """δ; not read where the table has ``Role.PRIOR_PRECISION``, of which it is λ/ess."""


@dataclass(frozen=True)
class Step:
    """One update of mean and curvature."""

    noise: Noise
    """Of the sample that the gradients were taken at. Its ``ess`` and ``damping`` are those of the update, too."""
    sampled: bool
    """Whether that sample is still in the weights, and has to be taken out."""
    curvature: Curvature
    scale: float
    rule: Rule
    lr: float | Tensor
    betas: tuple[float, float]
    clip_radius: float
    grad_sign: int
    """−1 if the gradients are of a function to be maximized. What is in ``Role.OTHER`` has its sign already."""
    start_weight: float = 1.0
    """What the start of a clamped average of h weighs: 1, as all before the first step; 0, nothing."""
    gradient_scale: float = 1.0
    """M of a root rule."""

    @property
    def clips(self) -> bool:
        """Whether there is a bound on the step."""
        return not math.isinf(self.clip_radius)

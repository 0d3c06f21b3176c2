"""ĥ = ĝ·(θ−μ)/σ²: curvature from the gradient and the noise it was taken at, by Price's theorem. IVON."""

from __future__ import annotations

from torch import Tensor

from vprop.curvature._base import Folded
from vprop.curvature.noise_product import NoiseProduct


class Price(NoiseProduct):
    """The mean over samples of ĝ·ε/σ, for θ = μ + σε.

    Unbiased for E_q[diag ∇²ℓ], also with mini-batches, for any loss that has a second derivative: for a Gaussian q,
    E_q[∇ℓ·(θ−μ)]/σ² = E_q[diag ∇²ℓ]. The price is noise: what the gradient has in common at all samples, its mean
    and the mini-batch's own noise, averages out only slowly. In antithetic pairs it cancels exactly, and
    ĥ = (ĝ₊−ĝ₋)ε/(2σ). Single estimates are negative half of the time where the curvature is small.
    """

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean of ĝε, times 1/σ."""
        assert precision is not None
        return folded.product * precision.sqrt()

"""Mean over samples of ĝ·ε: the gradient of the expected loss in σ, for θ = μ + σε."""

from __future__ import annotations

from torch import Tensor

from vprop.curvature._base import CurvatureEstimator, Evidence, Folded, running_mean


class NoiseProduct(CurvatureEstimator):
    """Unbiased for ∂/∂σ E_q[ℓ] = E_q[ĝε], which is σ·E_q[diag ∇²ℓ] (Price's theorem)."""

    needs_noise = True
    least_samples = 1

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running means of ĝ and ĝε."""
        assert evidence.noise is not None
        return running_mean(folded, evidence.grad, evidence.grad * evidence.noise)

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean of ĝε itself; no curvature until it is divided by σ."""
        return folded.product

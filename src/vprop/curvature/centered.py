"""ĥ = ess·Var_samples[ĝ]: curvature from the spread of the samples' gradients on one mini-batch.

With θ = μ + σε and the same mini-batch, ĝ(θ) = ĝ(μ) + H·σε for a quadratic loss. The squared mean and the
mini-batch's own noise are common to all samples, so they cancel in the spread, and E[ĥⱼ] = ess·Σₖ H²ⱼₖσₖ².
As a matrix (``multiply=torch.outer``) E[Ĥ] = ess·HΣH with Σ the covariance, which is H itself up to λ once Σ is
the inverse of ess·H: centred VONG.
"""

from __future__ import annotations

from torch import Tensor

from vprop.curvature._base import CurvatureEstimator, Evidence, Folded


class SampleSpread(CurvatureEstimator):
    """Independent samples: the unbiased sample variance Σ(ĝₖ−ḡ)²/(K−1), times ess.

    Accumulated as Welford does, because the spread can be many orders smaller than the gradients themselves.
    Unbiased for ess·Var_q[∇ℓ] of the mini-batch, on a quadratic loss ess·Σₖ H²ⱼₖσₖ²; not for the Hessian, but near it
    at the fixed point.
    """

    least_samples = 2

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running mean of ĝ and sum of squared deviations from it."""
        grad = evidence.grad
        if folded is None:
            return Folded(grad, self._nothing(grad))
        folded.count += 1
        deviation = grad - folded.grad
        folded.grad = folded.grad + deviation / folded.count
        folded.product = folded.product + self.multiply(deviation, grad - folded.grad)
        return folded

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """ess times the sample variance."""
        return folded.product * (ess / (folded.count - 1))


class AntitheticSpread(CurvatureEstimator):
    """Antithetic pairs θ± = μ ± σε: the mean over pairs of ((ĝ₊−ĝ₋)/2)², times ess.

    The pair has the same expectation as the sample variance on a quadratic loss, and the terms of the gradient
    that are even in ε (third derivatives) cancel as well.
    """

    least_samples = 2
    in_pairs = True

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running mean of ĝ, and of the squared half-difference whenever a pair is complete."""
        grad = evidence.grad
        if folded is None:
            return Folded(grad, self._nothing(grad), partner=grad)
        folded.count += 1
        folded.grad = folded.grad.lerp(grad, 1 / folded.count)
        if folded.partner is None:
            folded.partner = grad.clone()
            return folded
        half_difference = (folded.partner - grad) / 2
        folded.product = folded.product.lerp(self.multiply(half_difference, half_difference), 2 / folded.count)
        folded.partner = None
        return folded

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """ess times the mean over pairs."""
        return ess * folded.product

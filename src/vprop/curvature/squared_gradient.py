"""ĥ = ess·E_q[ĝ²], the paper's Vprop; M·E_q[ĝ²] on mini-batches of M; without a factor, Vadam."""

from __future__ import annotations

from torch import Tensor

from vprop.curvature._base import CurvatureEstimator, Evidence, Folded, running_mean


class SquaredGradient(CurvatureEstimator):
    """The mean over samples of the squared mini-batch gradient, times ess.

    Unbiased for ess·(E_q[ĝ]² + Var[ĝ]), not for the Hessian: of the variance only the part that the sampling of
    the weights causes carries curvature (for a quadratic loss and independent weights H²σ², so that h ≈ H at the
    fixed point). The squared mean and the mini-batch noise are bias; `vprop.curvature.centered` removes them.

    **Mini-batches.** ĝ is the mean of M gradients of single examples, drawn independently, with mean ḡ and diagonal
    covariance Σ: E[ĝ²] = ḡ² + Σ/M. Near the optimum ḡ ≈ 0, and Σ = E[gᵢ²] − ḡ² is the diagonal of the empirical
    Fisher, which for a model that fits is E[∇²ℓ]. So the mini-batch noise, a bias of the formula above that is N/M
    times too large, is a curvature itself once the factor is M: E[M·ĝ²] = Σ + M·ḡ². With M = N it is the paper's. What
    is left of the bias is M·ḡ², far from the optimum; its variance is that of one squared normal number, 2Σ².
    """

    counts_examples = True

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running means of ĝ and ĝ² (or ĝĝᵀ)."""
        return running_mean(folded, evidence.grad, self.multiply(evidence.grad, evidence.grad))

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean square times ``ess``, or M."""
        return ess * folded.product


class MeanSquare(SquaredGradient):
    """The same without the factor ess: Adam's and Vadam's second moment, unbiased for E[ĝ²]."""

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean square."""
        return folded.product

"""ĥ = ess·E_q[ĝ²]: what RMSprop accumulates, and the paper's Vprop. Without the factor: Vadam."""

from __future__ import annotations

from torch import Tensor

from vprop.curvature._base import CurvatureEstimator, Evidence, Folded, running_mean


class SquaredGradient(CurvatureEstimator):
    """The mean over samples of the squared mini-batch gradient, times ess.

    Unbiased for ess·(E_q[ĝ]² + Var[ĝ]), not for the Hessian: of the variance only the part that the sampling of
    the weights causes carries curvature (for a quadratic loss and independent weights H²σ², so that h ≈ H at the
    fixed point). The squared mean and the mini-batch noise are bias; `vprop.curvature.centered` removes them.
    """

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running means of ĝ and ĝ² (or ĝĝᵀ)."""
        return running_mean(folded, evidence.grad, self.multiply(evidence.grad, evidence.grad))

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """ess times the mean square."""
        return ess * folded.product


class MeanSquare(SquaredGradient):
    """The same without the factor ess: Adam's and Vadam's second moment, unbiased for E[ĝ²]."""

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean square."""
        return folded.product

"""The extended Kalman filter over a model's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vprop.baselines._online import OnlineMethod, check_finite, identity


class ExtendedKalmanFilter(OnlineMethod):
    r"""The weights as a static state θ ~ N(mean, P), one observation at a time, from θ ~ N(current weights, I/λ).

    With ŷ = E[y|x,θ] linearised at the mean, A = ∂ŷ/∂θ and R = Cov[y|x,θ]:

        K = P·Aᵀ(A·P·Aᵀ + R)⁻¹,   θ ← θ + K(y − ŷ),   P ← P − K·A·P

    For an exponential family A = V·J and R = V in terms of the model's output η (:mod:`vprop.baselines._online`),
    so K(y−ŷ) = P·Jᵀ(I + V·J·P·Jᵀ)⁻¹·(∂log p/∂η). Written so, nothing is divided by R, which is singular for a
    categorical likelihood and vanishes for a confident prediction. P is updated in Joseph's form, which keeps it
    positive definite: P ← (I−KA)·P·(I−KA)ᵀ + K·R·Kᵀ.

    For a linear model with Gaussian noise this is the exact posterior. ``likelihood`` is ``"gaussian"`` (outputs
    are means, with ``noise_variance``), ``"bernoulli"`` (a logit for each label 0 or 1) or ``"categorical"``
    (outputs (batch, classes) are logits, labels class numbers).

    One observation y = 3 of a weight with variance 1, noise variance 0.5: the mean goes two thirds of the way.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> ekf = ExtendedKalmanFilter(model, prior_precision=1.0, likelihood="gaussian", noise_variance=0.5)
    >>> ekf.update(torch.ones(1, 1), torch.tensor([[3.0]]))
    >>> float(ekf.mean), round(float(ekf.covariance), 12)
    (2.0, 0.333333333333)
    """

    _covariance: Tensor | None = None

    @property
    def covariance(self) -> Tensor:
        """P, the covariance of the weights."""
        if self._covariance is None:
            self._covariance = identity(self.mean) / self.prior_precision
        return self._covariance

    @torch.no_grad()
    def update(self, x: Any, y: Tensor) -> None:
        """Condition on ``y`` observed at ``x``: a batch, its first dimension of any length, taken jointly."""
        seen = self._observe(x, y)
        cross = self.covariance @ seen.jacobian.T  # P·Jᵀ
        inner = seen.output_fisher @ seen.jacobian @ cross
        inner.diagonal().add_(1)
        gain = torch.linalg.solve(inner, cross, left=False)  # P·Jᵀ(I + V·J·P·Jᵀ)⁻¹
        mean = self.mean + gain @ seen.residual
        check_finite(mean)
        weighted = gain @ seen.output_fisher  # K·R
        covariance = self.covariance - weighted @ cross.T  # (I − K·A)·P
        covariance = covariance - (covariance @ seen.jacobian.T) @ weighted.T + weighted @ gain.T
        self._covariance = (covariance + covariance.T) / 2
        self._move(mean)

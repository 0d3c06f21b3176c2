"""The Gaussian posterior with a full covariance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.posterior import io
from vprop.posterior._base import Posterior
from vprop.posterior.prior import GaussianPrior


class FullPosterior(Posterior):
    """q(θ) = N(μ, P⁻¹), with P over all weights, in the order of the parameters, in float64.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    >>> precision = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> q = FullPosterior(model, {"weight": torch.zeros(1, 2)}, precision, prior, ess=10.0)
    >>> [round(float(value), 4) for value in q.covariance.flatten()]
    [0.6667, -0.3333, -0.3333, 0.6667]
    """

    def __init__(
        self, model: nn.Module, mean: dict[str, Tensor], precision: Tensor, prior: GaussianPrior, **rest: Any
    ) -> None:
        super().__init__(model, mean, prior, **rest)
        self.precision = precision
        self._factor = torch.linalg.cholesky(precision)
        self._covariance: Tensor | None = None

    def __repr__(self) -> str:
        return f"FullPosterior({self.num_parameters} weights in {len(self.mean)} parameters, ess={self.ess})"

    @property
    def covariance(self) -> Tensor:
        """P⁻¹: one matrix over all parameters, in the order of ``mean``, each flattened."""
        if self._covariance is None:
            self._covariance = torch.cholesky_inverse(self._factor)
        return self._covariance

    @property
    def variance(self) -> dict[str, Tensor]:
        """The diagonal of the covariance, by parameter name."""
        return self._by_name(self.covariance.diagonal())

    def _by_name(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([mean.numel() for mean in self.mean.values()])
        return {
            name: piece.reshape(mean.shape).to(mean.dtype)
            for (name, mean), piece in zip(self.mean.items(), pieces, strict=True)
        }

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Tensors like the parameters (or numbers for whole parameters) as one wide vector."""
        device = self.precision.device
        return torch.cat([values[name].to(device).double().expand(m.shape).flatten() for name, m in self.mean.items()])

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        means = list(self.mean.values())
        draws = [
            noise.Draw(seed, number, step=snapshot, sample=sample, stream=noise.Stream.POSTERIOR)
            for number in range(len(means))
        ]
        noises = dict(noise.normals_like(means, draws))
        eps = torch.cat([noises[i].flatten().double() for i in range(len(means))])
        offset = torch.linalg.solve_triangular(self._factor.T, eps.unsqueeze(-1), upper=True).squeeze(-1)
        return {name: self.mean[name] + piece for name, piece in self._by_name(offset).items()}

    def _log_det_precision(self) -> Tensor:
        return 2 * self._factor.diagonal().log().sum()

    @torch.no_grad()
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(weights) = −½(θ−μ)ᵀP(θ−μ) + ½ log|P| − ½D log 2π."""
        self._check_names(weights)
        distance = self._flat(weights) - self._flat(self.mean)
        quadratic = distance @ self.precision @ distance
        constant = self._log_det_precision() - self.num_parameters * math.log(2 * math.pi)
        return (0.5 * (constant - quadratic)).cpu()

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """½D(1 + log 2π) − ½ log|P|."""
        return (0.5 * (self.num_parameters * (1 + math.log(2 * math.pi)) - self._log_det_precision())).cpu()

    @torch.no_grad()
    def kl(self) -> Tensor:
        """½[ tr ΛΣ + (μ−m₀)ᵀΛ(μ−m₀) − D − log|Λ| + log|P| ], Λ the prior's precision."""
        distance = self._flat(self.mean) - self._flat(self.prior.mean)
        if self.prior.precision_matrix is not None:
            prior = self.prior.precision_matrix
            trace, pull = (prior * self.covariance).sum(), distance @ prior @ distance
            log_det = torch.linalg.slogdet(prior).logabsdet
        else:
            precision = self._flat(self.prior.precision)
            if not bool((precision > 0).all()):
                raise ValueError(
                    "The KL divergence to a flat prior is infinite: there are weights with prior_precision 0. Train "
                    "with prior_precision > 0 for a KL or an ELBO."
                )
            trace, pull = precision @ self.covariance.diagonal(), precision @ distance.square()
            log_det = precision.log().sum()
        return (0.5 * (trace + pull - self.num_parameters - log_det + self._log_det_precision())).cpu()

    def as_prior(self) -> dict[str, Any]:
        """``prior_mean`` and ``prior_precision`` (the matrix P) for the next full-covariance optimizer.

        ``VON(model.parameters(), num_data=..., **posterior.as_prior())`` continues from this posterior on new data.
        """
        return {
            "prior_mean": [mean.clone() for mean in self.mean.values()],
            "prior_precision": self.precision.clone(),
        }

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file; :func:`vprop.load_posterior` reads it."""
        matrices = {"precision": self.precision}
        if self.prior.precision_matrix is not None:
            matrices["prior_precision"] = self.prior.precision_matrix
        io.save(self, path, structure="full", extra={"matrix": matrices})

    def _in_order(self, names: list[str]) -> FullPosterior:
        """The same posterior with the parameters, and the rows of its matrices, in another order."""
        starts, start = {}, 0
        for name, mean in self.mean.items():
            starts[name] = torch.arange(start, start + mean.numel(), device=self.precision.device)
            start += mean.numel()
        rows = torch.cat([starts[name] for name in names])
        prior = self.prior
        if prior.precision_matrix is not None:
            prior = prior._replace(precision_matrix=prior.precision_matrix[rows[:, None], rows])
        return FullPosterior(
            self.model,
            {name: self.mean[name] for name in names},
            self.precision[rows[:, None], rows],
            prior,
            ess=self.ess,
            seed=self.seed,
            snapshot=self.snapshot,
            likelihood=self.likelihood,
            noise_variance=self.noise_variance,
            buffers=self.buffers,
        )

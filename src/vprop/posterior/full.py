"""The Gaussian posterior with a full covariance."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vprop.posterior._base import Posterior
from vprop.posterior._columns import columns_of
from vprop.posterior._kept import KEPT, kept_prior, rest_of
from vprop.posterior._shards import total, why
from vprop.posterior.diagonal import DiagonalPosterior, nearest_diagonal
from vprop.posterior.forgetting import lost_positivity
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

    structure = "full"
    correlated = True
    needed_tensors = ("matrix/precision",)

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

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        eps = self._flat(dict(self._noise(seed, sample, snapshot)))
        offset = torch.linalg.solve_triangular(self._factor.T, eps.unsqueeze(-1), upper=True).squeeze(-1)
        return {name: self.mean[name] + piece for name, piece in self._by_name(offset).items()}

    def _times_root(self, jacobian: dict[str, Tensor]) -> list[Tensor]:
        """J·L⁻ᵀ with P = LLᵀ, in float64."""
        parts = [columns_of(jacobian[name], mean) for name, mean in self.mean.items()]
        columns = torch.cat([part.to(self._factor) for part in parts], -1).mT
        return [torch.linalg.solve_triangular(self._factor, columns, upper=False).mT]

    def _restricted(self, names: list[str]) -> FullPosterior:
        """With the inverse of the covariance's block for a precision; so for a prior with correlations."""
        other = cast(FullPosterior, super()._restricted(names))
        rows = self._rows_of(names)
        other._factor = torch.linalg.cholesky(_inverse(self.covariance[rows[:, None], rows]))
        other.precision, other._covariance = other._factor @ other._factor.mT, None
        if self.prior.precision_matrix is not None:
            block = _inverse(_inverse(self.prior.precision_matrix)[rows[:, None], rows])
            diagonal = dict(zip(names, block.diagonal().split([self.mean[n].numel() for n in names]), strict=True))
            precision = {name: part.reshape(self.mean[name].shape) for name, part in diagonal.items()}
            other.prior = GaussianPrior(other.prior.mean, precision, block)
        return other

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

    @torch.no_grad()
    def as_diagonal(self) -> DiagonalPosterior:
        """The diagonal posterior of the least KL divergence from this one: 1/σ² is the diagonal of P.

        So its variances are smaller than those of this one, which are the diagonal of P⁻¹.
        """
        return nearest_diagonal(self, self._by_name(self.precision.diagonal().reciprocal()))

    def as_prior(self) -> dict[str, Any]:
        """``prior_mean`` and ``prior_precision`` (the matrix P) for the next full-covariance optimizer.

        ``VON(model.parameters(), num_data=..., **posterior.as_prior())`` continues from this posterior on new data.
        """
        return {
            "prior_mean": [mean.clone() for mean in self.mean.values()],
            "prior_precision": self.precision.clone(),
        }

    def _with_variance_times(self, scale: float) -> FullPosterior:
        other = copy.copy(self)
        other.precision, other._factor = self.precision / scale, self._factor / math.sqrt(scale)
        other._covariance = None
        return other

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        matrices = {"precision": self.precision}
        if self.prior.precision_matrix is not None:
            matrices["prior_precision"] = self.prior.precision_matrix
        return {"matrix": matrices}

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> FullPosterior:
        matrices = sections["matrix"]
        prior = prior._replace(precision_matrix=matrices.get("prior_precision"))
        return cls(model, mean, matrices["precision"], prior, **rest)

    def _in_order(self, names: list[str]) -> FullPosterior:
        """With the rows of its matrices in that order, too."""
        if list(self.mean) == names:
            return self
        rows = self._rows_of(names)
        other = cast(FullPosterior, super()._in_order(names))
        other.precision = self.precision[rows[:, None], rows]
        other._factor, other._covariance = torch.linalg.cholesky(other.precision), None
        if self.prior.precision_matrix is not None:
            other.prior = self.prior._replace(precision_matrix=self.prior.precision_matrix[rows[:, None], rows])
        return other

    def _rows_of(self, names: list[str]) -> Tensor:
        """The rows of the matrices that belong to these parameters, in this order."""
        starts, start = {}, 0
        for name, mean in self.mean.items():
            starts[name] = torch.arange(start, start + mean.numel(), device=self.precision.device)
            start += mean.numel()
        return torch.cat([starts[name] for name in names])

    # -- merging ---------------------------------------------------------------------------------------------

    def _prior_matrix(self, prior: GaussianPrior) -> Tensor:
        if prior.precision_matrix is not None:
            return prior.precision_matrix.to(self.precision)
        return self._flat(prior.precision).diag()

    @torch.no_grad()
    def _merged(self, shards: Sequence[FullPosterior], prior: GaussianPrior, rest: dict[str, Any]) -> FullPosterior:
        device = self.precision.device
        precisions = [shard.precision.to(device) for shard in shards]
        priors = [self._prior_matrix(shard.prior) for shard in shards]
        whole = self._prior_matrix(prior)
        precision = total(precisions) + (whole - total(priors))
        factor, failed = torch.linalg.cholesky_ex(precision)
        if bool(failed):
            raise self._not_positive_definite(precision, [p - own for p, own in zip(precisions, priors, strict=True)])
        weighted = total([p @ self._flat(shard.mean) for p, shard in zip(precisions, shards, strict=True)])
        counted = total([p @ self._flat(shard.prior.mean) for p, shard in zip(priors, shards, strict=True)])
        shift = weighted + (whole @ self._flat(prior.mean) - counted)
        mean = torch.cholesky_solve(shift.unsqueeze(-1), factor).squeeze(-1)
        return FullPosterior(self.model, self._by_name(mean), precision, prior, **rest)

    def _not_positive_definite(self, precision: Tensor, gained: Sequence[Tensor]) -> ValueError:
        """The error for shards that have no whole; ``gained`` is what each one's data add to the precision."""
        values, vectors = torch.linalg.eigh(precision)
        direction = vectors[:, 0]
        shares = {name: float(part.square().sum()) for name, part in self._by_name(direction).items()}
        less = [i for i, gain in enumerate(gained) if float(direction @ gain @ direction) < 0]
        return ValueError(
            f"The merged precision is not positive definite: its lowest eigenvalue is {float(values[0]):.3g}, in a "
            f"direction that is mostly {max(shares, key=lambda name: shares[name])!r}. {why(less)}"
        )

    # -- sensitivity, forgetting, pruning --------------------------------------------------------------------

    def _covariance_times(self, rows: Tensor) -> Tensor:
        return torch.cholesky_solve(rows.to(self._factor).T, self._factor).T

    def _curvature_of(self, rows: Tensor) -> Tensor:
        return rows.T @ rows

    def _without(self, curvature: Tensor, gradient: Tensor, ess: float) -> FullPosterior:
        precision = self.precision - curvature.to(self.precision)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if bool(failed):
            raise lost_positivity(float(torch.linalg.eigvalsh(precision)[0]), "definite")
        shift = torch.cholesky_solve(gradient.to(precision).unsqueeze(-1), factor).squeeze(-1)
        other = copy.copy(self)
        other.mean = self._by_name(self._flat(self.mean) + shift)
        other.precision, other._factor, other._covariance, other.ess = precision, factor, None, ess
        return other

    def _given_zeros(self, kept: Tensor) -> FullPosterior:
        """N(μₖ + Pₖₖ⁻¹Pₖₚμₚ, Pₖₖ⁻¹): the kept weights move to make up for those that are gone."""
        mean, precision = self._flat(self.mean), self.precision[kept][:, kept]
        pull = self.precision[kept][:, ~kept] @ mean[~kept]
        mean = mean[kept] + torch.cholesky_solve(pull.unsqueeze(-1), torch.linalg.cholesky(precision)).squeeze(-1)
        return FullPosterior(self.model, {KEPT: mean}, precision, kept_prior(self, kept), **rest_of(self))


def _inverse(matrix: Tensor) -> Tensor:
    """Of a symmetric positive definite matrix."""
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))

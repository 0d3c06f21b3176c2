"""The diagonal Gaussian posterior."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.posterior._base import Posterior
from vprop.posterior._columns import columns_of
from vprop.posterior._kept import KEPT, kept_prior, rest_of
from vprop.posterior._shards import not_positive, total, wide
from vprop.posterior.forgetting import lost_positivity
from vprop.posterior.prior import GaussianPrior
from vprop.precision import widest


class DiagonalPosterior(Posterior):
    """q(θ) = N(μ, σ²), independent over weights.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    >>> q = DiagonalPosterior(model, {"weight": torch.zeros(1, 2)}, {"weight": torch.ones(1, 2)}, prior, ess=10.0)
    >>> float(q.kl())
    0.0
    >>> q.sample(seed=3)["weight"].shape
    torch.Size([1, 2])
    """

    structure = "diagonal"
    sections_by_parameter = ("variance",)

    def __init__(
        self,
        model: nn.Module,
        mean: dict[str, Tensor],
        variance: dict[str, Tensor],
        prior: GaussianPrior,
        **rest: Any,
    ) -> None:
        super().__init__(model, mean, prior, **rest)
        self._variance = variance

    def __repr__(self) -> str:
        return f"DiagonalPosterior({self.num_parameters} weights in {len(self.mean)} parameters, ess={self.ess})"

    @property
    def variance(self) -> dict[str, Tensor]:
        """σ² by parameter name."""
        return self._variance

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        weights = dict(self.mean)  # in the order of the model
        for name, eps in self._noise(seed, sample, snapshot):
            weights[name] = self.mean[name] + self._variance[name].sqrt() * eps
        return weights

    def _stacked_draws(self, seed: int, start: int, stop: int) -> dict[str, Tensor]:
        """As the base class has them, but that the draws of a parameter are made together."""
        draws: dict[str, Tensor] = {}
        for number, (name, mean) in enumerate(self.mean.items()):
            address = noise.Draw(seed, number, step=0, stream=noise.Stream.POSTERIOR)
            eps = noise.normals_of_samples(mean, address, range(start, stop))
            draws[name] = mean + self._variance[name].sqrt() * eps
        return self._in_model_dtypes(draws)

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterator[Tensor]:
        """J·σ, parameter by parameter."""
        for name, mean in self.mean.items():
            yield columns_of(jacobian[name].to(mean.dtype) * self._variance[name].sqrt(), mean)

    def _restricted(self, names: list[str]) -> DiagonalPosterior:
        other = cast(DiagonalPosterior, super()._restricted(names))
        other._variance = {name: self._variance[name] for name in names}
        return other

    @torch.no_grad()
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(weights) = −½ Σ [ (θ−μ)²/σ² + log 2πσ² ]."""
        self._check_names(weights)
        terms = []
        for name, mean in self.mean.items():
            variance = self._variance[name]
            terms.append(-0.5 * ((weights[name].to(mean) - mean).square() / variance + (2 * math.pi * variance).log()))
        return _total(terms)

    def entropy(self) -> Tensor:
        """½ Σ log 2πeσ²."""
        return independent_entropy(self._variance)

    def kl(self) -> Tensor:
        """½ Σ [ λσ² + λ(μ−m₀)² − 1 − log λσ² ]."""
        return independent_kl(self.mean, self._variance, self.prior)

    def as_diagonal(self) -> DiagonalPosterior:
        """What it is already: of posteriors with correlations the diagonal that is nearest to them."""
        return copy.copy(self)

    def as_prior(self) -> dict[str, list[Tensor]]:
        """``prior_mean`` and ``prior_precision`` for the next optimizer, in the order of ``mean``.

        ``Vprop(model.parameters(), num_data=..., **posterior.as_prior())`` continues from this posterior on new
        data: with its mean as m₀ and 1/σ² as λ, one per weight.
        """
        return {
            "prior_mean": [mean.clone() for mean in self.mean.values()],
            "prior_precision": [self._variance[name].reciprocal() for name in self.mean],
        }

    def _with_variance_times(self, scale: float) -> DiagonalPosterior:
        other = copy.copy(self)
        other._variance = {name: variance * scale for name, variance in self._variance.items()}
        return other

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        return {"variance": self._variance}

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> DiagonalPosterior:
        return cls(model, mean, sections["variance"], prior, **rest)

    @torch.no_grad()
    def _merged(
        self, shards: Sequence[DiagonalPosterior], prior: GaussianPrior, rest: dict[str, Any]
    ) -> DiagonalPosterior:
        mean, variance = {}, {}
        for name, own_mean in self.mean.items():
            precisions = [wide(shard.variance[name], own_mean).reciprocal() for shard in shards]
            means = [wide(shard.mean[name], own_mean) for shard in shards]
            priors = [wide(shard.prior.precision[name], own_mean) for shard in shards]
            prior_means = [wide(shard.prior.mean[name], own_mean) for shard in shards]
            whole, whole_mean = wide(prior.precision[name], own_mean), wide(prior.mean[name], own_mean)
            precision = total(precisions) + (whole - total(priors))
            if not bool((precision > 0).all()):
                gained = [p - own for p, own in zip(precisions, priors, strict=True)]
                raise not_positive(name, precision, gained)
            weighted = total([p * m for p, m in zip(precisions, means, strict=True)])
            counted = total([p * m for p, m in zip(priors, prior_means, strict=True)])
            mean[name] = ((weighted + (whole * whole_mean - counted)) / precision).to(own_mean.dtype)
            variance[name] = precision.reciprocal().to(self.variance[name].dtype)
        return DiagonalPosterior(self.model, mean, variance, prior, **rest)

    # -- sensitivity, forgetting, pruning --------------------------------------------------------------------

    def _covariance_times(self, rows: Tensor) -> Tensor:
        return rows * self._flat(self._variance).to(rows)

    def _curvature_of(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0)

    def _without(self, curvature: Tensor, gradient: Tensor, ess: float) -> DiagonalPosterior:
        precision = self._flat(self._variance).reciprocal() - curvature
        if not bool((precision > 0).all()):
            raise lost_positivity(float(precision.min()), f"for {int((~(precision > 0)).sum())} weights")
        other = copy.copy(self)
        other.mean = self._by_name(self._flat(self.mean) + gradient / precision)
        variance = self._by_name(precision.reciprocal())
        other._variance = {name: value.to(self._variance[name].dtype) for name, value in variance.items()}
        other.ess = ess
        return other

    def _given_zeros(self, kept: Tensor) -> DiagonalPosterior:
        mean, variance = self._flat(self.mean)[kept], self._flat(self._variance)[kept]
        return DiagonalPosterior(self.model, {KEPT: mean}, {KEPT: variance}, kept_prior(self, kept), **rest_of(self))


@torch.no_grad()
def independent_entropy(variances: Mapping[str, Tensor]) -> Tensor:
    """½ Σ log 2πeσ², of independent weights or directions."""
    return _total([0.5 * (2 * math.pi * math.e * variance).log() for variance in variances.values()])


@torch.no_grad()
def independent_kl(means: Mapping[str, Tensor], variances: Mapping[str, Tensor], prior: GaussianPrior) -> Tensor:
    """½ Σ [ λσ² + λ(μ−m₀)² − 1 − log λσ² ], of independent weights or, for one λ each, directions."""
    terms = []
    for name, mean in means.items():
        precision, distance = prior.precision[name], mean - prior.mean[name]
        if not bool((precision > 0).all()):
            raise ValueError(
                f"The KL divergence to a flat prior is infinite: {name!r} has prior_precision 0. Train with "
                "prior_precision > 0 for a KL or an ELBO."
            )
        scaled = precision * variances[name]
        terms.append(0.5 * (scaled + precision * distance.square() - 1 - scaled.log()))
    return _total(terms)


def nearest_diagonal(posterior: Posterior, variance: Mapping[str, Tensor]) -> DiagonalPosterior:
    """N(μ, 1/diag P) for a posterior N(μ, P⁻¹), given these variances by name.

    Of all diagonal posteriors it has the least KL divergence from the given one. Of a prior with correlations the
    diagonal of the precision is left, too.
    """
    mean = {name: value.clone() for name, value in posterior.mean.items()}
    prior = posterior.prior._replace(precision_matrix=None)
    own = {name: variance[name].clone() for name in mean}
    other = DiagonalPosterior(posterior.model, mean, own, prior, **rest_of(posterior))
    other.head, other.constants = posterior.head, posterior.constants
    return other


def _total(terms: list[Tensor]) -> Tensor:
    """The sum of all elements, in float64 because there may be millions, on the CPU because devices may differ."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for term in terms:
        total += widest(term).sum().cpu()
    return total

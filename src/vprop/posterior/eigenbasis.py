"""The Gaussian posterior that is diagonal in rotated coordinates of each parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vprop.functional import eigenbasis
from vprop.posterior._base import Posterior
from vprop.posterior.diagonal import DiagonalPosterior, _total, independent_entropy, independent_kl, nearest_diagonal
from vprop.posterior.forgetting import lost_positivity
from vprop.posterior.prior import GaussianPrior


class EigenbasisPosterior(Posterior):
    """q(W) = N(μ, ·) with W = μ + Q_L(σ̃⊙ε)Q_Rᵀ for each parameter W, as a matrix, and no correlation between them.

    ``rotated_variance`` is σ̃², in the shape of the parameter; ``left_basis`` and ``right_basis`` hold the bases by
    name, of the sides that have one. See :mod:`vprop.functional.eigenbasis`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    >>> turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    >>> mean, rotated = {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([[4.0, 1.0]])}
    >>> q = EigenbasisPosterior(model, mean, rotated, {}, {"weight": turn}, prior, ess=10.0)
    >>> [[round(float(v), 2) for v in row] for row in q.covariance_of("weight")]
    [[2.08, 1.44], [1.44, 2.92]]
    """

    structure = "eigenbasis"
    sections_by_parameter = ("rotated_variance",)

    def __init__(
        self,
        model: nn.Module,
        mean: dict[str, Tensor],
        rotated_variance: dict[str, Tensor],
        left_basis: dict[str, Tensor],
        right_basis: dict[str, Tensor],
        prior: GaussianPrior,
        **rest: Any,
    ) -> None:
        super().__init__(model, mean, prior, **rest)
        self.rotated_variance = rotated_variance
        self.left_basis, self.right_basis = left_basis, right_basis

    def __repr__(self) -> str:
        return f"EigenbasisPosterior({self.num_parameters} weights in {len(self.mean)} parameters, ess={self.ess})"

    def _bases(self, name: str) -> tuple[eigenbasis.Basis, eigenbasis.Basis]:
        return self.left_basis.get(name), self.right_basis.get(name)

    def _as_matrix(self, name: str, value: Tensor) -> Tensor:
        return value.reshape(eigenbasis.matrix_shape(self.mean[name].shape))

    @property
    def variance(self) -> dict[str, Tensor]:
        """Marginal variances by parameter name: (Q_L⊙Q_L) σ̃² (Q_R⊙Q_R)ᵀ."""
        variances = {}
        for name, rotated in self.rotated_variance.items():
            values = eigenbasis.diagonal_of_rotated_back(self._as_matrix(name, rotated), *self._bases(name))
            variances[name] = values.reshape(rotated.shape)
        return variances

    @torch.no_grad()
    def covariance_of(self, name: str) -> Tensor:
        """The covariance of the weights of one parameter, flattened, in float64: for small parameters only."""
        if name not in self.mean:
            raise ValueError(f"covariance_of(name): there is no parameter {name!r}, must be one of {list(self.mean)}.")
        rotated = self.rotated_variance[name].double()
        sides = []
        for basis, length in zip(self._bases(name), eigenbasis.matrix_shape(rotated.shape), strict=True):
            sides.append(
                torch.eye(length, dtype=torch.float64, device=rotated.device) if basis is None else basis.double()
            )
        directions = torch.kron(*sides)
        return (directions * rotated.flatten()) @ directions.mT

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        weights = dict(self.mean)  # in the order of the model
        for name, eps in self._noise(seed, sample, snapshot):
            scaled = self._as_matrix(name, self.rotated_variance[name].sqrt() * eps)
            weights[name] = self.mean[name] + eigenbasis.rotated_back(scaled, *self._bases(name)).reshape(eps.shape)
        return weights

    def _rotated(self, name: str, value: Tensor) -> Tensor:
        """A tensor like a parameter in rotated coordinates."""
        return eigenbasis.rotated(self._as_matrix(name, value), *self._bases(name)).reshape(value.shape)

    @torch.no_grad()
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(weights) = −½ Σ [ (W̃−μ̃)²/σ̃² + log 2πσ̃² ]: a rotation leaves volumes as they are."""
        self._check_names(weights)
        terms = []
        for name, mean in self.mean.items():
            variance = self.rotated_variance[name]
            distance = self._rotated(name, weights[name].to(mean) - mean)
            terms.append(-0.5 * (distance.square() / variance + (2 * math.pi * variance).log()))
        return _total(terms)

    def entropy(self) -> Tensor:
        """½ Σ log 2πeσ̃²."""
        return independent_entropy(self.rotated_variance)

    def kl(self) -> Tensor:
        """½ Σ [ λσ̃² + λ(μ−m₀)² − 1 − log λσ̃² ]: an isotropic prior is the same in every basis."""
        return independent_kl(self.mean, self.rotated_variance, self.prior)

    @torch.no_grad()
    def as_diagonal(self) -> DiagonalPosterior:
        """The diagonal posterior of the least KL divergence from this one: 1/σ² is the diagonal of the precision."""
        variance = {}
        for name, rotated in self.rotated_variance.items():
            precisions = self._as_matrix(name, rotated.reciprocal())
            diagonal = eigenbasis.diagonal_of_rotated_back(precisions, *self._bases(name))
            variance[name] = diagonal.reciprocal().reshape(rotated.shape)
        return nearest_diagonal(self, variance)

    def as_prior(self) -> dict[str, Any]:
        """Not possible: no optimizer takes a prior that is diagonal in other coordinates than the weights'."""
        raise TypeError(
            "as_prior(): an EigenbasisPosterior has correlations, and no optimizer takes a prior with correlations of "
            "this kind. posterior.as_diagonal().as_prior() leaves them out, for a diagonal optimizer."
        )

    # -- linearised, last layers, calibrated, without some examples --------------------------------------------

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterator[Tensor]:
        """⟨J, Q_L(σ̃⊙ε)Q_Rᵀ⟩ = ⟨Q_Lᵀ J Q_R ⊙ σ̃, ε⟩, parameter by parameter."""
        for name, mean in self.mean.items():
            given = jacobian[name].to(mean.dtype)
            matrices = given.reshape(*given.shape[: given.dim() - mean.dim()], *eigenbasis.matrix_shape(mean.shape))
            rotated = eigenbasis.rotated(matrices, *self._bases(name))
            yield (rotated * self._as_matrix(name, self.rotated_variance[name].sqrt())).flatten(-2)

    def _restricted(self, names: list[str]) -> EigenbasisPosterior:
        other = cast(EigenbasisPosterior, super()._restricted(names))
        other.rotated_variance = {name: self.rotated_variance[name] for name in names}
        other.left_basis = {name: basis for name, basis in self.left_basis.items() if name in names}
        other.right_basis = {name: basis for name, basis in self.right_basis.items() if name in names}
        return other

    def _with_variance_times(self, scale: float) -> EigenbasisPosterior:
        other = copy.copy(self)
        other.rotated_variance = {name: variance * scale for name, variance in self.rotated_variance.items()}
        return other

    def _covariance_times(self, rows: Tensor) -> Tensor:
        variance = self._flat(self.rotated_variance).to(rows)
        return self._all_rotated(self._all_rotated(rows) * variance, back=True)

    def _curvature_of(self, rows: Tensor) -> Tensor:
        """Its diagonal in rotated coordinates, as it is kept of all curvature."""
        return self._all_rotated(rows).square().sum(0)

    def _without(self, curvature: Tensor, gradient: Tensor, ess: float) -> EigenbasisPosterior:
        precision = self._flat(self.rotated_variance).reciprocal() - curvature
        if not bool((precision > 0).all()):
            raise lost_positivity(float(precision.min()), "in all directions")
        rotated = self._all_rotated(gradient.to(precision)[None]) / precision
        shift = self._by_name(self._all_rotated(rotated, back=True)[0])
        other = copy.copy(self)
        other.mean = {name: mean + shift[name].to(mean) for name, mean in self.mean.items()}
        other.rotated_variance, other.ess = self._by_name(precision.reciprocal()), ess
        return other

    def _given_zeros(self, kept: Tensor) -> Posterior:
        raise TypeError(
            "prune(): given that some weights are zero, the others are not independent in the rotated coordinates. "
            "Use posterior.as_diagonal().prune(...), which leaves correlations out."
        )

    def _all_rotated(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Rows (n, weights) into rotated coordinates, or out of them."""
        turn = eigenbasis.rotated_back if back else eigenbasis.rotated
        parts = []
        for (name, mean), piece in zip(
            self.mean.items(), rows.split([mean.numel() for mean in self.mean.values()], -1), strict=True
        ):
            bases = [None if basis is None else basis.to(rows) for basis in self._bases(name)]
            parts.append(turn(piece.reshape(-1, *eigenbasis.matrix_shape(mean.shape)), *bases).flatten(1))
        return torch.cat(parts, -1)

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        return {
            "rotated_variance": self.rotated_variance,
            "left_basis": self.left_basis,
            "right_basis": self.right_basis,
        }

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> EigenbasisPosterior:
        bases = []
        for side, section in enumerate(("left_basis", "right_basis")):
            found = {name: basis.to(mean[name].device) for name, basis in sections.get(section, {}).items()}
            for name, basis in found.items():
                length = eigenbasis.matrix_shape(mean[name].shape)[side]
                if tuple(basis.shape) != (length, length):
                    raise ValueError(
                        f"The file's {section} of {name!r} has shape {tuple(basis.shape)}, must be {(length, length)}. "
                        "It was not written by save(); save the posterior again."
                    )
            bases.append(found)
        return cls(model, mean, sections["rotated_variance"], bases[0], bases[1], prior, **rest)

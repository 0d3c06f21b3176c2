"""One posterior from several that were trained on different parts of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from vprop.checks import is_number
from vprop.likelihood import LikelihoodLike
from vprop.posterior import _shards
from vprop.posterior._base import Posterior
from vprop.posterior._shards import total, wide
from vprop.posterior.prior import GaussianPrior
from vprop.precision import as_tensor, in_precision_of

_AnyPosterior = TypeVar("_AnyPosterior", bound=Posterior)
_CLOSE = 1e-6
"""Relative difference up to which two priors are one: a matrix goes through a division by each shard's ess."""


def merge(
    posteriors: Iterable[_AnyPosterior],
    *,
    prior: Literal["product"] | GaussianPrior | None = None,
    likelihood: LikelihoodLike | None = None,
    noise_variance: float | Tensor | None = None,
) -> _AnyPosterior:
    """The posterior given all data, from posteriors of shards, each trained with ``num_data`` its own size.

    A shard's data say what its posterior N(μₖ, Pₖ⁻¹) has beyond its prior N(mₖ, Λₖ⁻¹). With the prior N(m, Λ⁻¹) of
    the whole,

        P  = Λ + Σₖ (Pₖ − Λₖ)
        Pμ = Λm + Σₖ (Pₖμₖ − Λₖmₖ)

    This is exact where the shards' posteriors are (a linear model with Gaussian noise); the diagonal structure needs
    shards without correlations for that. A network has many equivalent optima: its shards must start from the
    same weights, and stay close enough to mean the same by each weight.

    Args:
        posteriors: of one structure, over the same parameters. The result has their structure, and the model of the
            first. ess is the sum, or ``None`` where one is not known.
        prior: of the whole. ``None``: that of every shard, which must be the same, counted once. ``"product"``:
            each shard was trained with its share of the prior, so Λ = ΣₖΛₖ. A :class:`GaussianPrior`: that one.
        likelihood: of the result, as for :meth:`Posterior.predict`; may be left out where all shards agree.
        noise_variance: of the result, likewise; shards that learned their noise each have another.

    Buffers of floating point (the running statistics of BatchNorm) are averaged with weights ess, counts of batches
    are added up, and other integers must be the same. Posteriors of a last layer (:meth:`Posterior.last_layer`) must
    have the same weights in the other layers.

    >>> import torch
    >>> from vprop.posterior import DiagonalPosterior
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    >>> def shard(mean, precision):
    ...     mean, variance = {"weight": torch.tensor([[mean]])}, {"weight": torch.tensor([[1 / precision]])}
    ...     return DiagonalPosterior(model, mean, variance, prior, ess=10.0)
    >>> whole = merge([shard(1.0, 3.0), shard(2.0, 6.0)])  # P = 3 + 6 − 1, Pμ = 3·1 + 6·2
    >>> float(1 / whole.variance["weight"]), float(whole.mean["weight"]), whole.ess
    (8.0, 1.875, 20.0)
    """
    shards = _shards.checked(posteriors)
    first, whole_prior = shards[0], _prior_of_the_whole(shards, prior)
    rest = {
        "ess": _shards.total_ess(shards),
        "temperature": _shards.agreed_temperature(shards),
        "seed": first.seed,
        "snapshot": first.snapshot,
        "buffers": _shards.merged_buffers(shards),
        **_shards.agreed_likelihood(shards, likelihood, noise_variance),
    }
    merged = cast(_AnyPosterior, first._merged(shards, whole_prior, rest))
    merged.constants = first.constants
    merged.head = first.head if all(shard.head == first.head for shard in shards) else None
    return merged


# -- the prior ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _prior_of_the_whole(shards: Sequence[Posterior], prior: Literal["product"] | GaussianPrior | None) -> GaussianPrior:
    if prior is None:
        for i, shard in enumerate(shards[1:], start=1):
            _check_same_prior(shards[0], shard, i)
        return shards[0].prior
    if isinstance(prior, GaussianPrior):
        return _checked_prior(shards[0], prior)
    if prior != "product":
        raise ValueError(
            f"Invalid prior={prior!r}: must be None (all shards have the same), 'product' (each had its share), or a "
            "GaussianPrior such as posterior.prior."
        )
    matrices = _prior_matrices(shards)
    if matrices is not None:
        return _product_of_matrices(shards, matrices)
    mean, precision = {}, {}
    for name, own_mean in shards[0].mean.items():
        parts = [wide(shard.prior.precision[name], own_mean) for shard in shards]
        means = [wide(shard.prior.mean[name], own_mean) for shard in shards]
        together = total(parts)
        weighted = total([p * m for p, m in zip(parts, means, strict=True)])
        # A flat prior has no mean to speak of: that of the first shard, which nothing depends on.
        mean[name] = torch.where(together > 0, weighted / together, means[0]).to(own_mean.dtype)
        precision[name] = together.to(own_mean.dtype)
    return GaussianPrior(mean, precision)


def _prior_matrices(shards: Sequence[Posterior]) -> list[Tensor] | None:
    """Λ of each shard's prior as a matrix, where one of them has correlations."""
    if all(shard.prior.precision_matrix is None for shard in shards):
        return None
    matrices = [shards[0]._prior_matrix(shard.prior) for shard in shards]
    known = [matrix for matrix in matrices if matrix is not None]
    return known if len(known) == len(shards) else None


def _product_of_matrices(shards: Sequence[Posterior], parts: Sequence[Tensor]) -> GaussianPrior:
    first = shards[0]
    weighted = total([p @ first._flat(shard.prior.mean) for p, shard in zip(parts, shards, strict=True)])
    matrix = total(parts)
    mean = torch.linalg.pinv(matrix, hermitian=True) @ weighted  # 0 along directions in which it is flat
    return GaussianPrior(first._by_name(mean), first._by_name(matrix.diagonal()), matrix)


def _check_same_prior(first: Posterior, shard: Posterior, number: int) -> None:
    for name, own_mean in first.mean.items():
        for kind in ("precision", "mean"):
            mine, other = (wide(getattr(p.prior, kind)[name], own_mean) for p in (first, shard))
            mine, other = torch.broadcast_tensors(mine, other)
            if not torch.allclose(mine, other, rtol=_CLOSE, atol=0.0):
                raise _other_prior(f"{name!r} has another prior {kind}", number)
    matrices = _prior_matrices([first, shard])
    if matrices is not None:
        mine, other = matrices
        if not torch.allclose(mine, other, rtol=_CLOSE, atol=_CLOSE * float(mine.abs().max())):
            raise _other_prior("the matrices of the prior precision differ", number)


def _other_prior(what: str, number: int) -> ValueError:
    return ValueError(
        f"The priors of posteriors 0 and {number} differ: {what}. Train all shards with the same prior, which then "
        "counts once; or pass prior='product' if each shard had its share of it, or a GaussianPrior for another."
    )


def _checked_prior(first: Posterior, prior: GaussianPrior) -> GaussianPrior:
    """Its tensors in the order, and on the devices, of the parameters."""
    mean: dict[str, Tensor] = {}
    precision: dict[str, Tensor] = {}
    for name, own_mean in first.mean.items():
        for kind, checked in (("mean", mean), ("precision", precision)):
            values = getattr(prior, kind)
            value = values.get(name) if isinstance(values, Mapping) else None
            shape = tuple(as_tensor(value).shape) if isinstance(value, Tensor) or is_number(value) else None
            if shape not in ((), tuple(own_mean.shape)):
                raise ValueError(
                    f"Invalid prior: its {kind} of {name!r} has shape {shape}, must be () or {tuple(own_mean.shape)}. "
                    "Give a mean and a precision for every name in posterior.mean."
                )
            checked[name] = in_precision_of(value, own_mean).detach()
            if not bool(torch.isfinite(checked[name]).all()):
                raise ValueError(
                    f"Invalid prior: its {kind} of {name!r} has entries that are NaN or infinite. Mend them."
                )
    _shards.check_prior_precision(precision, "Invalid prior")
    matrix = prior.precision_matrix
    if matrix is not None:
        shape, size = tuple(matrix.shape), first.num_parameters
        taken = first._prior_matrix(prior) if shape == (size, size) else None
        if taken is None:
            raise ValueError(
                f"Invalid prior: its precision_matrix has shape {shape}, must be {(size, size)} for a full and None "
                "for a diagonal posterior. Use GaussianPrior(mean, precision) for a prior without correlations."
            )
        matrix = taken.detach()
    return GaussianPrior(mean, precision, matrix)

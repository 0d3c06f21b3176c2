"""The model under one draw of the weights after the other, as something to call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.posterior.predictive.batch_norm import DrawStatistics, statistics_of
from vprop.posterior.predictive.dropout import DrawMasks, Dropping, masks_of
from vprop.replica import Replica, evaluating_replicas

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


def drawn_models(
    posterior: Posterior,
    num_samples: int,
    seed: int,
    dtype: torch.dtype | None = None,
    batch_norm: Any = None,
    dropout: bool = False,
) -> Iterator[Replica | Dropping]:
    """What ``posterior.sampled_models`` gives; call each before the next."""
    shares = [(own, samples) for own, samples in posterior._shared_out(num_samples, seed) if samples]
    posteriors = [own for own, _ in shares]
    masks = masks_of(posteriors, seed, dropout)
    statistics = statistics_of(posteriors, batch_norm, dtype, masks)
    return chain.from_iterable(
        _with_own(_models_at(own, samples, seed, dtype), samples, of_draws, masks)
        for (own, samples), of_draws in zip(shares, statistics, strict=True)
    )


def _with_own(
    replicas: Iterable[Replica], samples: Iterable[int], statistics: DrawStatistics | None, masks: DrawMasks | None
) -> Iterator[Replica | Dropping]:
    """Each with the statistics of BatchNorm and the masks of its draw, where they are wanted."""
    for replica, sample in zip(replicas, samples, strict=True):
        if statistics is not None:
            statistics.estimated(replica, sample)
        yield replica if masks is None else Dropping(replica, masks.of(sample))


def _models_at(posterior: Posterior, samples: Iterable[int], seed: int, dtype: torch.dtype | None) -> Iterator[Replica]:
    """The model under the draws with these numbers."""
    constants: dict[str, Tensor] = {}
    if dtype is not None:
        parameters = posterior.model.named_parameters()
        constants = {name: p.detach() for name, p in parameters if name not in posterior.mean}
    fixed = {name: _cast(tensor, dtype) for name, tensor in (constants | posterior._fixed()).items()}
    draws = (posterior._in_model_dtypes(posterior._draw(seed, sample)) for sample in samples)
    cast = ({name: _cast(weight, dtype) for name, weight in weights.items()} for weights in draws)
    return evaluating_replicas(posterior.model, fixed, cast)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

"""Checks of what a posterior is asked about."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def check_weights(weights: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
    """Refuse what has not a tensor for each parameter."""
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"log_prob(weights): got {type(weights).__name__}, must be a dict of tensors by the names of "
            "posterior.mean. posterior.sample() gives one; dict(model.named_parameters()) is one."
        )
    missing = sorted(set(mean) - set(weights))
    if missing:
        raise ValueError(f"log_prob(weights): weights lack {missing}. Pass a dict with the names of posterior.mean.")
    for name, own in mean.items():
        value = weights[name]
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != own.shape:
            raise ValueError(f"log_prob(weights): {name!r} has shape {shape}, must have {tuple(own.shape)}.")

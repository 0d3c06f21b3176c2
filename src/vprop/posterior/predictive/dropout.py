"""Draws of the weights that drop out as well: a prediction is then averaged over weights and masks.

Dropout layers of a drawn model are active, all else is in evaluation mode. The masks of a draw come from a generator of
its own (:mod:`vprop.posterior.predictive.masks`), which goes on from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from vprop.posterior.predictive.masks import Masks
from vprop.replica import Replica

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

WHERE = "dropout=True"
"""The argument, in messages."""
DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that do nothing but drop. Others (attention, recurrent ones) have it beside what they are for."""

_PREDICTIONS, _STATISTICS = 0, 1
"""What masks are for: those of a prediction do not depend on whether statistics were estimated before."""


def dropout_layers(model: nn.Module | Replica) -> list[nn.Module]:
    """All of them, also those that drop nothing."""
    return [module for module in model.modules() if isinstance(module, DROPOUT_LAYERS)]


@contextmanager
def dropping(model: nn.Module | Replica, masks: Masks | None) -> Iterator[None]:
    """For a time the dropout layers of ``model``, and they alone, are active, with these masks; none if ``None``."""
    if masks is None:
        yield
        return
    layers = [(layer, layer.training) for layer in dropout_layers(model)]
    try:
        for layer, _ in layers:
            layer.training = True
        with masks:
            yield
    finally:
        for layer, mode in layers:
            layer.training = mode


class DrawMasks:
    """Masks for the draws of one call of ``predict`` or ``sampled_models``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[int, Masks] = {}

    def of(self, sample: int) -> Masks:
        """For predictions with draw number ``sample``: the next batch gets the next ones."""
        if sample not in self._kept:
            self._kept[sample] = Masks(self._seed, sample, _PREDICTIONS)
        return self._kept[sample]

    def for_statistics(self, sample: int) -> Masks:
        """For the estimate of its statistics of BatchNorm."""
        return Masks(self._seed, sample, _STATISTICS)


class Dropping:
    """A model whose dropout layers are active when it is called."""

    def __init__(self, model: nn.Module | Replica, masks: Masks) -> None:
        self._model, self._masks = model, masks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward with the next masks."""
        with dropping(self._model, self._masks):
            return self._model(*args, **kwargs)


def masks_of(posteriors: Iterable[Posterior], seed: int, dropout: bool) -> DrawMasks | None:
    """For draws of these, members of a mixture say; ``None`` without ``dropout``, the argument of ``predict``."""
    if not dropout:
        return None
    for posterior in posteriors:
        _require_dropout(posterior.model)
        if posterior.head is not None:
            raise ValueError(
                f"{WHERE}: the last layer's posterior runs the layers before once for all draws, where each would have "
                "masks of its own. Leave it out, or predict with the posterior of the whole model."
            )
    return DrawMasks(seed)


def _require_dropout(model: nn.Module) -> None:
    if not any(float(getattr(layer, "p", 0)) > 0 for layer in dropout_layers(model)):
        names = ", ".join(f"nn.{kind.__name__}" for kind in DROPOUT_LAYERS[:2])
        raise ValueError(
            f"{WHERE}: {type(model).__name__} has no dropout layer ({names}, …) with p > 0, so there are no masks to "
            "average over. Predict without."
        )

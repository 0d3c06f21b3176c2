"""The hook that lets an attached model see samples."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from vprop.optim._base import VariationalOptimizer


class SampleHook:
    """A forward pre-hook that asks the optimizer for a sample.

    It holds weak references, and copies of it do nothing: a deep copy of an attached model (an average of the
    weights, say) must not write samples into the original's weights, and a pickled model must not drag the
    optimizer along.
    """

    def __init__(self, optimizer: VariationalOptimizer | None = None, model: nn.Module | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else _nothing
        self._model = weakref.ref(model) if model is not None else _nothing

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before the forward of ``module``."""
        optimizer = self._optimizer()
        if optimizer is not None and module is self._model():
            optimizer._before_forward(module.training)

    def __reduce__(self) -> tuple[type[SampleHook], tuple[()]]:
        return SampleHook, ()


def _nothing() -> None:
    return None

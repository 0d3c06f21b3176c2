"""How a model is called with what stands for its inputs, which stay as they were given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from vprop.replica import Replica


def call_model(model: Callable[..., Any], x: Any) -> Any:
    """``model(x)``, with a tuple as positional and a dict as keyword arguments; x stays as it is."""
    args, kwargs = copied(model_arguments(x))
    return model(*args, **kwargs)


@torch.compiler.disable  # it would compile anew for every replica
def call_with_weights(model: nn.Module, weights: Mapping[str, Tensor], x: Any) -> Any:
    """``model(x)`` with other weights and buffers; the model itself is not touched."""
    replica = Replica(model)
    replica.load(weights)
    return call_model(replica, x)


def model_arguments(x: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments that ``x`` stands for."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, tuple | list) and not isinstance(x, PackedSequence):
        return tuple(x), {}
    return (x,), {}


def copied(x: Any) -> Any:
    """The same with copies of its tensors: a model that writes into its inputs changes what the next call would see.

    A tensor that is there twice stays one tensor, as attention that asks whether query and key are the same wants it.
    """
    made: list[tuple[Tensor, Tensor]] = []

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for original, known in made:
            if original is value:
                return known
        made.append((value, _clone(value)))
        return made[-1][1]

    return tree_map(copy, x, is_leaf=_is_packed)


def _clone(value: Tensor) -> Tensor:
    clone = value.clone()
    if type(value) is Tensor and not torch.compiler.is_compiling():  # others keep their data in it
        clone.__dict__.update(value.__dict__)  # what somebody has written onto it
    return clone


class Untouched:
    """Calls a model many times with the same inputs so that they stay as they are, and copies only where it writes.

    The first call in each mode tells whether it does: dropout in place, say, writes in training mode alone. Where a
    later one does so for the first time there is a warning, and copies from then on. A copy that is kept for all calls
    would not do: who writes into inputs between calls (``x.data``, an array of the same memory) means them to change.
    """

    def __init__(self) -> None:
        self._writes: dict[bool, bool] = {}
        """By mode."""

    def __call__(self, model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``model(*args, **kwargs)``."""
        mode = bool(getattr(model, "training", False))  # replicas are in evaluation mode
        compiling = torch.compiler.is_compiling()
        known = self._writes.get(mode)
        if known is not False:
            args, kwargs = copied((args, kwargs))
        if known or compiling:
            return model(*args, **kwargs)
        leaves = tree_leaves((args, kwargs), is_leaf=_is_packed)
        # To watch a tensor of inference mode takes a copy of it, so only the first call is watched.
        seen = Seen(leaves if known is None else [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()])
        output = model(*args, **kwargs)
        self._writes[mode] = seen.is_changed()
        if known is False and self._writes[mode]:
            warnings.warn(
                "The model wrote into its inputs, which it did not when it was first called with them: they are "
                "changed now, and results that come of them may be wrong. Let its forward make a new tensor, x = x * 2 "
                "in the place of x *= 2.",
                RuntimeWarning,
                stacklevel=2,
            )
        return output


class Seen:
    """Tensors as they are now, to be told later whether somebody wrote into them."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        tensors = [value for value in values if isinstance(value, Tensor)]
        # Tensors of inference mode have no version, so they are compared with a copy.
        self._kept = [(t, t.clone() if t.is_inference() else t._version) for t in tensors]

    def is_changed(self) -> bool:
        """Whether any of them was written into, whatever with."""
        return any(_differ(t, kept) if isinstance(kept, Tensor) else t._version != kept for t, kept in self._kept)


def _differ(tensor: Tensor, kept: Tensor) -> bool:
    """Whether they may: torch compares no sparse ones. NaN is what it was."""
    if tensor.layout != torch.strided:
        return True
    return not (torch.equal(tensor, kept) or bool(((tensor == kept) | ((tensor != tensor) & (kept != kept))).all()))


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)

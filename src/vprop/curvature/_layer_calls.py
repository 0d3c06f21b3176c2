"""Which layers a model calls with weights whose gradients are wanted, what goes into them and what comes out.

A layer here is linear in its weight and in its bias, so that all examples' gradients in them follow from two tensors
that an ordinary pass has at hand: what goes into it, a, and the slope of the loss in what comes out, g = ∂ℓ/∂z. For
z = Wa + b the gradient of an example is g·aᵀ in W and g in b, summed over the positions at which it is applied.

Inputs a and slopes g have the examples along their first dimension, and after it the shape one example has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode

Apply = Callable[..., Tensor]
"""What a layer makes of inputs, weight and bias."""


@dataclass
class LayerCall:
    """A call of a layer; weight and bias by name, where their gradients are wanted."""

    function: Any
    """Of torch's."""
    apply: Apply
    shape: torch.Size
    """Of the weight."""
    weight: str | None
    bias: str | None
    inputs: Tensor
    outputs: Tensor
    padding_idx: int | None = None
    """Of an embedding: the row that has no gradient."""

    def weight_rows(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Every example's gradient in the weight."""
        anywhere = slopes.new_zeros(self.shape)  # the slope in a weight is the same at all of its values
        return vmap(lambda a, g: vjp(lambda weight: self.apply(a, weight, None), anywhere)[1](g)[0])(inputs, slopes)

    def bias_rows(self, slopes: Tensor) -> Tensor:
        """Every example's gradient in the bias: Σ over positions of g; spatial dimensions come after the features."""
        features = 1 - len(self.shape)
        return slopes.movedim(features, 1).reshape(len(slopes), slopes.shape[features], -1).sum(2)

    def weight_squares(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """The sum over examples of the squared gradient in the weight; without the gradients where that can be."""
        if self.function is F.embedding:
            return self._embedding_squares(inputs, slopes)
        if self.function is F.linear and inputs[0].numel() == inputs.shape[-1]:  # one position: (g²)ᵀa²
            return slopes.flatten(1).square().T @ inputs.flatten(1).square()
        return self.weight_rows(inputs, slopes).square_().sum(0)

    def _embedding_squares(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Only the rows that an example picked are summed and squared, not a table for each example."""
        rows, features = self.shape
        slopes = slopes.reshape(-1, features)
        if self.padding_idx is not None:
            slopes = slopes.masked_fill(inputs.reshape(-1, 1) == self.padding_idx % rows, 0)
        first = torch.arange(len(inputs), device=inputs.device).unsqueeze(1) * rows
        addresses, places = (first + inputs.reshape(len(inputs), -1)).flatten().unique(return_inverse=True)
        picked = slopes.new_zeros(len(addresses), features).index_add_(0, places, slopes)
        return slopes.new_zeros(rows, features).index_add_(0, addresses % rows, picked.square_())


class NotByLayersError(RuntimeError):
    """Inputs and outputs of the layers do not tell all in this model, or nothing is gained by them."""


class Recorder(TorchFunctionMode):
    """Under ``vmap``, calls layers with the shared ``weights`` in place of an example's ``copies`` of them.

    The calls are written down in ``calls``. ``zero`` is a number of the example's own, with a graph.
    """

    def __init__(
        self, copies: dict[str, Tensor], weights: dict[str, Tensor], zero: Tensor, calls: list[LayerCall]
    ) -> None:
        super().__init__()
        self._names = {id(copy): name for name, copy in copies.items()}
        self._weights = weights
        self._zero = zero
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = _RULES.get(func), kwargs or {}
        outputs = None if rule is None else rule(self, func, *args, **kwargs)
        return func(*args, **kwargs) if outputs is None else outputs

    def call(
        self, func: Any, apply: Apply, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, **more: Any
    ) -> Tensor | None:
        """The layer's outputs; ``None`` if neither weight nor bias is a copy."""
        names = self._names.get(id(weight)), self._names.get(id(bias))
        if names[0] is None and _is_wrapped(weight):
            raise NotByLayersError("a weight that is made of others would be another one for each example, and slow")
        if names == (None, None):
            return None
        shared = [p if name is None else self._weights[name] for p, name in zip((weight, bias), names, strict=True)]
        # The zero makes sure that every example has outputs of its own, and that these are in the graph.
        outputs = apply(inputs, *shared) + self._zero
        if _is_wrapped(get_unwrapped(outputs)):
            raise NotByLayersError("the model differentiates the layer, so that more than its outputs has a slope")
        if torch.is_autocast_enabled(outputs.device.type):
            inputs = inputs.clone()  # autograd keeps a cast of them, so that the model may write over them
        self._calls.append(LayerCall(func, apply, weight.shape, *names, inputs, outputs, **more))
        return outputs.clone()  # over these it may always write


def _is_wrapped(x: Any) -> bool:
    """Whether a tensor takes part in a transformation: an example's tensors in one, constants in none."""
    return isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)


# -- rules: each has the signature of a function of torch's, and returns None where that is to be called as it is ------


def _layer(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *options: Any,
    **named: Any,
) -> Tensor | None:
    return recorder.call(func, lambda a, w, b: func(a, w, b, *options, **named), input, weight, bias)


def _embedding(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None  # these change the weight, or what its gradient is
    return recorder.call(func, lambda a, w, b: func(a, w, padding_idx), input, weight, padding_idx=padding_idx)


def _weight_norm(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> None:
    raise NotByLayersError("a weight is made of others")


def _asked_for_graph(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> None:
    raise NotByLayersError("the model asks whether a tensor requires a gradient, and under vmap alone none seems to")


_LAYERS = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_LAYERS, _layer),
    F.embedding: _embedding,
    torch._weight_norm: _weight_norm,
    **{getattr(Tensor, name).__get__: _asked_for_graph for name in ("requires_grad", "grad_fn")},
}

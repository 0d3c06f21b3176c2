"""Which layers a model calls with weights whose gradients are wanted, what goes into them and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from vprop.curvature._layers import Convolution, Embedding, Layer, Linear, pad_in_numbers


@dataclass
class LayerCall:
    """A call of a layer; weight and bias by name, where their gradients are wanted."""

    layer: Layer
    weight: str | None
    bias: str | None
    inputs: Tensor
    outputs: Tensor


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
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = _RULES.get(func), kwargs or {}
        outputs = None if rule is None else rule(self, func, *args, **kwargs)
        return func(*args, **kwargs) if outputs is None else outputs

    def call(
        self, layer: Layer, func: Callable[..., Tensor], inputs: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor | None:
        """The layer's outputs; ``None`` if neither weight nor bias is a copy."""
        names = self._names.get(id(weight)), self._names.get(id(bias))
        if names[0] is None and _is_wrapped(weight):
            raise NotByLayersError("a weight that is made of others would be another one for each example, and slow")
        if names == (None, None):
            return None
        shared = [p if name is None else self._weights[name] for p, name in zip((weight, bias), names, strict=True)]
        # The zero makes sure that every example has outputs of its own, and that these are in the graph.
        outputs = func(inputs, *shared) + self._zero
        if _is_wrapped(get_unwrapped(outputs)):
            raise NotByLayersError("the model differentiates the layer, so that more than its outputs has a slope")
        if torch.is_autocast_enabled(outputs.device.type):
            inputs = inputs.clone()  # autograd keeps a cast of them, so that the model may write over them
        self._calls.append(LayerCall(layer, *names, inputs, outputs))
        return outputs.clone()  # over these it may always write

    def call_inside(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What a function returns that calls layers itself; ``None`` if it comes back here."""
        if self._inside:
            return None
        self._inside = True
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._inside = False


def _is_wrapped(x: Any) -> bool:
    """Whether a tensor takes part in a transformation: an example's tensors in one, constants in none."""
    return isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)


# -- rules: each has the signature of a function of torch's, and returns None where that is to be called as it is ------


def _linear(recorder: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return recorder.call(Linear(), func, input, weight, bias)


def _convolution(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    shape = tuple(weight.shape)
    input, padding = pad_in_numbers(input, shape[2:], padding, dilation)
    layer, options = Convolution(shape, stride, padding, dilation, groups), (stride, padding, dilation, groups)
    return recorder.call(layer, lambda x, w, b: func(x, w, b, *options), input, weight, bias)


def _transposed_convolution(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    layer = Convolution(tuple(weight.shape), stride, padding, dilation, groups, transposed=True)
    options = (stride, padding, output_padding, groups, dilation)
    return recorder.call(layer, lambda x, w, b: func(x, w, b, *options), input, weight, bias)


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
    layer = Embedding(weight.shape[0], weight.shape[1], padding_idx)
    return recorder.call(layer, lambda x, w, b: func(x, w, padding_idx), input, weight)


def _multi_head_attention(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Any:
    return recorder.call_inside(_OPEN_ATTENTION, *args, **kwargs)


def _dot_product_attention(recorder: Recorder, func: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if query.device.type != "cpu":
        return None
    with sdpa_kernel(SDPBackend.MATH):  # torch's kernel for CPUs takes one example after the other under vmap
        return func(query, *args, **kwargs)


def _weight_norm(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> None:
    raise NotByLayersError("a weight is made of others")


def _asked_for_graph(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> None:
    raise NotByLayersError("the model asks whether a tensor requires a gradient, and under vmap alone none seems to")


def _opened(func: Any) -> Any:
    """A function of torch's that does not hand over to a mode as a whole, so that the mode sees the calls inside."""
    scope = func.__globals__ | {"has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_OPEN_ATTENTION = _opened(F.multi_head_attention_forward)
_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _multi_head_attention,
    F.scaled_dot_product_attention: _dot_product_attention,
    torch._weight_norm: _weight_norm,
    **{getattr(Tensor, name).__get__: _asked_for_graph for name in ("requires_grad", "grad_fn")},
}

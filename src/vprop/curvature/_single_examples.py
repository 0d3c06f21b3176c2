"""Squared gradients of single examples, for any model that ``vmap`` can run on batches of one.

The model runs once for many examples, each alone under ``vmap`` and with a copy of every weight of its own (a view
that takes no memory): what autograd finds for the copies are the examples' gradients, whatever the model does. Where a
copy enters a known layer, though, the shared weight takes its place, so that the layer sees an ordinary batch, and the
gradients come from the layer's inputs and the slopes in its outputs. No model has to be recognised for that: a weight
that is used in other ways as well takes the general way for those, and the parts of its gradient add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from vprop.curvature._layer_calls import LayerCall, NotByLayersError, Recorder
from vprop.curvature._second_derivatives import detached_copies
from vprop.precision import compute_dtype

LossOfOne = Callable[[dict[str, Tensor], Any, Any], tuple[Tensor, Tensor]]
"""The loss of one example and its weight among the others, as a function of weights, input and label."""


class Squares(NamedTuple):
    """What single examples tell: Σᵢ wᵢgᵢ² by parameter name, and losses and weights wᵢ, one for each example."""

    sums: dict[str, Tensor]
    losses: Tensor
    weights: Tensor


def squared_gradients(loss_of_one: LossOfOne, weights: dict[str, Tensor], x: Any, y: Any) -> Squares:
    """Squared gradients in ``weights``, summed over the examples in the tensors of ``x`` and ``y``.

    Some models cannot have a weight per example (``spectral_norm`` in training mode writes what it makes of the weight
    into a buffer) or cannot be had by their layers: those are left to ``torch.func``; and what that cannot run either
    (recurrent layers on a CPU) is differentiated one example after the other. Where a way fails, the model is run
    plainly, on one example, so that an error of its own is raised as it is.
    """
    for way in (_by_layers, _by_transforms):
        try:
            return way(loss_of_one, weights, x, y)
        except NotByLayersError:
            continue
        except torch.OutOfMemoryError:
            raise  # a slower way would only hide that
        except RuntimeError:
            pass  # and out of this block, so that what follows is no error within an error
        loss_of_one(detached_copies(weights), *_example(0, x, y))
    return _one_by_one(loss_of_one, weights, x, y)


def _example(i: int, x: Any, y: Any) -> Any:
    return tree_map(lambda leaf: leaf[i] if isinstance(leaf, Tensor) else leaf, (x, y))


def _one_by_one(loss_of_one: LossOfOne, weights: dict[str, Tensor], x: Any, y: Any) -> Squares:
    examples = next(len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor))
    copies = detached_copies(weights)
    squares = {name: torch.zeros_like(p, dtype=compute_dtype(p)) for name, p in weights.items()}
    losses, shares = [], []
    for i in range(examples):
        loss, share = loss_of_one(copies, *_example(i, x, y))
        grads = torch.autograd.grad(loss, list(copies.values()), materialize_grads=True)
        for square, grad in zip(squares.values(), grads, strict=True):
            square += share * grad.to(square.dtype).square()
        losses.append(loss.detach())
        shares.append(share)
    return Squares(squares, torch.stack(losses), torch.stack(shares))


def _by_transforms(loss_of_one: LossOfOne, weights: dict[str, Tensor], x: Any, y: Any) -> Squares:
    in_dims = (None, *_dims_of_examples(x, y))
    with torch.no_grad():  # what else requires a gradient needs no graph
        differentiated = grad_and_value(loss_of_one, has_aux=True)
        rows, (losses, shares) = vmap(differentiated, in_dims=in_dims, randomness="different")(weights, x, y)
        squares = {name: values.to(compute_dtype(values)).square() for name, values in rows.items()}
        sums = {name: torch.tensordot(shares.to(square), square, dims=1) for name, square in squares.items()}
        return Squares(sums, losses, shares)


@torch.compiler.disable  # the compiler cannot follow a mode that asks which tensors vmap has wrapped
def _by_layers(loss_of_one: LossOfOne, weights: dict[str, Tensor], x: Any, y: Any) -> Squares:
    examples = next(len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor))
    copies = {name: weight.expand(examples, *weight.shape).requires_grad_() for name, weight in weights.items()}
    zeros = torch.zeros(examples, device=next(iter(weights.values())).device, requires_grad=True)
    calls: list[LayerCall] = []

    def run(copies: dict[str, Tensor], x: Any, y: Any, zero: Tensor) -> tuple[Tensor, Tensor, Any, Any]:
        with Recorder(copies, weights, zero, calls):
            loss, share = loss_of_one(copies, x, y)
        return loss, share, [call.inputs for call in calls], [call.outputs for call in calls]

    in_dims = (0, *_dims_of_examples(x, y), 0)
    # torch's attention kernel for CPUs takes one example after the other under vmap, and warns of it.
    with sdpa_kernel(SDPBackend.MATH) if zeros.device.type == "cpu" else nullcontext():
        losses, shares, inputs, outputs = vmap(run, in_dims=in_dims, randomness="different")(copies, x, y, zeros)
    # What vmap returns are the tensors of all examples at once.
    calls = [
        replace(call, inputs=a.detach(), outputs=z)
        for call, a, z in zip(calls, inputs, outputs, strict=True)
        if z.requires_grad  # not in a no_grad() of the model's
    ]
    sums = _sums_of_squares(losses * shares.sqrt(), calls, copies)  # the square has the weight itself
    return Squares(sums, losses.detach(), shares)


def _sums_of_squares(losses: Tensor, calls: list[LayerCall], copies: dict[str, Tensor]) -> dict[str, Tensor]:
    places = [call.outputs for call in calls] + list(copies.values())
    slopes: tuple[Tensor | None, ...] = (None,) * len(places)
    if losses.requires_grad:
        slopes = torch.autograd.grad(losses.sum(), places, allow_unused=True)
    calls_with = defaultdict(list)
    for call, slope in zip(calls, slopes[: len(calls)], strict=True):
        for name in {call.weight, call.bias} - {None}:
            if slope is not None:
                calls_with[name].append((call, slope))
    with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
        return {
            name: _square(name, copy, rows, calls_with[name])
            for (name, copy), rows in zip(copies.items(), slopes[len(calls) :], strict=True)
        }


def _square(name: str, copy: Tensor, rows: Tensor | None, calls: list[tuple[LayerCall, Tensor]]) -> Tensor:
    """The sum over examples of the square of a gradient whose parts are ``rows`` and those from layers."""
    dtype = compute_dtype(copy)
    if rows is None and len(calls) == 1 and calls[0][0].bias != name:
        call, slope = calls[0]
        return call.weight_squares(_in_dtype(call.inputs, dtype), slope.to(dtype))
    parts = [] if rows is None else [rows.to(dtype)]
    for call, slope in calls:
        if call.weight == name:
            parts.append(call.weight_rows(_in_dtype(call.inputs, dtype), slope.to(dtype)))
        if call.bias == name:
            parts.append(call.bias_rows(slope.to(dtype)))
    return sum(parts[1:], parts[0]).square().sum(0) if parts else torch.zeros_like(copy[0], dtype=dtype)


def _in_dtype(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _dims_of_examples(x: Any, y: Any) -> Any:
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, (x, y))

"""Gradients of single examples from what goes into a layer and the slope of the loss in what comes out of it.

In z = Wa + b the gradient of an example is g·aᵀ in W and g in b, with g = ∂ℓ/∂z, summed over the positions at which it
is applied. A convolution is that for patches a, an embedding for one-hot a. So all examples' gradients are products of
two tensors that an ordinary pass has at hand.

Inputs a and slopes g have the examples along their first dimension, and after it the shape one example has alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

_CONVOLUTION_WEIGHT_GRADIENT: dict[int, Any] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
"""By the number of spatial dimensions."""


class Layer(ABC):
    """A function of inputs, a weight and perhaps a bias, linear in both of them."""

    @abstractmethod
    def weight_rows(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Every example's gradient in the weight."""

    @abstractmethod
    def bias_rows(self, slopes: Tensor) -> Tensor:
        """Every example's gradient in the bias."""

    def weight_squares(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """The sum over examples of the squared gradient in the weight."""
        return self.weight_rows(inputs, slopes).square_().sum(0)


class Linear(Layer):
    """``F.linear``, with any dimensions before the features."""

    def weight_rows(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Σ over positions of g·aᵀ."""
        return _by_position(slopes).mT @ _by_position(inputs)

    def bias_rows(self, slopes: Tensor) -> Tensor:
        """Σ over positions of g."""
        return _by_position(slopes).sum(1)

    def weight_squares(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Where there is one position, (g²)ᵀa²: no example's gradient has to be written down."""
        a, g = _by_position(inputs), _by_position(slopes)
        if a.shape[1] != 1:
            return super().weight_squares(inputs, slopes)
        return g[:, 0].square().T @ a[:, 0].square()


@dataclass
class Convolution(Layer):
    """``F.conv1d``, ``F.conv2d``, ``F.conv3d`` and their transposes."""

    shape: tuple[int, ...]
    """Of the weight."""
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    transposed: bool = False

    def weight_rows(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """The gradient of one convolution whose groups of channels are the examples."""
        examples, spatial = len(inputs), len(self.shape) - 2
        if self.transposed:
            inputs, slopes = slopes, inputs  # it is the convolution from its outputs to its inputs, backwards
        rows = _CONVOLUTION_WEIGHT_GRADIENT[spatial](
            _examples_as_channels(inputs, spatial),
            (examples * self.shape[0], *self.shape[1:]),
            _examples_as_channels(slopes, spatial),
            self.stride,
            self.padding,
            self.dilation,
            examples * self.groups,
        )
        return rows.view(examples, *self.shape)

    def bias_rows(self, slopes: Tensor) -> Tensor:
        """Σ over positions of g."""
        return _with_batch(slopes, len(self.shape) - 2).flatten(3).sum((1, 3))


@dataclass
class Embedding(Layer):
    """``F.embedding``: rows of a table, picked by their numbers."""

    rows: int
    features: int
    padding_idx: int | None

    def weight_rows(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """g in the row that was picked."""
        tables = slopes.new_zeros(len(inputs) * self.rows, self.features)
        tables.index_add_(0, self._addresses(inputs), self._counted(inputs, slopes))
        return tables.view(len(inputs), self.rows, self.features)

    def bias_rows(self, slopes: Tensor) -> Tensor:
        """An embedding has none."""
        raise NotImplementedError

    def weight_squares(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Only the rows that an example picked are summed and squared, not a table for each example."""
        addresses, places = self._addresses(inputs).unique(return_inverse=True)
        picked = slopes.new_zeros(len(addresses), self.features)
        picked.index_add_(0, places, self._counted(inputs, slopes))
        return slopes.new_zeros(self.rows, self.features).index_add_(0, addresses % self.rows, picked.square_())

    def _addresses(self, inputs: Tensor) -> Tensor:
        """Which row of which example's table."""
        first = torch.arange(len(inputs), device=inputs.device).unsqueeze(1) * self.rows
        return (first + inputs.reshape(len(inputs), -1)).flatten()

    def _counted(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Slopes by position; the padding has none."""
        slopes = slopes.reshape(-1, self.features)
        if self.padding_idx is None:
            return slopes
        return slopes.masked_fill(inputs.reshape(-1, 1) == self.padding_idx % self.rows, 0)


def pad_in_numbers(x: Tensor, kernel: tuple[int, ...], padding: Any, dilation: Any) -> tuple[Tensor, Any]:
    """Input and padding of a convolution in which the padding is a number and not "same" or "valid"."""
    if not isinstance(padding, str):
        return x, padding
    if padding == "valid":
        return x, 0
    spacings = dilation if isinstance(dilation, tuple | list) else [dilation] * len(kernel)
    totals = [spacing * (size - 1) for spacing, size in zip(spacings, kernel, strict=True)]
    if all(total % 2 == 0 for total in totals):
        return x, tuple(total // 2 for total in totals)
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(x, sides), 0


def _by_position(x: Tensor) -> Tensor:
    """(examples, …, features) → (examples, positions, features)."""
    return x.reshape(len(x), -1, x.shape[-1])


def _with_batch(x: Tensor, spatial: int) -> Tensor:
    """(examples, batch, channels, …), also where an example is a single image without a batch."""
    return x.unsqueeze(1) if x.dim() == spatial + 2 else x


def _examples_as_channels(x: Tensor, spatial: int) -> Tensor:
    """(examples, batch, channels, …) → (batch, examples·channels, …)."""
    x = _with_batch(x, spatial)
    return x.transpose(0, 1).reshape(x.shape[1], -1, *x.shape[3:])

"""Masks of dropout from a generator of one's own: torch's functions draw them from the one that all of Python shares.

While a :class:`Masks` is entered, what this thread calls of ``torch.nn.functional`` to drop something is computed here
instead. Other threads see nothing of it. The values are torch's, for the same random numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SELU_LIMIT = 1.7580993408473766
"""Minus what SELU tends to: alpha dropout puts its negative in the place of what is dropped."""


class Masks(TorchFunctionMode):
    """Masks of one draw: new ones with every call, the same ones after the same numbers.

    There is a generator for each device, seeded with ``numbers`` and the order in which the devices were met.
    """

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = numbers
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, *args, **(kwargs or {}))

    def like(self, x: Tensor, shape: tuple[int, ...] | torch.Size, keep: float) -> Tensor:
        """Ones with probability ``keep`` and zeros, in the precision of ``x``."""
        # Of the same shape also in the same order in memory, so that the product is fast.
        empty = torch.empty_like(x) if tuple(shape) == tuple(x.shape) else x.new_empty(shape)
        return empty.detach().bernoulli_(keep, generator=self._generator(x.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            words = " ".join(str(number) for number in (*self._numbers, len(self._generators)))
            digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
            self._generators[device] = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
        return self._generators[device]


# -- what torch computes, with these masks -----------------------------------------------------------------------------


def _dropout_as(func: Callable[..., Tensor], leading: Callable[[int], int], *, alpha: bool = False) -> Any:
    """``func`` with masks that differ over the first ``leading(dimensions)`` dimensions of its input."""

    def rule(masks: Masks, input: Tensor, p: float = 0.5, training: bool = not alpha, inplace: bool = False) -> Tensor:
        unchanged = func(input, p, False, inplace)  # refuses what torch refuses
        if not training or p == 0 or input.numel() == 0:
            return unchanged
        count = leading(input.dim())
        if p == 1:
            return input.mul_(0) if inplace else input * 0
        mask = masks.like(input, (*input.shape[:count], *[1] * (input.dim() - count)), 1 - p)
        if not alpha:
            mask.div_(1 - p)
            return input.mul_(mask) if inplace else input * mask
        # Mean and variance stay 0 and 1, where the inputs have them.
        scale = 1 / math.sqrt((_SELU_LIMIT**2 * p + 1) * (1 - p))
        shift = (mask - 1).mul_(_SELU_LIMIT * scale).add_(_SELU_LIMIT * scale * p)
        mask.mul_(scale)
        return input.mul_(mask).add_(shift) if inplace else (input * mask).add_(shift)

    return rule


def _attention(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention``: with masks its weights have to be written down, as torch's kernels do not."""
    if dropout_p == 0:
        options: Any = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_choice else scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None:
        weights = weights.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)  # nothing to look at: 0, not NaN
    return _RULES[F.dropout](masks, weights, dropout_p) @ value


_RULES: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout_as(F.dropout, lambda dims: dims),
    # Features are whole channels; which inputs have no dimension of examples is torch's choice.
    F.dropout1d: _dropout_as(F.dropout1d, lambda dims: 1 if dims == 2 else 2),
    F.dropout2d: _dropout_as(F.dropout2d, lambda dims: 2),
    F.dropout3d: _dropout_as(F.dropout3d, lambda dims: 2 if dims == 5 else 1),
    F.alpha_dropout: _dropout_as(F.alpha_dropout, lambda dims: dims, alpha=True),
    F.feature_alpha_dropout: _dropout_as(F.feature_alpha_dropout, lambda dims: 2, alpha=True),
    F.scaled_dot_product_attention: _attention,
}

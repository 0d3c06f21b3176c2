"""Many small tensors handled as one: a torch operation costs the same microseconds on ten elements as on a thousand."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def bundle_limit(device: torch.device) -> int:
    """Elements of a bundle by default: on a CPU they stay in its cache, elsewhere temporaries stay small."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def limit_for(foreach: bool | None, device: torch.device) -> float:
    """Elements of a bundle as the argument ``foreach`` asks: all, one tensor at a time, or bundles of small ones."""
    if foreach is None:
        return bundle_limit(device)
    return math.inf if foreach else 0


def bundles(
    items: Iterable[Item],
    *,
    kind: Callable[[Item], Hashable],
    size: Callable[[Item], int],
    limit: Callable[[Item], float],
) -> Iterator[list[Item]]:
    """Lists of items of one kind, in order, of ``limit`` elements together at most; a larger item is alone.

    >>> list(bundles([3, 5, 9, 2, 4], kind=lambda n: 0, size=lambda n: n, limit=lambda n: 8))
    [[3, 5], [9], [2, 4]]
    """
    waiting: dict[Hashable, list[Item]] = {}
    totals: dict[Hashable, int] = {}
    for item in items:
        key = kind(item)
        if key in waiting and totals[key] + size(item) > limit(item):
            yield waiting.pop(key)
            totals[key] = 0
        waiting.setdefault(key, []).append(item)
        totals[key] = totals.get(key, 0) + size(item)
    yield from waiting.values()


def gather(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor from many; a single tensor stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def gather_or_number(values: Sequence[float | Tensor]) -> float | Tensor:
    """The same for what is a tensor for each parameter, or one number for all of them."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return gather(tensors) if tensors else values[0]


def scatter_(targets: list[Tensor], values: Tensor) -> None:
    """Write back, in place, what was computed on the gathered tensor."""
    if len(targets) == 1:
        targets[0].copy_(values)
    else:
        torch._foreach_copy_(targets, pieces_of(targets, values))


def scatter_add_(targets: list[Tensor], values: Tensor) -> None:
    """Add, in place, what was computed on the gathered tensor."""
    if len(targets) == 1:
        targets[0].add_(values)
    else:
        torch._foreach_add_(targets, pieces_of(targets, values))


def pieces_of(targets: list[Tensor], values: Tensor) -> list[Tensor]:
    """The gathered tensor in pieces of the shapes of ``targets``."""
    if len(targets) == 1:
        return [values]
    pieces = values.split([target.numel() for target in targets])
    return [piece.view(target.shape) for piece, target in zip(pieces, targets, strict=True)]

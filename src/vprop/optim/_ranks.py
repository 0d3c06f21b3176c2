"""Ranks with noise of their own: each folds its own gradients, and what they make of them is averaged.

DistributedDataParallel averages gradients, which is right for the mean and wrong for the curvature: the average of
ĝ² is not the square of the average, and the average of ĝ·ε is not the product of the averages. So the gradients are
noted before they are averaged, every rank makes its own ĥ of them, and ĥ is averaged over ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from vprop.bundles import bundles

BUCKET = 1 << 24
"""Elements that are averaged together."""


def rank_and_count(group: Any = None) -> tuple[int, int]:
    """This process among those that train together: (0, 1) if it is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def has_own_noise(group: dict[str, Any]) -> bool:
    """Whether a parameter group's samples differ from rank to rank."""
    return group.get("noise") == "per_rank" and group["mc_samples"] > 0 and rank_and_count()[1] > 1


class OwnGradients:
    """The gradients of this rank's backward passes, as they are before anybody averages them."""

    def __init__(self) -> None:
        self._grads: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Note the gradients of these parameters from now on."""
        for p in params:
            if p not in self._handles:
                self._handles[p] = p.register_hook(_Note(self, p))

    def add(self, p: Tensor, grad: Tensor) -> None:
        """Take in the gradient of one backward pass; the first one after ``p.grad`` was cleared starts anew."""
        if p.grad is None or p not in self._grads:
            self._grads[p] = grad.detach().clone()
        else:
            self._grads[p].add_(grad.detach())

    def take(self, p: Tensor) -> Tensor | None:
        """The gradient since it was last taken."""
        return self._grads.pop(p, None)

    def clear(self) -> None:
        """Forget all gradients."""
        self._grads.clear()


class _Note:
    """A hook of a parameter. It holds nothing alive: hooks live as long as their parameter."""

    def __init__(self, owner: OwnGradients, p: Tensor) -> None:
        self._owner, self._p = weakref.ref(owner), weakref.ref(p)

    def __call__(self, grad: Tensor) -> None:
        owner, p = self._owner(), self._p()
        if owner is not None and p is not None:
            owner.add(p, grad)


def average_over_ranks(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """The mean over ranks of each tensor. All ranks must call it with tensors of the same shapes."""
    count, result = rank_and_count(group)[1], list(tensors)

    def kind(i: int) -> tuple[Any, ...]:
        return tensors[i].device, tensors[i].dtype

    for bundle in bundles(range(len(tensors)), kind=kind, size=lambda i: tensors[i].numel(), limit=lambda i: BUCKET):
        flat = torch.cat([tensors[i].reshape(-1) for i in bundle])
        dist.all_reduce(flat, group=group)
        for i, piece in zip(bundle, (flat / count).split([tensors[i].numel() for i in bundle]), strict=True):
            result[i] = piece.view(tensors[i].shape)
    return result


def require_averaged(grads: Sequence[Tensor]) -> None:
    """Refuse gradients that nobody has averaged: the means of the ranks would drift apart."""
    total = float(sum(float(grad.sum(dtype=torch.float64)) for grad in grads))
    extremes = torch.tensor([total, -total], dtype=torch.float64, device=grads[0].device)
    if not math.isfinite(total):  # on one rank, perhaps: all must take part in what follows
        extremes.zero_()
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if math.isfinite(total) and float(extremes[0]) != -float(extremes[1]):
        raise RuntimeError(
            'noise="per_rank" needs gradients that are averaged over all ranks of the default process group, but they '
            "differ from rank to rank. Wrap the model in torch.nn.parallel.DistributedDataParallel, and call its "
            "forward (not that of the module inside)."
        )

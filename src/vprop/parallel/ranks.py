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
        self._handles: dict[Tensor, list[RemovableHandle]] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Note the gradients of these parameters from now on."""
        for p in params:
            if p not in self._handles:
                note = _Note(self, p)
                self._handles[p] = [p.register_hook(note.before), p.register_post_accumulate_grad_hook(note.after)]
                for handle in self._handles[p]:
                    weakref.finalize(self, handle.remove)

    def add(self, p: Tensor, grad: Tensor, anew: bool) -> None:
        """Take in the gradient of one backward pass; the first one after ``p.grad`` was cleared starts anew."""
        if anew or p not in self._grads:
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
        self._next: tuple[Tensor, bool] | None = None

    def before(self, grad: Tensor) -> None:
        p = self._p()
        if p is not None:
            self._next = grad, p.grad is None

    def after(self, p: Tensor) -> None:
        """torch.autograd.grad comes to the first hook, too, but adds its gradients to nothing."""
        owner, seen = self._owner(), self._next
        self._next = None
        if owner is not None and seen is not None:
            owner.add(p, *seen)


def mean_so_far(mean: Tensor | None, value: Tensor, count: int) -> Tensor:
    """The mean of ``count`` values, of which this is the last and those that are missing were zero."""
    return value / count if mean is None else mean.lerp(value, 1 / count)


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
    finite = math.isfinite(total)
    numbers = [total, -total, 0.0, 1.0] if finite else [-math.inf, -math.inf, 1.0, 0.0]
    extremes = torch.tensor(numbers, dtype=torch.float64, device=grads[0].device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    high, minus_low, some_bad, some_fine = extremes.tolist()
    if high != -minus_low if not some_bad else some_fine:  # all ranks come to the same conclusion
        raise RuntimeError(
            'noise="per_rank" needs gradients that are averaged over all ranks of the default process group, but they '
            "differ from rank to rank. Wrap the model in torch.nn.parallel.DistributedDataParallel, and call its "
            "forward (not that of the module inside)."
        )

"""Gradients that are there before a closure. They belong to other weights than the sample that it sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vprop.placement import is_spread


class GradientMarks:
    """The gradients at some moment, to see later whether a backward came. They may be freed meanwhile."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._marks = [_mark(p.grad) for p in params]

    def all_same(self) -> bool:
        """Whether they are the same tensors, and nothing was written to them."""
        return all(_has_mark(p.grad, mark) for p, mark in zip(self._params, self._marks, strict=True))


def _mark(grad: Tensor | None) -> tuple[Any, int] | None:
    # The id of a freed gradient may be that of the next one.
    return None if grad is None else (weakref.ref(grad), _writes_to(grad))


def _has_mark(grad: Tensor | None, mark: tuple[Any, int] | None) -> bool:
    if grad is None or mark is None:
        return grad is mark
    return mark[0]() is grad and mark[1] == _writes_to(grad)


def _writes_to(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version


class OldGradient:
    """Sees what a closure does with the gradient that a parameter has before it.

    The number of writes to the gradient does not tell: one can be an addition or a clearing, two a clearing and an
    addition, or an addition and a clipping. So it looks at the moment when something is added, and whether the old
    gradient is still there then.
    """

    def __init__(self, p: Tensor, grad: Tensor) -> None:
        self._p, self._grad, self._version = p, grad, grad._version
        self._is_next = False
        self.was_added_to = False
        self._handles = [p.register_hook(self._before_adding)]

    def is_there(self) -> bool:
        """Whether it still is in ``p.grad``, and is not all zeros."""
        unchanged = self._p.grad is self._grad and self._grad._version == self._version
        return unchanged and bool(self._grad.any())

    def _before_adding(self, new: Tensor) -> None:
        self._is_next = self.is_there()
        if self._is_next:
            # torch.autograd.grad comes here as well, but then adds its gradients to nothing.
            self._handles.append(self._p.register_post_accumulate_grad_hook(self._after_adding))

    def _after_adding(self, p: Tensor) -> None:
        self.was_added_to = self.was_added_to or self._is_next

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()


def refuse_old_gradients(closure: Callable[[], Any], param_groups: Iterable[dict[str, Any]]) -> Any:
    """Call a closure; an error if it adds to gradients that the parameters have, or relies on them.

    Two parameters are watched, the first and the last that have a gradient: hooks on all would cost time.
    """
    watched = _watch(param_groups)
    try:
        result = closure()
    finally:
        for old in watched:
            old.close()
    if any(old.was_added_to for old in watched):
        raise RuntimeError(
            "The closure added its gradients to others that were there before it. Those were not taken at the sample "
            "that step() draws for the closure, so the sum is of no use. Clear the gradients in the closure, with "
            "optimizer.zero_grad(). To accumulate gradients of micro-batches, take all of them at the sample: inside "
            "`with optimizer.sampled_params():`, or after optimizer.attach(model), or in Lightning with "
            "Trainer(callbacks=[vprop.integrations.lightning.PosteriorCallback()])."
        )
    if watched and result is None and all(old.is_there() for old in watched):
        raise RuntimeError(
            "The closure computed neither loss nor gradients, and the gradients that were there before it were not "
            "taken at the sample that step() draws for it. Compute them in the closure. In Lightning's manual "
            "optimization, where step() always comes with a closure: use "
            "Trainer(callbacks=[vprop.integrations.lightning.PosteriorCallback()]) or "
            "`with optimizer.sampled_params():` (mc_samples=1), or pass your own closure to step()."
        )
    return result


def _watch(param_groups: Iterable[dict[str, Any]]) -> list[OldGradient]:
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return []
    params = list(chain.from_iterable(group["params"] for group in param_groups))
    first = next(filter(_has_gradient, params), None)
    last = next(filter(_has_gradient, reversed(params)), None)
    ends = [first] if first is last else [first, last]
    return [OldGradient(p, p.grad) for p in ends if p is not None and p.grad is not None]


def _has_gradient(p: Tensor) -> bool:
    """FSDP adds up the gradients of spread parameters itself, and to look at one would take all ranks."""
    grad = p.grad
    if grad is None or not p.requires_grad or is_spread(p):
        return False
    return grad.layout == torch.strided and not grad.is_inference()

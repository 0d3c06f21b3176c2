"""Gradients that are there before a closure. They belong to other weights than the sample that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop.parallel.sharding import is_sharded

ADDED = (
    "The closure added its gradients to others that were there before it. Those were not taken at the sample "
    "that step() draws for the closure, so the sum is of no use. Clear the gradients in the closure, with "
    "optimizer.zero_grad(). To accumulate gradients of micro-batches, take all of them at the sample: inside "
    "`with optimizer.sampled_params():`, or after optimizer.attach(model), or in Lightning with "
    "Trainer(callbacks=[vprop.integrations.lightning.PosteriorCallback()])."
)
NOTHING_DONE = (
    "The closure computed neither loss nor gradients, and the gradients that were there before it were not "
    "taken at the sample that step() draws for it. Compute them in the closure. In Lightning's manual "
    "optimization, where step() always comes with a closure: use "
    "Trainer(callbacks=[vprop.integrations.lightning.PosteriorCallback()]) or "
    "`with optimizer.sampled_params():` (mc_samples=1), or pass your own closure to step()."
)
NO_BACKWARD = (
    "The closure returned a loss, but no parameter has a gradient. Call loss.backward() in the closure; or pass "
    "vprop.Objective(model, loss_fn, x, y), which does."
)


@dataclass
class ClosureWatch:
    """Sees to it that closures clear the gradients that are there before them, and knows the last one that did.

    A plain object with its own state, as ``LoopState`` is.
    """

    cleared: bool = False
    """Whether the optimizer's ``zero_grad`` was called since the closure began."""
    known: Any = None
    """The code of the last closure, if it is known to call ``zero_grad``."""

    def call(self, closure: Callable[[], Any], params: Sequence[Tensor]) -> Any:
        """Call a closure that must clear the gradients. Until it is known to, and when it has not, it is watched."""
        code = getattr(closure, "__code__", type(closure))
        known, self.known, self.cleared = self.known is code, None, False
        if known:
            kept = _kept_gradients(params)
            result = closure()
            if not self.cleared:
                _refuse_kept(kept, result)
        else:
            result = _watched_call(closure, params)
        self.known = code if self.cleared else None
        if isinstance(result, Tensor) and result.requires_grad and all(p.grad is None for p in params):
            raise RuntimeError(NO_BACKWARD)
        return result


class _OldGradient:
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


Kept = tuple[Tensor, Tensor, int]
"""A parameter, the gradient that it had, and how often that had been written to."""


def _kept_gradients(params: Sequence[Tensor]) -> list[Kept]:
    """The gradients of the first and the last parameter before a closure that is known to clear them."""
    kept = []
    for p in (params[0], params[-1]):
        grad = p.grad
        if type(grad) is Tensor and not grad.is_inference():  # FSDP adds up those of sharded parameters itself
            kept.append((p, grad, grad._version))
    return kept


def _refuse_kept(kept: list[Kept], result: Any) -> None:
    """An error if a closure that did not clear gradients this time added to old ones, or relied on them.

    Another closure can look the same (a decorator makes all of them alike), and clear in a way of its own: gradients
    that are other tensors afterwards are none of the old ones.
    """
    there = [(grad, version) for p, grad, version in kept if p.grad is grad]
    if any(grad._version != version for grad, version in there):
        raise RuntimeError(ADDED)
    if result is None and kept and len(there) == len(kept):
        raise RuntimeError(NOTHING_DONE)


def _watched_call(closure: Callable[[], Any], params: Sequence[Tensor]) -> Any:
    """Call a closure; an error if it adds to gradients that the parameters have, or relies on them.

    For closures that are not known to clear the gradients. Two parameters are watched, the first and the last that
    have a gradient: hooks on all would cost time.
    """
    watched = _watch(params)
    try:
        result = closure()
    finally:
        for old in watched:
            old.close()
    if any(old.was_added_to for old in watched):
        raise RuntimeError(ADDED)
    if watched and result is None and all(old.is_there() for old in watched):
        raise RuntimeError(NOTHING_DONE)
    return result


def _watch(params: Sequence[Tensor]) -> list[_OldGradient]:
    return [_OldGradient(p, p.grad) for p in _ends(params) if p.grad is not None]


def _ends(params: Sequence[Tensor]) -> list[Tensor]:
    """The first and the last parameter that have a gradient."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return []
    first = next(filter(_has_gradient, params), None)
    if first is None:
        return []
    last = next(filter(_has_gradient, reversed(params)), first)
    return [first] if first is last else [first, last]


def _has_gradient(p: Tensor) -> bool:
    """FSDP adds up the gradients of sharded parameters itself, and to look at one would take all ranks."""
    grad = p.grad
    if grad is None or not p.requires_grad or is_sharded(p):
        return False
    return grad.layout == torch.strided and not grad.is_inference()

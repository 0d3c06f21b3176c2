"""What is in the weights: the mean, a sample of the coming step and who holds it, or a draw for evaluation.

Nothing else changes that. Checkpoints are taken between steps, so none of it is optimizer state.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from vprop.structures import GroupStep, Plan, Structure
from vprop.structures.plans import KeptWeights, SetAside

Method = TypeVar("Method", bound=Callable[..., Any])


def at_the_mean(method: Method) -> Method:
    """For methods of an optimizer that read the weights: the mean is in them, and a held sample again afterwards."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._sampling.refuse_inside_sample(f"{method.__name__}()")
        self._sampling.begin_look()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._sampling.end_look()

    return wrapped  # type: ignore[return-value]


class Holder(enum.Enum):
    """Who keeps a sample in the weights, and so who may take it out."""

    CALLER = "a `with optimizer.sampled_params()` block or a running closure: only its end takes the sample out"
    HOOK = "attach() or hold_sample(): the next step() or evaluation-mode forward takes the sample out"


class Sampling:
    """The state of the weights of one optimizer, and how far the samples of the coming step are.

    It holds the structure, which writes samples, and not the optimizer: it outlives that, to put the mean back.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.holder: Holder | None = None
        """``None``: nobody; the mean is in the weights, or the update is about to take the sample out."""
        self.plan: Plan | None = None
        """The sample that is in the weights."""
        self.aside: SetAside | None = None
        """A sample that is out of the weights for a moment, because somebody looks at the mean."""
        self.saved: KeptWeights | None = None
        """What was in the weights before a draw for evaluation."""
        self.held = False
        """Whether the sample was put into the weights by hold_sample(), and belongs there until the step."""
        self.graph_made = False
        """Whether a forward with gradients has seen the sample that a hook put into the weights."""
        self.open_sample: int | None = None
        """The sample whose gradient is, or will be, in ``p.grad``."""
        self.folded_samples = 0
        self.evaluation_draws = 0

    @property
    def drawn_samples(self) -> int:
        """How many samples of the coming step were drawn."""
        return self.folded_samples + (self.open_sample is not None)

    @property
    def is_mean(self) -> bool:
        """Whether the mean is in the weights, and nothing is kept to come back."""
        return self.plan is None and self.saved is None and self.aside is None

    # -- samples in and out ----------------------------------------------------------------------------------

    def write(self, sample: int, evaluation_draw: int | None = None) -> None:
        """Write a sample of the coming step, or a draw for evaluation, into the weights, which hold the mean."""
        # State made here outlives the block that asked for a sample, so it must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self.plan = self.structure.plan(sample, evaluation_draw)
                self.plan.write()
                forget_casts()
            except BaseException:
                self.put_mean_back()
                raise

    @torch.no_grad()
    def put_mean_back(self) -> None:
        """Put the mean back if a sample is in the weights.

        The holder goes first: should an interrupt strike half-way, the next call carries on from there.
        """
        if self.saved is not None:
            self.end_evaluation()
        if self.aside is not None:
            self.end_looks()
        self.holder = None
        if self.plan is not None:
            self.plan.take_out()
            self.plan = None
        self.graph_made = False
        forget_casts()

    def open(self, sample: int, holder: Holder) -> None:
        """Note that a sample of the coming step is in the weights, and who holds it."""
        self.open_sample, self.holder = sample, holder

    def close_folded(self) -> None:
        """Note that the gradient of the open sample is folded."""
        self.folded_samples += 1
        self.open_sample = None

    def begin_evaluation(self, params: Iterable[Tensor]) -> None:
        """Write a draw for evaluation into the weights, which are put back bit for bit afterwards."""
        with torch.inference_mode(False):
            self.saved = KeptWeights(params)
        self.write(0, self.evaluation_draws)
        self.saved.mark()
        self.holder = Holder.CALLER
        self.evaluation_draws += 1

    @torch.no_grad()
    def end_evaluation(self) -> None:
        """Put back, bit for bit, what was in the weights before a draw for evaluation."""
        if self.saved is not None:
            self.holder = None
            with torch.inference_mode(False):
                self.saved.put_back()
            self.saved = self.plan = None
            forget_casts()

    # -- looks at the mean -----------------------------------------------------------------------------------

    def begin_look(self) -> None:
        """Put the mean into the weights for a moment. If they hold a sample, :meth:`end_look` brings it back.

        A graph that was made with the sample can be differentiated afterwards, one that is made meanwhile cannot.
        """
        if self.aside is not None:
            self.aside.looks += 1
        elif self.plan is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.aside = SetAside(self.plan, self.holder)
                self.plan = self.holder = None
                self.aside.take_out()
            forget_casts()

    def end_look(self) -> None:
        """End one look at the mean."""
        if self.aside is not None:
            self.aside.looks -= 1
            if self.aside.looks == 0:
                self.end_looks()

    def end_looks(self) -> None:
        """End all looks, those that an interrupt has left open included."""
        aside = self.aside
        if aside is not None:
            with torch.inference_mode(False), torch.no_grad():
                aside.put_back()
            self.plan, self.holder, self.aside = aside.plan, aside.holder, None
            forget_casts()

    # -- the step --------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Put the mean back, and forget the samples of the coming step."""
        self.put_mean_back()
        self.forget_samples()

    def forget_samples(self) -> None:
        """Start the step over; the mean must be in the weights."""
        self.holder = self.plan = self.aside = self.saved = self.open_sample = None
        self.held = self.graph_made = False
        if self.folded_samples or self.structure.has_folded:
            self.forget_folded()

    def forget_folded(self) -> None:
        """Forget what was folded of this step's samples, but not the open one and its gradients."""
        self.folded_samples = 0
        if self.structure.has_folded:
            self.structure.forget()

    def forget_failed(self) -> None:
        """Forget what was folded of a step that failed; the mean must be in the weights.

        The gradients of its last sample may be folded or not. If it was the only one, it stays open: the step can be
        made once its gradients are in order. Several start over.
        """
        if self.folded_samples:
            self.forget_samples()
        else:
            self.structure.forget()

    def refuse_inside_sample(self, what: str) -> None:
        """An error while a caller holds a sample in the weights."""
        if self.holder is Holder.CALLER:
            raise RuntimeError(
                f"{what} inside an active sample: the weights hold a draw, not the mean. Leave the "
                "`with optimizer.sampled_params()` block (or the closure) first."
            )

    def holds_sample_of(self, params: set[int]) -> bool:
        """Whether the weights hold a sample of some of the parameters with these ids, for a hook."""
        plan = self.plan if self.aside is None else self.aside.plan
        return self.holder is not Holder.CALLER and plan is not None and any(id(p) in params for p in plan.owners())


def forget_casts() -> None:
    """Make autocast cast the weights anew: until its block ends it would use what it cast before they changed."""
    if not torch.compiler.is_compiling():
        torch.clear_autocast_cache()


# -- optimizers that meet ------------------------------------------------------------------------------------------

_lock = threading.Lock()
_with_hooks: weakref.WeakSet[Sampling] = weakref.WeakSet()
"""Those whose samples may stay in the weights after the call that wrote them."""


def note_hooks(sampling: Sampling) -> None:
    """Remember that samples may stay in the weights between two calls."""
    with _lock:
        _with_hooks.add(sampling)


def release_samples(params: Iterable[Tensor]) -> None:
    """Put the mean back wherever another optimizer has left a sample: these parameters get a new one.

    A notebook cell run again builds the new optimizer while the old one still lives.
    """
    with _lock:
        others = list(_with_hooks)
    if others:
        ours = {id(p) for p in params}
        for sampling in others:
            if sampling.holds_sample_of(ours):
                sampling.put_mean_back()


# -- blocks without a backward -------------------------------------------------------------------------------------

Mark = tuple[Tensor, Any, int]
"""A parameter, its gradient if it still lives, and how often that was written to."""


def gradient_marks(groups: list[GroupStep]) -> list[Mark]:
    """What a backward changes: of the first and the last parameter, which is enough to tell a user of a mistake.

    Not to be seen of sharded parameters, whose gradients FSDP may add up later.
    """
    if torch.compiler.is_compiling() or not groups[0].members or not groups[-1].members:
        return []
    marks: list[Mark] = []
    for member in (groups[0].members[0], groups[-1].members[-1]):
        grad = member.p.grad
        if member.local is not member.p:
            continue
        if grad is None:
            marks.append((member.p, None, 0))
        else:  # the id of a freed gradient may be that of the next one, hence a reference
            marks.append((member.p, weakref.ref(grad), 0 if grad.is_inference() else grad._version))
    return marks


def was_idle(marks: list[Mark], groups: list[GroupStep]) -> bool:
    """Whether there was no backward since then, as far as can be told.

    Where others have gradients and those that were looked at have none, the loss may not depend on them.
    """
    if not marks or _backward_came(marks):
        return False
    if any(p.grad is not None for p, _, _ in marks):
        return True
    return all(member.p.grad is None for step in groups for member in step.members)


def _backward_came(marks: list[Mark]) -> bool:
    """Whether gradients have changed since then."""
    for p, reference, version in marks:
        grad = p.grad
        if grad is None and reference is None:
            continue
        if grad is None or reference is None or reference() is not grad:
            return True
        if not grad.is_inference() and grad._version != version:
            return True
    return False

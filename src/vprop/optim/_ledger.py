"""What goes on between two steps. None of it is optimizer state: checkpoints are taken between steps."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vprop.curvature import Folded
from vprop.optim._curvature_matrix import KeptFactor
from vprop.optim._plans import KeptWeights, SetAside
from vprop.parallel.ranks import OwnGradients
from vprop.parallel.seeds import SeedCheck


class Holder(enum.Enum):
    """Who keeps a sample in the weights, and so who may take it out."""

    CALLER = "a `with optimizer.sampled_params()` block or a running closure: only its end takes the sample out"
    HOOK = "attach() or hold_sample(): the next step() or evaluation-mode forward takes the sample out"


@dataclass(eq=False)  # two are never the same, and a set holds them
class Ledger:
    """The samples of the coming step, and what waits to be reported.

    An object of its own rather than attributes of the optimizer, because torch.compile carries out assignments to
    the attributes of a plain object and drops those to the attributes of an optimizer.
    """

    holder: Holder | None = None
    plan: Any = None
    """The structure's :class:`~vprop.optim._plans.Plan` of the sample that is in the weights."""
    aside: SetAside | None = None
    """A sample that is out of the weights for a moment, because somebody looks at the mean."""
    graph_made: bool = False
    """Whether a forward with gradients has seen the sample that a hook put into the weights."""
    saved: KeptWeights | None = None
    """What was in the weights before a draw for evaluation."""
    open_sample: int | None = None
    """The sample whose gradient is, or will be, in ``p.grad``."""
    folded_samples: int = 0
    settings: dict[int, tuple[float, Any]] = field(default_factory=dict)
    """(ess, λ) that the samples were drawn with, by group."""
    folded: dict[Tensor, Any] = field(default_factory=dict)
    """What the structure has folded of the samples before the open one, by parameter."""
    partners: dict[Tensor, Tensor] = field(default_factory=dict)
    """The gradients of the first sample of a pair, which a kernel will read, by parameter."""
    observed: dict[Tensor, Tensor] = field(default_factory=dict)
    """What the curvature estimator saw of the objective at the open sample, by parameter."""
    folded_all: Folded | None = None
    observed_all: Tensor | None = None
    """The same two of all parameters as one vector, for the full structure."""
    factor: KeptFactor | None = None

    own_gradients: OwnGradients = field(default_factory=OwnGradients)
    """Of ranks with noise of their own, by parameter, before they were averaged."""
    shared_gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    shared_gradient: Tensor | None = None
    """The mean over ranks and samples, by parameter or of all of them as one vector."""
    estimates: dict[Tensor, Tensor] = field(default_factory=dict)
    """ĥ of this step, averaged over ranks, by parameter."""
    seed_check: SeedCheck = field(default_factory=SeedCheck)
    ranks_checked: bool = False
    """Whether somebody averages the gradients over the ranks."""

    attached: bool = False
    """Whether the hooks of a model draw the samples."""
    held: bool = False
    """Whether the sample was put into the weights by hold_sample(), and belongs there until the step."""
    captured: list[Any] = field(default_factory=list)
    """What CUDA graphs read: it must live as long as they may run."""

    block_was_idle: bool = False
    """Whether the last `with optimizer.sampled_params():` block ended without a backward."""
    warned_of_repetition: bool = False
    evaluation_draws: int = 0
    snapshots: int = 0
    asked_by_grad_scaler: bool = False
    unusable: dict[torch.device, Tensor] = field(default_factory=dict)
    """Gradient elements left out and not yet reported."""
    clipped: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict)
    """Of the last step, by group: (elements at the clip radius, elements) of each bundle."""

    @property
    def drawn_samples(self) -> int:
        """How many samples of the coming step were drawn."""
        return self.folded_samples + (self.open_sample is not None)

    def next_snapshot(self) -> int:
        """A number for the next posterior object, so that each draws its own samples."""
        self.snapshots += 1
        return self.snapshots

    # -- what is in the weights ------------------------------------------------------------------------------

    @torch.no_grad()
    def put_mean_back(self) -> None:
        """Put the mean back if a sample is in the weights.

        The holder goes first: should an interrupt strike half-way, the next call carries on from there.
        """
        self.end_evaluation()
        self.end_looks()
        self.holder = None
        if self.plan is not None:
            self.plan.take_out()
        self.plan = None
        self.graph_made = False
        forget_casts()

    @torch.no_grad()
    def end_evaluation(self) -> None:
        """Put back, bit for bit, what was in the weights before a draw for evaluation."""
        if self.saved is not None:
            self.holder = None
            with torch.inference_mode(False):
                self.saved.put_back()
            self.saved = self.plan = None
            forget_casts()

    def begin_look(self) -> None:
        """Put the mean into the weights for a moment. If they hold a sample, :meth:`end_look` brings it back.

        Nothing may differentiate through what is computed meanwhile: autograd will not notice that the weights have
        changed, so that a backward through the sample, which may be due, still works.
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

    def holds_sample_of(self, params: set[int]) -> bool:
        """Whether the weights hold a sample of some of the parameters with these ids, for a hook."""
        plan = self.plan if self.aside is None else self.aside.plan
        return self.holder is not Holder.CALLER and plan is not None and any(id(p) in params for p in plan.owners())

    # -- the step --------------------------------------------------------------------------------------------

    def forget_samples(self) -> None:
        """Start the step over."""
        self.holder = self.plan = self.aside = self.saved = self.open_sample = None
        self.graph_made = self.block_was_idle = False
        self.held, self.settings = False, {}
        self.own_gradients.clear()
        self.forget_folded()

    def forget_folded(self) -> None:
        """Forget what was folded of this step's samples, but not the open one and its gradients."""
        self.folded_samples = 0
        self.folded, self.partners, self.observed = {}, {}, {}
        self.folded_all = self.observed_all = self.shared_gradient = None
        self.shared_gradients, self.estimates = {}, {}


def forget_casts() -> None:
    """Make autocast cast the weights anew: until its block ends it would use what it cast before they changed."""
    if not torch.compiler.is_compiling():
        torch.clear_autocast_cache()


# -- optimizers that meet ------------------------------------------------------------------------------------------

_lock = threading.Lock()
_with_hooks: weakref.WeakSet[Ledger] = weakref.WeakSet()
"""Those whose samples may stay in the weights after the call that wrote them."""


def note_hooks(ledger: Ledger) -> None:
    """Remember that samples may stay in the weights between two calls."""
    with _lock:
        _with_hooks.add(ledger)


def release_samples(params: Iterable[Tensor]) -> None:
    """Put the mean back wherever another optimizer has left a sample: these parameters get a new one.

    A notebook cell run again builds the new optimizer while the old one still lives.
    """
    with _lock:
        others = list(_with_hooks)
    if others:
        ours = {id(p) for p in params}
        for ledger in others:
            if ledger.holds_sample_of(ours):
                ledger.put_mean_back()

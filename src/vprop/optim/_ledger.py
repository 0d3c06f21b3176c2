"""What goes on between two steps. None of it is optimizer state: checkpoints are taken between steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vprop.curvature import Folded
from vprop.optim._curvature_matrix import KeptFactor
from vprop.optim._ranks import OwnGradients
from vprop.optim._seeds import SeedCheck


class Holder(enum.Enum):
    """Who keeps a sample in the weights, and so who may take it out."""

    CALLER = "a `with optimizer.sampled_params()` block or a running closure: only its end takes the sample out"
    HOOK = "attach() or hold_sample(): the next step() or evaluation-mode forward takes the sample out"


@dataclass
class Ledger:
    """The samples of the coming step, and what waits to be reported.

    An object of its own rather than attributes of the optimizer, because torch.compile carries out assignments to
    the attributes of a plain object and drops those to the attributes of an optimizer.
    """

    holder: Holder | None = None
    plan: Any = None
    """How to take the active training sample out of the weights."""
    saved: list[tuple[Tensor, Tensor]] | None = None
    """Weights and copies of them, while an evaluation sample is active."""
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
    draws_ahead: bool = False
    """Whether a step may leave the next sample in the weights."""
    next_plan: Any = None
    """How to take out the sample that the update left in the weights."""
    drawn_ahead: bool = False
    """Whether the active sample was left by the last step, and no forward has seen it yet."""
    captured: list[Any] = field(default_factory=list)
    """What CUDA graphs read: it must live as long as they may run."""

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

    def forget_samples(self) -> None:
        """Start the step over."""
        self.holder = self.plan = self.saved = self.open_sample = None
        self.drawn_ahead, self.held, self.settings = False, False, {}
        self.own_gradients.clear()
        self.forget_folded()

    def forget_folded(self) -> None:
        """Forget what was folded of this step's samples, but not the open one and its gradients."""
        self.folded_samples = 0
        self.folded, self.partners, self.observed = {}, {}, {}
        self.folded_all = self.observed_all = self.shared_gradient = None
        self.shared_gradients, self.estimates = {}, {}

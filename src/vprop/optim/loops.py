"""The three training loops: a closure, blocks with a sample in the weights, hooks of a model."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from vprop.checks import check_flag, check_model, invalid
from vprop.help.auto_prior import follow_auto_priors
from vprop.objective import Objective
from vprop.optim import refusals
from vprop.optim.checkpoints import is_asked_for_state
from vprop.optim.closures import mean_result
from vprop.optim.hooks import Attachment, CheckpointGuard, is_attached, is_captured
from vprop.optim.old_gradients import ClosureWatch
from vprop.optim.resolution import Resolution
from vprop.optim.sampling import Holder, Sampling, forget_casts, gradient_marks, note_hooks, was_idle
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.seeds import SeedCheck
from vprop.parallel.sharding import is_sharded
from vprop.structures import GroupStep, Structure


@dataclass
class LoopState:
    """What the loops remember between two calls.

    An object of its own: torch.compile carries out assignments to the attributes of plain objects, and not to those of
    an optimizer.
    """

    attached: bool = False
    """Whether the hooks of a model draw the samples."""
    asked_by_grad_scaler: bool = False
    block_was_idle: bool = False
    """Whether the last `with optimizer.sampled_params():` block ended without a backward."""
    warned_of_repetition: bool = False
    watch: ClosureWatch = field(default_factory=ClosureWatch)
    """Whether closures clear the gradients that are there before them."""


class TrainingLoops(Optimizer):
    """How samples get into the weights while gradients are taken, and the step that follows.

    What a step needs of the groups, and the rest of an optimizer, is in :class:`VariationalOptimizer`.
    """

    _structure: Structure
    _sampling: Sampling
    _resolution: Resolution
    _seed_check: SeedCheck
    _loop: LoopState

    @abstractmethod
    def _prepare(self) -> list[GroupStep]:
        """Decide what the step needs of each group, if that is not decided, and tell the structure."""

    @property
    @abstractmethod
    def mc_samples(self) -> int:
        """Samples per step."""

    @property
    @abstractmethod
    def _params(self) -> list[Tensor]:
        """All parameters."""

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior; returns what the closure returned, if there is one: its mean over the samples.

        A closure may return more than the loss: of tuples, lists and dicts the mean is taken part by part, and of what
        has no mean (a word, tensors of different shapes) the last sample's is returned.

        With a closure, which zeroes the gradients, computes the loss and calls ``backward()``, the optimizer draws
        all samples and calls it once for each (once at the mean if ``mc_samples=0``). Without one, the gradients
        of ``sampled_params()`` blocks or of an attached model are used.
        """
        sampling = self._sampling
        if sampling.holder is Holder.CALLER:
            sampling.refuse_inside_sample("step()")
        if sampling.aside is not None:
            sampling.end_looks()
        if closure is None and sampling.open_sample is None and is_asked_for_state(self):
            self._prepare()
            self._structure.make_state()
            return None
        scaled, self._loop.asked_by_grad_scaler = self._loop.asked_by_grad_scaler, False
        loss, folding = None, False
        try:
            if closure is not None:
                if scaled or not callable(closure):
                    refusals.refuse_no_closure(closure)
                loss = self._evaluate(closure)
                structure = self._structure
            else:
                steps, structure = self._prepare(), self._structure  # which the groups may have changed
                structure.examples = None
                if structure.needs_objective or structure.asks_objective:
                    self._require_no_objective()
                if sampling.drawn_samples < steps[0].samples:
                    refusals.require_samples(steps[0].samples, sampling.drawn_samples, self._loop.attached)
            if self._resolution.several_ranks:
                self._seed_check.compare(self.param_groups)
            folding = True
            structure.fold(sampling.open_sample, sampling.folded_samples)
            structure.update(sampling.plan)
        except BaseException:
            sampling.put_mean_back()
            if folding:
                sampling.forget_failed()
            raise
        sampling.forget_samples()
        self._loop.block_was_idle = False
        forget_casts()
        if structure.follows_priors:
            follow_auto_priors(self)
        if structure.unusable:
            structure.report_unusable(deferred=False)
        return loss

    def _require_no_objective(self) -> None:
        """Refuse a step that gradients alone are not enough for. Its samples go, so that an edit of a group counts."""
        try:
            if self._structure.needs_objective:
                refusals.require_objective(type(self).__name__)
            self._structure.require_batch_sizes()
        except BaseException:
            self._sampling.start_over()
            raise

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure once per sample; returns the mean of what it returned. The last sample stays."""
        sampling = self._sampling
        begun = sampling.open_sample is not None and self._structure.groups[0].samples == 1
        if begun:
            sampling.forget_folded()  # of a step that failed
        elif sampling.drawn_samples or not sampling.is_mean:
            sampling.start_over()
        steps, structure = self._prepare(), self._structure
        losses: list[Any] = []
        try:
            self._look_at(closure)
            for sample in range(max(1, steps[0].samples)):
                self._enter(sample, Holder.CALLER, steps)
                with torch.enable_grad():
                    # If no gradient can have been taken at the sample, there must be none that the closure adds to.
                    fresh = not begun and sample == 0 and steps[0].samples > 0 and not isinstance(closure, Objective)
                    loss = self._loop.watch.call(closure, self._params) if fresh else closure()
                losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
                if structure.needs_objective:
                    structure.observe(closure, sample)  # type: ignore[arg-type]
        except BaseException:
            # A sample that was not finished must not be mistaken for one that was; and an edit of a group must count.
            sampling.start_over()
            raise
        sampling.holder = None
        if len(losses) == 1:
            return losses[0]
        return None if any(loss is None for loss in losses) else mean_result(losses)

    def _look_at(self, closure: Callable[[], Any]) -> None:
        """Tell the structure what the closure says of its batch; refuse one that says too little."""
        structure = self._structure
        if structure.needs_objective and not isinstance(closure, Objective):
            refusals.require_objective(type(self).__name__)
        if isinstance(closure, Objective) and not structure.needs_objective:  # those who need it look closer
            refusals.refuse_sum(closure, self.param_groups[0]["num_data"])
        structure.examples = closure.examples_on_all_ranks() if isinstance(closure, Objective) else None
        structure.most_examples = max(structure.most_examples, structure.examples or 0)
        if structure.asks_objective:
            structure.require_batch_sizes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; between two samples of one step, fold the first one's before."""
        sampling = self._sampling
        waits = sampling.holder is None and sampling.open_sample is not None
        if waits and sampling.drawn_samples < self._structure.groups[0].samples:
            self._fold_open_sample()
        self._loop.asked_by_grad_scaler, self._loop.watch.cleared = False, True
        if self._resolution.several_ranks:
            self._structure.own_gradients.clear()
        super().zero_grad(set_to_none=set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler to unscale the gradients itself; and that it asks tells us that it is at work."""
        steps = self._prepare()
        refusals.refuse_scaling(steps[0].samples, any(step.own_noise for step in steps))
        # If it finds an overflow there will be no step(), and whoever reads the weights then must find the mean.
        self._leave_attached_sample()
        self._loop.asked_by_grad_scaler = True
        return False

    # -- blocks with a sample ---------------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, sample: int = 0, *, train: bool = True) -> Iterator[None]:
        """Weights drawn from the posterior inside the block, the mean after it, also after an exception.

        With ``train=True`` the draw belongs to the coming :meth:`step`: run forward *and* backward inside. For
        ``mc_samples`` K > 1 run a block for each ``sample`` 0…K−1 in turn; with ``mc_samples=0`` the block sees the
        mean. With ``train=False`` the draw is a fresh one for evaluation: the weights come back bit for bit, and
        nothing of the training run changes.
        """
        if self._sampling.holder is Holder.CALLER:
            self._sampling.refuse_inside_sample("sampled_params()")
        if type(train) is not bool or type(sample) is not int:
            check_flag("train", train)
            refusals.require_sample_number(sample)
        if not train:
            with self._active_evaluation(sample):
                yield
            return
        if self._loop.block_was_idle and sample == self._sampling.open_sample and self._structure.groups[0].samples > 0:
            # Told once, to users who expect a new draw each time, as other libraries make it.
            warnings.warn(refusals.REPEATED_BLOCK, UserWarning, stacklevel=3)
            self._loop.warned_of_repetition = True
        with self._active_sample(sample):
            marks = [] if self._loop.warned_of_repetition else gradient_marks(self._structure.groups)
            yield
            self._loop.block_was_idle = was_idle(marks, self._structure.groups)

    @contextmanager
    def _active_sample(self, sample: int) -> Iterator[None]:
        """A sample of the coming step, for a block of code."""
        try:
            self._enter(sample, Holder.CALLER)
            yield
            self._sampling.put_mean_back()
        except BaseException:
            # A sample that was not finished must not be mistaken for one that was.
            self._sampling.start_over()
            raise
        if self._sampling.held:
            self._hold_again()

    def _enter(self, sample: int, holder: Holder, steps: list[GroupStep] | None = None) -> None:
        """Make ``sample`` of the coming step active, after folding the sample before it."""
        sampling = self._sampling
        if sampling.aside is not None:
            sampling.end_looks()
        if sampling.holder is Holder.HOOK and sample == sampling.open_sample:
            sampling.holder = holder  # it is in the weights: taking it out and in again would only round
            return
        if not sampling.is_mean:
            sampling.put_mean_back()
        count = (steps or self._prepare())[0].samples
        if sampling.open_sample is not None and sample == sampling.open_sample + 1 < max(1, count):
            self._fold_open_sample()
        due = sampling.folded_samples if sampling.open_sample is None else sampling.open_sample
        if sample != due:
            refusals.require_due(sample, due, count)
        if count > 0:
            if self._resolution.several_ranks:
                self._structure.watch_own_gradients()
                self._seed_check.leave_note(self.param_groups)
            sampling.write(sample)
        sampling.open(sample, holder)

    def _fold_open_sample(self) -> None:
        """Fold the gradient that lies in ``p.grad`` and clear it for the next sample."""
        sampling = self._sampling
        if all(p.grad is None for p in self._params) and any(p.requires_grad for p in self._params):
            refusals.require_gradient(sampling.open_sample)
        try:
            with torch.no_grad():
                self._structure.fold(sampling.open_sample, sampling.folded_samples)
        except BaseException:
            sampling.start_over()
            raise
        sampling.close_folded()
        super().zero_grad(set_to_none=True)

    @contextmanager
    def _active_evaluation(self, sample: int) -> Iterator[None]:
        """A draw for evaluation, for a block of code."""
        if sample != 0:
            raise invalid("sample", sample, "left out with train=False", "Every evaluation block draws afresh.")
        self._make_room_for_evaluation("sampled_params(train=False)")
        try:
            self._prepare()
            self._sampling.begin_evaluation(self._params)
            yield
            self._sampling.end_evaluation()
        finally:
            self._sampling.end_evaluation()  # once more, should an interrupt have come in its way
            self._sampling.end_look()
            self._hold_again()

    def _make_room_for_evaluation(self, what: str) -> None:
        """Put the mean into the weights, for a forward in evaluation mode, say.

        A sample that a hook holds comes back afterwards. Once a backward has been through it, and gradients of the
        evaluation may be wanted, it is taken out for good instead: :meth:`step` does not need it in the weights.
        """
        backward_is_due = self._sampling.graph_made and all(p.grad is None for p in self._params)
        if torch.is_grad_enabled() and not backward_is_due:
            self._sampling.put_mean_back()
            return
        if torch.is_grad_enabled() and any(is_sharded(p) for p in self._params):
            refusals.refuse_sharded_evaluation(what)
        self._sampling.begin_look()

    def hold_sample(self) -> None:
        """Put the sample of the coming :meth:`step` into the weights, where it stays until then.

        For training loops that call back, at the start of a batch say, rather than let themselves be wrapped. All
        gradients until :meth:`step` are then taken at this sample, those of the micro-batches of an accumulated batch
        too; a closure that :meth:`step` is given sees it as well, and may add to them. Held already, it stays as it
        is. :meth:`release_sample` takes it out for a while (for a validation), :meth:`discard_samples` for good.
        """
        self._sampling.refuse_inside_sample("hold_sample()")
        self._require_one_sample("hold_sample()")
        note_hooks(self._sampling)
        if self._sampling.holder is None:
            self._enter(0, Holder.HOOK)
        self._sampling.held = True

    def _hold_again(self) -> None:
        """Put a sample back that is held, after something that needed the mean."""
        if self._sampling.held and self._sampling.holder is None:
            self._enter(0, Holder.HOOK)

    def release_sample(self) -> None:
        """Put the mean back. The sample remains that of the coming step: :meth:`hold_sample` brings it back."""
        self._sampling.refuse_inside_sample("release_sample()")
        self._sampling.held = False
        self._sampling.put_mean_back()

    def discard_samples(self) -> None:
        """Forget the samples drawn for the coming step, for a batch that is given up half-way."""
        self._sampling.refuse_inside_sample("discard_samples()")
        self._sampling.start_over()
        self._structure.own_gradients.clear()

    def _require_one_sample(self, what: str) -> None:
        if self.mc_samples > 1:
            remedy = "Pass a closure to step() for more samples."
            raise invalid("mc_samples", self.mc_samples, f"0 or 1 with {what}", remedy)

    # -- attached models --------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Attachment:
        """Sample in a training loop that is not yours to change.

        From now on a forward of ``model`` in training mode sees a sample, the same one until the next
        :meth:`step`; a forward in evaluation mode sees the mean, and so do ``state_dict()`` and
        ``load_state_dict()`` of the model. Returns a handle whose ``remove()`` detaches. An optimizer that was
        attached to the model before is detached, if it has parameters in common with this one.

        A loop makes one forward and one backward in a step, so there is one sample: ``mc_samples`` must be 1 (or 0, the
        mean). For more, pass a closure to :meth:`step`, which calls it once per sample.

        Between a forward and :meth:`step` the weights hold the sample. After an interrupt there,
        :meth:`discard_samples` puts the mean back; so does the end of the optimizer's life. Gradients of an evaluation
        between a forward and its backward cannot be had: use ``torch.no_grad()``.
        """
        self._require_one_sample("attach()")
        check_model(model, "attach(model)")
        params = self._params
        drop_gathered(p for p in params if is_sharded(p))
        owned = {id(p) for p in model.parameters()}
        foreign = sum(id(p) not in owned for p in params)
        if foreign:
            refusals.refuse_foreign(foreign)
        attachment = Attachment(self, model)
        self._loop.attached = True
        note_hooks(self._sampling)
        return attachment

    def is_attached(self, model: nn.Module) -> bool:
        """Whether :meth:`attach` has been called for the model, or for a part of it, and still holds."""
        check_model(model, "is_attached(model)")
        return is_attached(self, model)

    def guard_checkpoints(self, model: nn.Module) -> CheckpointGuard:
        """Let ``state_dict()`` of the model hold the mean, and what is loaded stay, while a sample is held.

        For loops that use :meth:`hold_sample`; :meth:`attach` does it by itself. Returns a handle with ``remove()``.
        """
        check_model(model, "guard_checkpoints(model)")
        return CheckpointGuard(self, model)

    def _before_forward(self, training: bool) -> None:
        """What the hook does before each forward of the attached model."""
        sampling = self._sampling
        if sampling.holder is Holder.CALLER:
            return
        if is_captured() and (training or sampling.holder is not None):
            refusals.refuse_capture()
        if not training:
            self._make_room_for_evaluation("A forward of the attached model in evaluation mode")
            return
        sampling.end_looks()
        if sampling.holder is None:
            self._enter(sampling.open_sample or 0, Holder.HOOK)
        sampling.graph_made = sampling.graph_made or torch.is_grad_enabled()

    def _after_evaluation(self) -> None:
        """What the hook does after a forward in evaluation mode. In a block or a closure nothing was done before it."""
        if self._sampling.holder is not Holder.CALLER:
            self._sampling.end_look()

    def _leave_attached_sample(self) -> None:
        if self._sampling.holder is not Holder.CALLER:
            self._sampling.put_mean_back()

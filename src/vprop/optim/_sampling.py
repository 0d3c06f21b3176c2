"""Weight samples: which one is in the weights, and the mean back afterwards."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from vprop.checks import check_flag, invalid, is_number
from vprop.optim._ledger import Holder, Ledger, forget_casts, note_hooks
from vprop.optim._plans import KeptWeights, Plan
from vprop.optim.hyperparameters import check_samples
from vprop.parallel.ranks import has_own_noise
from vprop.parallel.sharding import is_sharded


class SamplingOptimizer(Optimizer):
    """An optimizer that writes samples into the weights and takes them out again, with a ledger of where it stands."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._open_ledger(Ledger())
        super().__init__(params, defaults)

    def _open_ledger(self, ledger: Ledger) -> None:
        """Keep a ledger. The mean comes back into the weights should the optimizer go while a sample is in them."""
        former = self.__dict__.get("_when_freed")
        if former is not None:
            former.detach()
        self._ledger = ledger
        self._when_freed = weakref.finalize(self, ledger.put_mean_back)
        self._when_freed.atexit = False

    # -- what a structure provides ---------------------------------------------------------------------------

    @abstractmethod
    def _plan_sample(self, sample: int, evaluation_draw: int | None) -> Plan:
        """Which noise goes where: all that writing a sample, and taking it out again, needs.

        ``evaluation_draw`` is ``None`` for a sample of the coming step.
        """

    @abstractmethod
    def _fold(self) -> None:
        """Fold ``p.grad`` of all parameters, the gradient at one sample, into this step's statistics."""

    # -- how many --------------------------------------------------------------------------------------------

    def _check_samples(self, group: dict[str, Any]) -> None:
        """Refuse a number of samples that the group's other arguments do not allow."""
        check_samples(group)

    @property
    def mc_samples(self) -> int:
        """Samples per step; one number for all groups, because a sample covers all weights at once."""
        return self._samples_in(self.param_groups)

    def _samples_in(self, groups: list[dict[str, Any]]) -> int:
        for group in groups:
            self._check_samples(group)  # groups can be edited at any time, and no samples means no curvature
        counts = {group["mc_samples"] for group in groups}
        if len(counts) > 1:
            raise invalid(
                "mc_samples",
                sorted(counts),
                "the same in all parameter groups",
                "A sample covers all groups at once.",
            )
        return counts.pop()

    # -- samples ---------------------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, sample: int = 0, *, train: bool = True) -> Iterator[None]:
        """Weights drawn from the posterior inside the block, the mean after it, also after an exception.

        With ``train=True`` the draw belongs to the coming :meth:`step`: run forward *and* backward inside. For
        ``mc_samples`` K > 1 run a block for each ``sample`` 0…K−1 in turn; with ``mc_samples=0`` the block sees the
        mean. With ``train=False`` the draw is a fresh one for evaluation: the weights come back bit for bit, and
        nothing of the training run changes.
        """
        self._refuse_inside_sample("sampled_params()")
        check_flag("train", train)
        if not is_number(sample, whole=True):
            raise invalid("sample", sample, "the number of a sample", "Leave it out, or see train=False to evaluate.")
        if not train:
            with self._active_evaluation(sample):
                yield
            return
        if self._repeats_idle_block(sample):
            warnings.warn(
                "`with optimizer.sampled_params():` gives the same sample until step(), so this block sees the weights "
                "of the last one, in which there was no backward. For evaluation use "
                "`with optimizer.sampled_params(train=False):`, a fresh sample each time, or optimizer.posterior(model)"
                ".predict(x).",
                UserWarning,
                stacklevel=3,
            )
        with self._active_sample(sample):
            before = self._gradient_marks()
            yield
            self._ledger.block_was_idle = before == self._gradient_marks()

    def _repeats_idle_block(self, sample: int) -> bool:
        """Whether a block is begun again after one without a backward: told once, to users who expect a new draw."""
        ledger = self._ledger
        repeats = ledger.block_was_idle and sample == ledger.open_sample and self.mc_samples > 0
        if not repeats or ledger.warned_of_repetition or torch.compiler.is_compiling():
            return False
        ledger.warned_of_repetition = True
        return True

    def _gradient_marks(self) -> list[Any]:
        """What changes with every backward."""
        if torch.compiler.is_compiling():
            return []
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def hold_sample(self) -> None:
        """Put the sample of the coming :meth:`step` into the weights, where it stays until then.

        For training loops that call back, at the start of a batch say, rather than let themselves be wrapped. All
        gradients until :meth:`step` are then taken at this sample, those of the micro-batches of an accumulated batch
        too; a closure that :meth:`step` is given sees it as well, and may add to them. Held already, it stays as it
        is. :meth:`release_sample` takes it out for a while (for a validation), :meth:`discard_samples` for good.
        """
        self._refuse_inside_sample("hold_sample()")
        self._require_one_sample("hold_sample()")
        note_hooks(self._ledger)
        if self._ledger.holder is None:
            self._enter(0, Holder.HOOK)
        self._ledger.held = True

    def _require_one_sample(self, what: str) -> None:
        if self.mc_samples > 1:
            remedy = "Pass a closure to step() for more samples."
            raise invalid("mc_samples", self.mc_samples, f"0 or 1 with {what}", remedy)

    def _hold_again(self) -> None:
        """Put a sample back that is held, after something that needed the mean."""
        if self._ledger.held and self._ledger.holder is None:
            self._enter(0, Holder.HOOK)

    def release_sample(self) -> None:
        """Put the mean back. The sample remains that of the coming step: :meth:`hold_sample` brings it back."""
        self._refuse_inside_sample("release_sample()")
        self._ledger.held = False
        self._leave()

    def _has_begun(self) -> bool:
        """Whether gradients that are there before a closure can belong to the sample that it will see."""
        count = self.mc_samples
        return count == 0 or (count == 1 and self._ledger.open_sample is not None)

    @contextmanager
    def _active_sample(self, sample: int, *, stays: bool = False) -> Iterator[None]:
        """A sample of the coming step, for a block of code; it may stay in the weights for the update to take out."""
        try:
            self._enter(sample, Holder.CALLER)
            yield
        except BaseException:
            # A sample that was not finished must not be mistaken for one that was.
            self._leave()
            self._ledger.forget_samples()
            raise
        if stays:
            self._ledger.holder = None
        else:
            self._leave()
            self._hold_again()

    @contextmanager
    def _active_evaluation(self, sample: int) -> Iterator[None]:
        """A draw for evaluation, for a block of code."""
        if sample != 0:
            raise invalid("sample", sample, "left out with train=False", "Every evaluation block draws afresh.")
        self._make_room_for_evaluation("sampled_params(train=False)")
        try:
            with torch.inference_mode(False):
                self._ledger.saved = KeptWeights(p for group in self.param_groups for p in group["params"])
            self._perturb(0, self._ledger.evaluation_draws)
            self._ledger.saved.mark()
            self._ledger.holder = Holder.CALLER
            self._ledger.evaluation_draws += 1
            yield
        finally:
            self._ledger.end_evaluation()
            self._ledger.end_look()
            self._hold_again()

    def _make_room_for_evaluation(self, what: str) -> None:
        """Put the mean into the weights, for a forward in evaluation mode, say.

        A sample that a hook holds comes back afterwards. Once a backward has been through it, and gradients of the
        evaluation may be wanted, it is taken out for good instead: :meth:`step` does not need it in the weights.
        """
        backward_is_due = self._ledger.graph_made and self._has_no_gradient()
        if torch.is_grad_enabled() and not backward_is_due:
            self._leave()
            return
        if torch.is_grad_enabled() and any(is_sharded(p) for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{what} between a forward in training mode and its backward: the weights hold the sample that the "
                "backward needs. Where parameters are spread over ranks, call it inside `with torch.no_grad():`, or "
                "after backward()."
            )
        self._ledger.begin_look()

    def _has_no_gradient(self) -> bool:
        return all(p.grad is None for group in self.param_groups for p in group["params"])

    def _enter(self, sample: int, holder: Holder) -> None:
        """Make ``sample`` of the coming step active, after folding the sample before it."""
        self._ledger.end_looks()
        if self._ledger.holder is Holder.HOOK and sample == self._ledger.open_sample:
            self._ledger.holder = holder  # it is in the weights: taking it out and in again would only round
            return
        self._leave()
        count = self.mc_samples
        if not 0 <= sample < max(1, count):
            raise invalid(
                "sample",
                sample,
                f"in 0…{max(1, count) - 1} with mc_samples={count}",
                "Raise mc_samples for more samples.",
            )
        if self._ledger.open_sample is not None and sample == self._ledger.open_sample + 1:
            self._fold_open_sample()
        expected = self._ledger.folded_samples if self._ledger.open_sample is None else self._ledger.open_sample
        if sample != expected:
            raise RuntimeError(
                f"sampled_params({sample}): sample {expected} of this step is due. Draw the samples of a step in "
                "order, and all micro-batches of one sample before the next sample; to start the step over, call "
                "optimizer.discard_samples()."
            )
        if count > 0:
            for group in self.param_groups:
                if has_own_noise(group):
                    self._ledger.own_gradients.watch(p for p in group["params"] if p.requires_grad)
            self._note_seeds()
            self._perturb(sample, None)
        self._ledger.open_sample = sample
        self._ledger.holder = holder

    @torch.compiler.disable
    def _note_seeds(self) -> None:
        shared = self._groups_with_shared_noise()
        if shared:
            self._ledger.seed_check.leave_note(shared)

    @torch.compiler.disable
    def _compare_seeds(self) -> None:
        self._ledger.seed_check.compare(self._groups_with_shared_noise())

    def _groups_with_shared_noise(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get("noise", "shared") == "shared"]

    def _perturb(self, sample: int, evaluation_draw: int | None) -> None:
        # State made here outlives the block that asked for a sample, so it must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._ledger.plan = self._plan_sample(sample, evaluation_draw)
                self._ledger.plan.write()
                forget_casts()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        """Put the mean back if a sample is in the weights."""
        self._ledger.put_mean_back()

    def _fold_open_sample(self) -> None:
        """Fold the gradient that lies in ``p.grad`` and clear it for the next sample."""
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                f"Sample {self._ledger.open_sample} has no gradient. Call backward() inside its block, and between two "
                "samples clear gradients with optimizer.zero_grad(), which keeps the sample's (model.zero_grad() "
                "throws it away)."
            )
        with torch.no_grad():
            self._fold()
        self._ledger.folded_samples += 1
        self._ledger.open_sample = None
        super().zero_grad(set_to_none=True)

    def discard_samples(self) -> None:
        """Forget the samples drawn for the coming step, for a batch that is given up half-way."""
        self._refuse_inside_sample("discard_samples()")
        self._leave()
        self._ledger.forget_samples()

    def _refuse_inside_sample(self, what: str) -> None:
        if self._ledger.holder is Holder.CALLER:
            raise RuntimeError(
                f"{what} inside an active sample: the weights hold a draw, not the mean. Leave the "
                "`with optimizer.sampled_params()` block (or the closure) first."
            )


Method = TypeVar("Method", bound=Callable[..., Any])


def at_the_mean(method: Method) -> Method:
    """For methods that read the weights: the mean is in them meanwhile, and a sample that is held, again afterwards."""

    @wraps(method)
    def wrapped(self: SamplingOptimizer, *args: Any, **kwargs: Any) -> Any:
        self._refuse_inside_sample(f"{method.__name__}()")
        self._ledger.begin_look()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._ledger.end_look()

    return wrapped  # type: ignore[return-value]

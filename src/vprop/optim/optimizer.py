"""The optimizer that torch knows: groups, the three training loops, checkpoints. A structure does the work."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from vprop.checks import check_flag, check_model, invalid, is_number
from vprop.curvature import CurvatureEstimator
from vprop.likelihood import LikelihoodLike
from vprop.objective import Objective
from vprop.optim import checkpoints, refusals
from vprop.optim._arguments import (
    check_estimator,
    check_fused,
    check_parameters,
    checked_params,
    warn_of_shared_memory,
)
from vprop.optim._group_keys import check_entries, drop_duplicates
from vprop.optim.auto_prior import follow_auto_priors, take_auto
from vprop.optim.closures import mean_result
from vprop.optim.diagnosis import Diagnosis, diagnose
from vprop.optim.hooks import Attachment, CheckpointGuard, is_attached
from vprop.optim.hyperparameters import Hyperparameter, Shared, check_hyperparameters, check_samples, declared_in
from vprop.optim.loading import METHOD, check_is_mapping
from vprop.optim.old_gradients import refuse_old_gradients, refuse_unless_cleared
from vprop.optim.resolution import Resolution, check_sample_counts
from vprop.optim.sampling import (
    Holder,
    Sampling,
    forget_casts,
    gradient_marks,
    note_hooks,
    release_samples,
    was_idle,
)
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.seeds import SeedCheck
from vprop.parallel.sharding import is_sharded, local_grad
from vprop.posterior import Posterior
from vprop.structures import NATURAL, Diagonal, GroupStep, Marginal, RateFactor, Rule, Structure

Method = TypeVar("Method", bound=Callable[..., Any])


def at_the_mean(method: Method) -> Method:
    """For methods that read the weights: the mean is in them meanwhile, and a sample that is held, again afterwards."""

    @wraps(method)
    def wrapped(self: VariationalOptimizer, *args: Any, **kwargs: Any) -> Any:
        self._sampling.refuse_inside_sample(f"{method.__name__}()")
        self._sampling.begin_look()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._sampling.end_look()

    return wrapped  # type: ignore[return-value]


class VariationalOptimizer(Optimizer):
    """A torch optimizer whose weights are the mean of a Gaussian posterior.

    The weights hold the mean whenever no sample is active. ``p.grad`` is read in :meth:`step` only (with several
    samples per step: when the next sample begins), so clipping, gradient accumulation, ``GradScaler`` and gradient
    hooks work as with any optimizer. There is one draw per step: a sample entered again before :meth:`step` is the
    same sample.

    A named optimizer is a subclass that picks a ``structure`` of the posterior (diagonal, full, one of your own), an
    estimator of the curvature (``_curvature``) and a rule for the update (``_rule``).
    """

    structure: ClassVar[type[Structure]] = Diagonal
    _hyperparameters: ClassVar[dict[str, Hyperparameter]] = declared_in(Shared)
    """What the entries of a group are checked by."""
    _kept_when_loading: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that a checkpoint does not change."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._start_afresh()
        super().__init__(checked_params(params, type(self).__name__), defaults)
        # Lists go with the parameters of the constructor; a group added later has its own or the usual prior.
        for name, declared in self._hyperparameters.items():
            if declared.per_parameter and isinstance(self.defaults[name], list | tuple | Tensor):
                self.defaults[name] = declared.default

    def _start_afresh(self) -> None:
        """All that is no state: what goes on between two steps."""
        self._structure = self.structure(type(self).__name__)
        self._sampling = Sampling(self._structure)
        self._resolution = Resolution()
        self._seed_check = SeedCheck()
        self._attached = self._asked_by_grad_scaler = False
        self._block_was_idle = self._warned_of_repetition = False
        self._cleared, self._clearing_closure = False, cast(Any, None)
        self._snapshots = 0
        self._watch_lifetime()

    def _watch_lifetime(self) -> None:
        """See to it that the mean comes back should the optimizer go while a sample is in the weights."""
        former = self.__dict__.get("_when_freed")
        if former is not None:
            former.detach()
        self._when_freed = weakref.finalize(self, self._sampling.put_mean_back)
        self._when_freed.atexit = False

    # -- what a named optimizer chooses ----------------------------------------------------------------------

    def _curvature(self, group: dict[str, Any]) -> CurvatureEstimator:
        """The estimator of ĥ that the group's hyperparameters ask for."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of its curvature")

    def _rule(self, group: dict[str, Any]) -> Rule:
        """The update of mean and curvature."""
        return NATURAL

    def _rate_factor(self, group: dict[str, Any], ess: float) -> RateFactor:
        """What ``lr`` is multiplied by."""
        return 1.0

    # -- groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, with a check of its hyperparameters."""
        if isinstance(param_group, dict):  # what else there is torch refuses
            check_entries(param_group, self.defaults, type(self).__name__)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        drop_duplicates(group, self._hyperparameters)
        group[METHOD] = self._method()
        try:
            self._check_group(group)
            check_fused(group, type(self).__name__, self._structure.has_kernels)
            check_sample_counts(self, self.param_groups)
            self._structure.check_groups(self.param_groups, self._shared_by_groups())
        except ValueError:
            self.param_groups.pop()
            raise
        release_samples(group["params"])
        warn_of_shared_memory(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters that are not allowed, and put the others into the form that the updates read."""
        take_auto(group)
        check_parameters(group["params"])
        check_hyperparameters(group, self._hyperparameters)
        self._structure.check_group(group)

    @classmethod
    def _shared_by_groups(cls) -> list[str]:
        """The hyperparameters that all groups with one covariance must have the same."""
        return [name for name, declared in cls._hyperparameters.items() if declared.shared_by_groups]

    def _check_samples(self, group: dict[str, Any]) -> None:
        """Refuse what a group may have been edited into."""
        take_auto(group)  # "auto" may also be set on a group later
        check_samples(group)
        check_estimator(self._curvature(group), group, type(self).__name__)

    @property
    def mc_samples(self) -> int:
        """Samples per step; one number for all groups, because a sample covers all weights at once."""
        return check_sample_counts(self, self.param_groups)

    @classmethod
    def _method(cls) -> str:
        """The name of the class that chooses curvature and update: subclasses with other defaults do as it does."""
        chooses = ("_curvature", "_rule")
        return next((base for base in cls.__mro__ if any(name in vars(base) for name in chooses)), cls).__name__

    @property
    def needs_objective(self) -> bool:
        """Whether :meth:`step` must be given a :class:`vprop.Objective`: gradients do not tell the curvature."""
        return any(self._curvature(group).needs_objective for group in self.param_groups)

    @property
    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable([group["params"] for group in self.param_groups]))

    def _prepare(self) -> list[GroupStep]:
        """Decide what the step needs of each group, if that is not decided, and tell the structure."""
        sampling = self._sampling
        if sampling.open_sample is not None or sampling.folded_samples:
            return self._structure.groups
        steps = self._resolution.steps(self)
        self._structure.prepare(steps, self.state)
        return steps

    # -- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior; returns what the closure returned, if there is one: its mean over the samples.

        A closure may return more than the loss: of tuples, lists and dicts the mean is taken part by part, and of what
        has no mean (a word, tensors of different shapes) the last sample's is returned.

        With a closure, which zeroes the gradients, computes the loss and calls ``backward()``, the optimizer draws
        all samples and calls it once for each (once at the mean if ``mc_samples=0``). Without one, the gradients
        of ``sampled_params()`` blocks or of an attached model are used.
        """
        sampling, structure = self._sampling, self._structure
        if sampling.holder is Holder.CALLER:
            sampling.refuse_inside_sample("step()")
        if sampling.aside is not None:
            sampling.end_looks()
        if closure is None and sampling.open_sample is None and self._is_asked_for_state():
            self._prepare()
            structure.make_state()
            return None
        scaled, self._asked_by_grad_scaler = self._asked_by_grad_scaler, False
        loss = None
        try:
            if closure is not None:
                refusals.refuse_no_closure(closure, scaled)
                loss = self._evaluate(closure)
            else:
                steps = self._prepare()
                if structure.needs_objective:
                    refusals.require_objective(type(self).__name__)
                if sampling.drawn_samples < steps[0].samples:
                    refusals.require_samples(steps[0].samples, sampling.drawn_samples, self._attached)
            if self._resolution.several_ranks:
                self._compare_seeds()
            structure.fold(sampling.open_sample, sampling.folded_samples)
            structure.update(sampling.plan)
        except BaseException:
            sampling.put_mean_back()
            raise
        sampling.forget_samples()
        self._block_was_idle = False
        forget_casts()
        if structure.follows_priors:
            follow_auto_priors(self)
        if structure.unusable:
            self._report_unusable(deferred=False)
        return loss

    @torch.compiler.disable
    def _compare_seeds(self) -> None:
        self._seed_check.compare(self._groups_with_shared_noise())

    def _is_asked_for_state(self) -> bool:
        """Whether this is no step, but a request for the state that a checkpoint can be loaded into.

        That is how ``torch.distributed.checkpoint`` asks: by a step before anything was done, of length zero, on
        gradients of zero.
        """
        if torch.compiler.is_compiling() or any(self.state.values()):
            return False
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads = [local_grad(p) for p in self._params if p.requires_grad]
        return all(grad is not None and not bool(grad.any()) for grad in grads)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure once per sample; returns the mean of what it returned. The last sample stays."""
        sampling, structure = self._sampling, self._structure
        begun = sampling.open_sample is not None and structure.groups[0].samples == 1
        if begun:
            sampling.forget_folded()  # of a step that failed
        elif sampling.drawn_samples or not sampling.is_mean:
            sampling.put_mean_back()
            sampling.forget_samples()
        steps = self._prepare()
        if structure.needs_objective and not isinstance(closure, Objective):
            refusals.require_objective(type(self).__name__)
        losses: list[Any] = []
        try:
            for sample in range(max(1, steps[0].samples)):
                self._enter(sample, Holder.CALLER, steps)
                with torch.enable_grad():
                    fresh = not begun and sample == 0 and steps[0].samples > 0
                    loss = self._call(closure) if fresh else closure()
                losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
                if structure.needs_objective:
                    structure.observe(closure, sample)  # type: ignore[arg-type]
        except BaseException:
            # A sample that was not finished must not be mistaken for one that was.
            sampling.put_mean_back()
            sampling.forget_samples()
            raise
        sampling.holder = None
        if len(losses) == 1:
            return losses[0]
        return None if any(loss is None for loss in losses) else mean_result(losses)

    def _call(self, closure: Callable[[], Any]) -> Any:
        """Call a closure before whose sample no gradient can have been taken; it must clear those that are there.

        Once it has called our ``zero_grad`` it is known to; until then, and when it has not, it is watched closely.
        """
        if isinstance(closure, Objective):
            return closure()
        code = getattr(closure, "__code__", type(closure))
        known, self._clearing_closure, self._cleared = self._clearing_closure is code, None, False
        if known:
            result = refuse_unless_cleared(closure, self._params, lambda: self._cleared)
        else:
            result = refuse_old_gradients(closure, self._params)
        self._clearing_closure = code if self._cleared else None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; between two samples of one step, fold the first one's before."""
        sampling = self._sampling
        waits = sampling.holder is None and sampling.open_sample is not None
        if waits and sampling.drawn_samples < self._structure.groups[0].samples:
            self._fold_open_sample()
        self._asked_by_grad_scaler, self._cleared = False, True
        if self._resolution.several_ranks:
            self._structure.own_gradients.clear()
        super().zero_grad(set_to_none=set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler to unscale the gradients itself; and that it asks tells us that it is at work."""
        steps = self._resolution.steps(self)
        refusals.refuse_scaling(steps[0].samples, any(step.own_noise for step in steps))
        # If it finds an overflow there will be no step(), and whoever reads the weights then must find the mean.
        self._leave_attached_sample()
        self._asked_by_grad_scaler = True
        return False

    def _report_unusable(self, deferred: bool) -> None:
        """Warn of gradient elements that were left out. Looking is free on a CPU and stalls the queue elsewhere."""
        if torch.compiler.is_compiling():
            return
        for device, total in self._structure.unusable.items():
            count = int(total.sum()) if deferred or device.type == "cpu" else 0
            if count:
                total.zero_()  # in place: a captured CUDA graph goes on counting here
                warnings.warn(
                    f"{count} gradient elements were NaN or infinite and were left out of the step: their mean and "
                    "curvature are unchanged. Look for an overflow in the loss, lower lr, or clip the gradients.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    # -- samples ---------------------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, sample: int = 0, *, train: bool = True) -> Iterator[None]:
        """Weights drawn from the posterior inside the block, the mean after it, also after an exception.

        With ``train=True`` the draw belongs to the coming :meth:`step`: run forward *and* backward inside. For
        ``mc_samples`` K > 1 run a block for each ``sample`` 0…K−1 in turn; with ``mc_samples=0`` the block sees the
        mean. With ``train=False`` the draw is a fresh one for evaluation: the weights come back bit for bit, and
        nothing of the training run changes.
        """
        self._sampling.refuse_inside_sample("sampled_params()")
        check_flag("train", train)
        if not is_number(sample, whole=True):
            raise invalid("sample", sample, "the number of a sample", "Leave it out, or see train=False to evaluate.")
        if not train:
            with self._active_evaluation(sample):
                yield
            return
        if self._block_was_idle and sample == self._sampling.open_sample and self._structure.groups[0].samples > 0:
            # Told once, to users who expect a new draw each time, as other libraries make it.
            warnings.warn(refusals.REPEATED_BLOCK, UserWarning, stacklevel=3)
            self._warned_of_repetition = True
        with self._active_sample(sample):
            marks = [] if self._warned_of_repetition else gradient_marks(self._structure.groups)
            yield
            self._block_was_idle = was_idle(marks, self._params)

    @contextmanager
    def _active_sample(self, sample: int, *, stays: bool = False) -> Iterator[None]:
        """A sample of the coming step, for a block of code; it may stay in the weights for the update to take out."""
        try:
            self._enter(sample, Holder.CALLER)
            yield
        except BaseException:
            # A sample that was not finished must not be mistaken for one that was.
            self._sampling.put_mean_back()
            self._sampling.forget_samples()
            raise
        if stays:
            self._sampling.holder = None
        else:
            self._sampling.put_mean_back()
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
                self._watch_ranks()
            sampling.write(sample)
        sampling.open(sample, holder)

    def _fold_open_sample(self) -> None:
        """Fold the gradient that lies in ``p.grad`` and clear it for the next sample."""
        sampling = self._sampling
        if all(p.grad is None for p in self._params) and any(p.requires_grad for p in self._params):
            refusals.require_gradient(sampling.open_sample)
        with torch.no_grad():
            self._structure.fold(sampling.open_sample, sampling.folded_samples)
        sampling.close_folded()
        super().zero_grad(set_to_none=True)

    @torch.compiler.disable
    def _watch_ranks(self) -> None:
        """What is noted of a run on several ranks before a sample is drawn."""
        for step in self._structure.groups:
            if step.own_noise:
                self._structure.own_gradients.watch(member.p for member in step.members)
        shared = self._groups_with_shared_noise()
        if shared:
            self._seed_check.leave_note(shared)

    def _groups_with_shared_noise(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get("noise", "shared") == "shared"]

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
        finally:
            self._sampling.end_evaluation()
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
        self._sampling.put_mean_back()
        self._sampling.forget_samples()
        self._structure.own_gradients.clear()

    def _require_one_sample(self, what: str) -> None:
        if self.mc_samples > 1:
            remedy = "Pass a closure to step() for more samples."
            raise invalid("mc_samples", self.mc_samples, f"0 or 1 with {what}", remedy)

    # -- attached models -------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Attachment:
        """Sample in a training loop that is not yours to change.

        From now on a forward of ``model`` in training mode sees a sample, the same one until the next
        :meth:`step`; a forward in evaluation mode sees the mean, and so do ``state_dict()`` and
        ``load_state_dict()`` of the model. Returns a handle whose ``remove()`` detaches. An optimizer that was
        attached to the model before is detached, if it has parameters in common with this one.

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
            raise ValueError(
                f"attach(model): {foreign} of the optimizer's parameters are not parameters of this model. Attach the "
                "module the optimizer was built from (not a copy), or one that contains all of them. weight_norm and "
                "the like replace parameters: build the optimizer after them."
            )
        attachment = Attachment(self, model)
        self._attached = True
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

    # -- the posterior ---------------------------------------------------------------------------------------

    @torch.no_grad()
    @at_the_mean
    def posterior(
        self,
        model: nn.Module,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> Posterior:
        """A snapshot of the posterior over ``model``'s parameters.

        Names come from ``model.named_parameters()``. Parameters that the optimizer does not hold, and frozen ones,
        are constants of the model. ``likelihood`` (a kind, or the likelihood module that was the loss) and
        ``noise_variance`` are what ``predict`` assumes by default.
        """
        check_model(model, "posterior(model)")
        self._report_unusable(deferred=True)
        with self._as_groups_are_now():
            self._snapshots += 1
            return self._structure.posterior(
                model,
                seed=self.param_groups[0]["seed"],
                snapshot=self._snapshots,
                likelihood=likelihood,
                noise_variance=noise_variance,
            )

    @torch.no_grad()
    @at_the_mean
    def marginals(self) -> list[Marginal]:
        """What the posterior says of each parameter by itself, for logs and integrations that have no model at hand.

        For every parameter that takes part, in the order of the groups, an object with ``parameter``, ``mean``,
        ``variance``, ``hess`` (h, where the optimizer has one) and ``steps`` (how many it has made; before the first,
        the posterior is what training starts from). They are copies. Those of a sharded parameter are sharded like it.
        A sample that :meth:`attach` or :meth:`hold_sample` has put into the weights stays there, and is not seen.

        >>> import torch, vprop
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = vprop.Vprop(layer.parameters(), num_data=50, prior_precision=10.0, hess_init=0.3)
        >>> [weight] = optimizer.marginals()
        >>> weight.parameter is layer.weight, weight.variance.tolist()  # 1/(N·h + λ)
        (True, [[0.03999999910593033, 0.03999999910593033]])
        """
        return [marginal.copied() for marginal in self._marginals(at_least=0)]

    def _marginals(self, at_least: int = 1) -> list[Marginal]:
        """The same of each parameter that has made this many steps; the mean must be in the weights."""
        with self._as_groups_are_now():
            return list(self._structure.marginals(at_least))

    @contextmanager
    def _as_groups_are_now(self) -> Iterator[None]:
        """For questions between two steps: the samples of a step that has begun go on with what was decided for it."""
        decided = self._structure.groups
        self._structure.prepare(self._resolution.steps(self), self.state)
        try:
            yield
        finally:
            self._structure.prepare(decided, self.state)

    @torch.no_grad()
    @at_the_mean
    def diagnose(self) -> Diagnosis:
        """What looks wrong with the posterior, in words, each with the argument to change; ``print`` it.

        Best asked when some hundred steps have been made. It reads the state and changes nothing.
        """
        steps = [self._steps_made(group) for group in self.param_groups]
        return diagnose(self.param_groups, steps, self._marginals(), self._structure.clipped)

    def _steps_made(self, group: dict[str, Any]) -> int:
        """How many steps the group has made: those of its busiest parameter."""
        return max((int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)), default=0)

    # -- checkpoints and copies ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Holds the seed, the step counts and the curvature, so a resumed run draws the same noise."""
        self._report_unusable(deferred=True)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the state keeps its precision, and a checkpoint that does not fit changes nothing.

        Torch would round the state to the precision of bfloat16 weights. Refused is a checkpoint of another method, of
        other parameters, with hyperparameters that the method does not allow, or with a state that is not finite. What
        hooks make of the checkpoint before, and of the optimizer afterwards, counts.
        """
        check_is_mapping(state_dict)
        self._sampling.refuse_inside_sample("load_state_dict()")
        self._sampling.put_mean_back()
        try:
            checkpoints.load(self, state_dict)
        except BaseException:
            self._hold_again()
            raise

    def __getstate__(self) -> dict[str, Any]:
        if not self._sampling.is_mean:
            raise RuntimeError(
                "The optimizer cannot be copied or pickled while a sample is in the weights: the copy's weights would "
                "keep the noise. Call optimizer.discard_samples() first, or copy after step()."
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached, structure = self.__dict__.get("_attached", False), self.__dict__.get("_structure")
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it to a copy; groups must have the keys that they had
        for group in self.param_groups:  # a checkpoint may be older than an argument
            for name, value in (self.defaults | {METHOD: self._method()}).items():
                group.setdefault(name, value)
        self._start_afresh()
        if structure is not None:
            self._structure.take_over(structure)
        self._attached = attached
        if attached:
            note_hooks(self._sampling)

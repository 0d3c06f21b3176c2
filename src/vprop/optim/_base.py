"""What all variational optimizers share: groups, the three training loops, help, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from vprop.checks import check_model
from vprop.curvature import CurvatureEstimator
from vprop.likelihood import LikelihoodLike
from vprop.objective import Objective
from vprop.optim._arguments import check_fused, check_parameters, checked_params, warn_of_shared_memory
from vprop.optim._checkpoints import CheckpointedOptimizer
from vprop.optim._closures import mean_result
from vprop.optim._group_keys import check_entries, drop_duplicates
from vprop.optim._hooks import Attachment
from vprop.optim._ledger import Holder, forget_casts, note_hooks, release_samples
from vprop.optim._loading import METHOD
from vprop.optim._members import Marginal, Member, label_draw_of, parameters_in
from vprop.optim._old_gradients import refuse_old_gradients
from vprop.optim._sampling import at_the_mean
from vprop.optim.auto_prior import due_for_change, take_auto, update_auto_priors
from vprop.optim.diagnosis import Diagnosis, diagnose
from vprop.optim.hyperparameters import Hyperparameter, Shared, check_hyperparameters, declared_in
from vprop.parallel.fsdp import drop_gathered
from vprop.parallel.ranks import average_over_ranks, has_own_noise, rank_and_count, require_averaged
from vprop.parallel.sharding import is_sharded, local_grad
from vprop.posterior import Posterior
from vprop.precision import compute_dtype


class VariationalOptimizer(CheckpointedOptimizer):
    """A torch optimizer whose weights are the mean of a Gaussian posterior.

    The weights hold the mean whenever no sample is active. ``p.grad`` is read in :meth:`step` only (with several
    samples per step: when the next sample begins), so clipping, gradient accumulation, ``GradScaler`` and gradient
    hooks work as with any optimizer. There is one draw per step: a sample entered again before :meth:`step` is the
    same sample.

    A structure of the posterior (diagonal, full, …) is a subclass that says how to write a sample, how to take it
    out again, and how to fold gradients and update.
    """

    _has_kernels = False
    """Whether there are kernels for its samples and updates."""
    _hyperparameters: dict[str, Hyperparameter] = declared_in(Shared)
    """What the entries of a group are checked by."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(checked_params(params, type(self).__name__), defaults)
        # Lists go with the parameters of the constructor; a group added later has its own or the usual prior.
        for name, declared in self._hyperparameters.items():
            if declared.per_parameter and isinstance(self.defaults[name], list | tuple | Tensor):
                self.defaults[name] = declared.default

    # -- what a structure provides ---------------------------------------------------------------------------

    @abstractmethod
    def _needs_objective(self) -> bool:
        """Whether the curvature needs more than gradients, so that ``step`` must be given an objective."""

    @abstractmethod
    def _observe(self, objective: Objective, sample: int) -> None:
        """Let the curvature estimator look at the objective, at the sample that is in the weights."""

    @abstractmethod
    def _update(self) -> None:
        """Update mean and curvature from this step's statistics.

        The last sample is still in the weights: take it out (``_leave``), or update from there.
        """

    @abstractmethod
    def _peek_state(self, member: Member) -> dict[str, Tensor]:
        """The state of a parameter, or what it would be, without keeping it."""

    @abstractmethod
    def _make_state(self) -> None:
        """Give every parameter the state that it would have before its first step."""

    @abstractmethod
    def _marginals(self) -> Iterator[Marginal]:
        """Mean and variance of each parameter that has made a step."""

    @abstractmethod
    def posterior(
        self,
        model: nn.Module,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> Posterior:
        """A snapshot of the posterior over ``model``'s parameters."""

    # -- ranks -----------------------------------------------------------------------------------------------

    def _own_gradient(self, member: Member) -> Tensor:
        """ĝ of this rank alone, at its own sample."""
        grad, p = self._ledger.own_gradients.take(member.p), member.local
        if grad is None:
            return torch.zeros_like(p, dtype=compute_dtype(p))
        grad = grad.to(compute_dtype(p))
        return -grad if member.group["maximize"] else grad

    def _require_averaged(self, grads: list[Tensor]) -> None:
        """Look once whether somebody averages the gradients."""
        if not self._ledger.ranks_checked:
            require_averaged(grads)
            self._ledger.ranks_checked = True

    def _observed(
        self, estimator: CurvatureEstimator, objective: Objective, members: list[Member], sample: int
    ) -> list[Tensor]:
        """What the estimator sees in the objective, for each parameter, at the sample that is in the weights."""
        if any(member.local is not member.p for member in members):
            raise RuntimeError(
                f"{type(self).__name__} needs more of the model than its gradients, which is not possible where "
                "parameters are spread over ranks (FSDP, tensor parallel). Use DistributedDataParallel, or an "
                "optimizer that needs gradients only: Vprop, IVON, Vadam."
            )
        rank = rank_and_count(objective.process_group)[0] if estimator.draws_labels else 0
        inside = parameters_in(objective, members, type(self).__name__)
        draw = label_draw_of(members[0], self._peek_state(members[0]), sample, rank)
        sign = -1 if estimator.signed and members[0].group["maximize"] else 1
        return [sign * value.detach() for value in estimator.observe(objective, inside, draw)]

    def _seen_by_all(self, curvatures: list[Tensor], objective: Objective, group: dict[str, Any]) -> list[Tensor]:
        """Curvatures of a batch, from those of its parts that ranks with the same sample have looked at."""
        if objective.process_group is None or has_own_noise(group):
            return curvatures
        return average_over_ranks(curvatures, objective.process_group)

    # -- groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, with a check of its hyperparameters."""
        if isinstance(param_group, dict):  # what else there is torch refuses
            check_entries(param_group, self.defaults, type(self).__name__)
        super().add_param_group(param_group)
        drop_duplicates(self.param_groups[-1], self._hyperparameters)
        self.param_groups[-1][METHOD] = self._method()
        try:
            self._check_group(self.param_groups[-1])
            check_fused(self.param_groups[-1], type(self).__name__, self._has_kernels)
            self._check_groups_together(self.param_groups)
        except ValueError:
            self.param_groups.pop()
            raise
        release_samples(self.param_groups[-1]["params"])
        warn_of_shared_memory(self.param_groups[-1])

    def _check_group(self, group: dict[str, Any]) -> None:
        take_auto(group)
        check_parameters(group["params"])
        check_hyperparameters(group, self._hyperparameters)

    def _check_samples(self, group: dict[str, Any]) -> None:
        take_auto(group)  # "auto" may also be set on a group later
        super()._check_samples(group)

    # -- the three loops -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior; returns what the closure returned, if there is one: its mean over the samples.

        A closure may return more than the loss: of tuples, lists and dicts the mean is taken part by part, and of what
        has no mean (a word, tensors of different shapes) the last sample's is returned.

        With a closure, which zeroes the gradients, computes the loss and calls ``backward()``, the optimizer draws
        all samples and calls it once for each (once at the mean if ``mc_samples=0``). Without one, the gradients
        of ``sampled_params()`` blocks or of an attached model are used.
        """
        self._refuse_inside_sample("step()")
        self._ledger.end_looks()
        if closure is None and not torch.compiler.is_compiling() and self._is_asked_for_state():
            self._make_state()
            return None
        scaled, self._ledger.asked_by_grad_scaler = self._ledger.asked_by_grad_scaler, False
        try:
            loss = self._gradients(closure, scaled)
            if not torch.compiler.is_compiling() and rank_and_count()[1] > 1:
                self._compare_seeds()
            self._fold()
            self._update()
        except BaseException:
            self._leave()
            raise
        self._ledger.forget_samples()
        forget_casts()
        if any(group.get("auto_prior") is not None for group in self.param_groups):
            self._follow_auto_priors()
        self._report_unusable(deferred=False)
        return loss

    def _is_asked_for_state(self) -> bool:
        """Whether this is no step, but a request for the state that a checkpoint can be loaded into.

        That is how ``torch.distributed.checkpoint`` asks: by a step before anything was done, of length zero, on
        gradients of zero.
        """
        if any(self.state.values()) or self._ledger.drawn_samples:
            return False
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads = [local_grad(p) for group in self.param_groups for p in group["params"] if p.requires_grad]
        return all(grad is not None and not bool(grad.any()) for grad in grads)

    def _gradients(self, closure: Callable[[], Any] | None, scaled: bool) -> Any:
        """See to it that ``p.grad`` is the gradient at the last sample; returns the closure's loss."""
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step(closure): got {type(closure).__name__}, must be a function that clears the gradients, computes "
                "the loss, calls backward() and returns it, or a vprop.Objective. With gradients from a "
                "`with optimizer.sampled_params():` block or of an attached model, call step() without an argument."
            )
        self._require_objective(closure)
        if closure is None:
            self._require_samples()
            return None
        if scaled:
            raise RuntimeError(
                "A closure cannot be scaled: GradScaler unscales gradients before step(), and the closure makes new "
                "ones. Use `with optimizer.sampled_params():` or optimizer.attach(model), then scaler.step(optimizer)."
            )
        return self._evaluate(closure)

    @torch.compiler.disable
    def _follow_auto_priors(self) -> None:
        """Let λ follow the posterior in the groups that asked for it. Reads numbers, so it stays out of graphs."""
        groups = self.param_groups
        steps = [self._steps_made(group) for group in groups]
        due = due_for_change(groups, steps)
        if due:
            update_auto_priors(groups, due, self._marginals())
        for number in due:
            groups[number]["auto_prior"]["changed_at"] = steps[number]

    def _steps_made(self, group: dict[str, Any]) -> int:
        """How many steps the group has made: those of its busiest parameter."""
        return max((int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)), default=0)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure once per sample; returns the mean of what it returned."""
        begun = self._has_begun()
        if begun:
            self._ledger.forget_folded()  # of a step that failed
        else:
            self._leave()
            self._ledger.forget_samples()
        losses, needs_objective = [], self._needs_objective()
        last = max(1, self.mc_samples) - 1
        for sample in range(last + 1):
            with self._active_sample(sample, stays=sample == last), torch.enable_grad():
                watched = [] if begun or sample > 0 else self.param_groups
                loss = refuse_old_gradients(closure, watched)
                losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
                if needs_objective:
                    self._observe(closure, sample)  # type: ignore[arg-type]
        if any(loss is None for loss in losses):
            return None
        return losses[0] if len(losses) == 1 else mean_result(losses)

    def _require_objective(self, closure: Callable[[], Any] | None) -> None:
        if self._needs_objective() and not isinstance(closure, Objective):
            raise RuntimeError(
                f"{type(self).__name__} takes its curvature from more than a gradient, so step() must be given an "
                "objective: optimizer.step(vprop.Objective(model, loss_fn, x, y)), with loss_fn(model(x), y) the mean "
                "loss."
            )

    def _require_samples(self) -> None:
        """Refuse a step whose gradients were not taken at the samples they should be taken at."""
        count, drawn = self.mc_samples, self._ledger.drawn_samples
        if count > 0 and drawn == 0 and self._ledger.attached:
            raise RuntimeError(
                "step() without a sample: a model is attached, but it made no forward in training mode since the last "
                "step, so the gradients belong to the mean. Call model.train() (layers that are to stay in evaluation "
                "mode can be put there one by one), and call the module that was attached, not its parts; for "
                "gradients at the mean use mc_samples=0."
            )
        if count > 0 and drawn == 0:
            raise RuntimeError(
                f"step() without a sample: mc_samples={count}, but no weights were drawn since the last step, so the "
                "gradients belong to the mean. Pass a closure, run forward and backward inside "
                "`with optimizer.sampled_params():`, or call optimizer.attach(model); in Lightning add "
                "vprop.integrations.lightning.PosteriorCallback() to the Trainer; for gradients at the mean use "
                "mc_samples=0."
            )
        if drawn < count:
            raise RuntimeError(
                f"step() after {drawn} of mc_samples={count} samples. Run forward and backward in "
                f"`with optimizer.sampled_params(k):` for k = 0…{count - 1}, or pass a closure."
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler to unscale the gradients itself; and that it asks tells us that it is at work."""
        if self.mc_samples > 1:
            raise RuntimeError(
                f"GradScaler with mc_samples={self.mc_samples}: it unscales the last sample's gradients only. Use "
                "mc_samples=1 with the scaler, or bfloat16 autocast, which needs none."
            )
        if any(has_own_noise(group) for group in self.param_groups):
            raise RuntimeError(
                'GradScaler with noise="per_rank": the gradients that each rank makes its curvature of are still '
                'scaled. Use bfloat16 autocast, which needs no scaler, or noise="shared".'
            )
        # If it finds an overflow there will be no step(), and whoever reads the weights then must find the mean.
        self._leave_attached_sample()
        self._ledger.asked_by_grad_scaler = True
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; between two samples of one step, fold the first one's before."""
        if (
            self._ledger.holder is None
            and self._ledger.open_sample is not None
            and self._ledger.open_sample + 1 < self.mc_samples
        ):
            self._fold_open_sample()
        self._ledger.asked_by_grad_scaler = False
        self._ledger.own_gradients.clear()
        super().zero_grad(set_to_none=set_to_none)

    def attach(self, model: nn.Module) -> Attachment:
        """Sample in a training loop that is not yours to change.

        From now on a forward of ``model`` in training mode sees a sample, the same one until the next
        :meth:`step`; a forward in evaluation mode sees the mean, and so do ``state_dict()`` and
        ``load_state_dict()`` of the model. Returns a handle whose ``remove()`` detaches. An optimizer that was
        attached to the model before is detached, if it has parameters in common with this one.

        Between a forward and :meth:`step` the weights hold the sample. After an interrupt there,
        :meth:`discard_samples` puts the mean back; so does the end of the optimizer's life. An evaluation between
        a forward and its backward needs ``torch.no_grad()``.
        """
        self._require_one_sample("attach()")
        check_model(model, "attach(model)")
        drop_gathered(p for group in self.param_groups for p in group["params"] if is_sharded(p))
        owned = {id(p) for p in model.parameters()}
        foreign = sum(id(p) not in owned for group in self.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"attach(model): {foreign} of the optimizer's parameters are not parameters of this model. Attach the "
                "module the optimizer was built from (not a copy), or one that contains all of them. weight_norm and "
                "the like replace parameters: build the optimizer after them."
            )
        attachment = Attachment(self, model)
        self._ledger.attached = True
        note_hooks(self._ledger)
        return attachment

    def _before_forward(self, training: bool) -> None:
        """What the hook does before each forward of the attached model."""
        ledger = self._ledger
        if ledger.holder is Holder.CALLER:
            return
        if not training:
            self._make_room_for_evaluation("A forward of the attached model in evaluation mode")
            return
        ledger.end_looks()
        if ledger.holder is None:
            self._enter(ledger.open_sample or 0, Holder.HOOK)
        ledger.graph_made = ledger.graph_made or torch.is_grad_enabled()

    def _leave_attached_sample(self) -> None:
        if self._ledger.holder is not Holder.CALLER:
            self._leave()

    # -- help ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @at_the_mean
    def diagnose(self) -> Diagnosis:
        """What looks wrong with the posterior, in words, each with the argument to change; ``print`` it.

        Best asked when some hundred steps have been made. It reads the state and changes nothing.
        """
        steps = [self._steps_made(group) for group in self.param_groups]
        return diagnose(self.param_groups, steps, list(self._marginals()), self._ledger.clipped)

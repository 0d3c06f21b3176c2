"""The optimizer that torch knows: groups, checkpoints, the posterior. A structure does the work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from vprop.checks import check_flag, check_model, invalid
from vprop.curvature import CurvatureEstimator
from vprop.help.auto_prior import take_auto
from vprop.help.diagnosis import Diagnosis, diagnose
from vprop.help.predictions import compare_losses, objectives_in
from vprop.likelihood import LikelihoodLike
from vprop.objective import Objective
from vprop.optim import checkpoints
from vprop.optim._arguments import (
    check_estimator,
    check_fused,
    check_parameters,
    checked_params,
    warn_of_shared_memory,
)
from vprop.optim._group_keys import check_entries, drop_duplicates
from vprop.optim.hyperparameters import (
    Basic,
    Hyperparameter,
    check_edited,
    check_hyperparameters,
    check_samples,
    declared_in,
)
from vprop.optim.loading import METHOD, check_is_mapping
from vprop.optim.loops import LoopState, TrainingLoops
from vprop.optim.resolution import READ_LATE, Resolution, check_sample_counts
from vprop.optim.sampling import Sampling, at_the_mean, note_hooks, release_samples
from vprop.parallel.seeds import SeedCheck
from vprop.posterior import Posterior
from vprop.structures import (
    NATURAL,
    Diagonal,
    GroupStep,
    Marginal,
    RateFactor,
    Rule,
    Structure,
    part_of,
    structure_for,
)


class VariationalOptimizer(TrainingLoops):
    """A torch optimizer whose weights are the mean of a Gaussian posterior.

    The weights hold the mean whenever no sample is active. ``p.grad`` is read in :meth:`step` only (with several
    samples per step: when the next sample begins), so clipping, gradient accumulation, ``GradScaler`` and gradient
    hooks work as with any optimizer. There is one draw per step: a sample entered again before :meth:`step` is the
    same sample.

    A named optimizer is a subclass that picks a ``structure`` of the posterior (diagonal, full, one of your own), an
    estimator of the curvature (``_curvature``) and a rule for the update (``_rule``).
    """

    structure: ClassVar[type[Structure]] = Diagonal
    _hyperparameters: ClassVar[dict[str, Hyperparameter]] = declared_in(Basic)
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
        self._loop = LoopState()
        self._structure_of: dict[Tensor, str] = {}
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
            self._fit_structure(self.param_groups)
            check_fused(group, type(self).__name__, self._structure.kernels_for(group))
            check_sample_counts(self, self.param_groups)
            self._structure.check_groups(self.param_groups, self._shared_by_groups())
        except BaseException:
            self.param_groups.pop()
            self._fit_structure(self.param_groups)
            raise
        release_samples(group["params"])
        warn_of_shared_memory(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters that are not allowed, and put the others into the form that the updates read."""
        take_auto(group)
        check_parameters(group["params"])
        check_hyperparameters(group, self._hyperparameters)
        self._check_by_structure(group)

    def _check_by_structure(self, group: dict[str, Any]) -> None:
        """Refuse what the structure that the group asks for cannot do with."""
        chooses, structure = "structure" in self._hyperparameters, self._structure
        (part_of(structure, group["structure"]) if chooses else structure).check_group(group)

    def _fit_structure(self, groups: list[dict[str, Any]]) -> None:
        """Hold the structures that the groups ask for, where the optimizer lets them choose."""
        declared = self._hyperparameters.get("structure")
        if declared is None or not groups:
            return
        for group in groups:
            declared.check("structure", group)  # which may have been edited
            formers = [self._structure_of.get(p) for p in group["params"] if self.state.get(p)]
            former = next((name for name in formers if name not in (None, group["structure"])), None)
            if former is not None:
                wanted, group["structure"] = group["structure"], former
                raise invalid(
                    "structure",
                    wanted,
                    f"{former!r}, as it was when the group's state was made",
                    "Make a new optimizer for another structure. posterior.as_diagonal().as_prior() can be the prior "
                    "of a diagonal or full one.",
                )
        fitting = structure_for([group["structure"] for group in groups], self._structure)
        if fitting is not self._structure:
            if self._sampling.drawn_samples or not self._sampling.is_mean:
                self._sampling.start_over()
            fitting.take_over(self._structure)
            self._structure = self._sampling.structure = fitting
        self._structure_of = {p: group["structure"] for group in groups for p in group["params"]}

    @classmethod
    def _shared_by_groups(cls) -> list[str]:
        """The hyperparameters that all groups with one covariance must have the same."""
        return [name for name, declared in cls._hyperparameters.items() if declared.shared_by_groups]

    def _check_edited(self, group: dict[str, Any]) -> None:
        """Refuse values that the constructor would refuse: a group can be edited at any time."""
        take_auto(group)
        check_edited(group, self._hyperparameters, READ_LATE)

    def _check_samples(self, group: dict[str, Any]) -> None:
        """Refuse samples that a group may have been edited into."""
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

    # -- the posterior ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_bases(self, solve: bool | None = None) -> None:
        """Let the bases of ``structure="eigenbasis"`` follow the gradients now; nothing happens without any.

        :meth:`step` does so itself, except where a CUDA graph captures it: call this between replays, every
        ``basis_every`` of them. ``solve=True`` computes eigenvectors anew, ``False`` makes a small turn towards them,
        which a graph can capture; by default the number of steps decides, with ever fewer of the first.
        """
        if solve is not None:
            check_flag("solve", solve)
        if self._sampling.drawn_samples or not self._sampling.is_mean:
            raise RuntimeError("refresh_bases() in the middle of a step: call it after step(), before the next sample.")
        self._prepare()
        self._structure.refresh_bases(solve)

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
        ``noise_variance`` (of "gaussian"; 1 if it is left out) are what ``predict`` assumes by default.
        """
        check_model(model, "posterior(model)")
        self._structure.report_unusable(deferred=True)
        with self._as_groups_are_now():
            self._snapshots += 1
            temperatures = {group["temperature"] for group in self.param_groups}
            return self._structure.posterior(
                model,
                temperature=temperatures.pop() if len(temperatures) == 1 else None,
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
        steps = self._resolution.steps(self)  # which may bring another structure
        decided = self._structure.groups
        self._structure.prepare(steps, self.state)
        try:
            yield
        finally:
            self._structure.prepare(decided, self.state)

    @torch.no_grad()
    @at_the_mean
    def diagnose(self, objective: Objective | Iterable[Objective] | None = None) -> Diagnosis:
        """What looks wrong with the posterior, in words, each with the argument to change; ``print`` it.

        Best asked when some hundred steps have been made. It reads the state and changes nothing. With ``objective``,
        an :class:`vprop.Objective` or several of them over training or held-out data, it also compares the loss at the
        mean of the weights, that of samples, and that of a constant prediction; without data it cannot see that a
        model predicts no better than chance.
        """
        steps = [self._steps_made(group) for group in self.param_groups]
        losses = None
        if objectives := objectives_in(objective):
            # What is not finite has no posterior, and is found below.
            with suppress(FloatingPointError), self._as_groups_are_now():
                losses = compare_losses(self._structure.posterior(objectives[0].model, seed=0, snapshot=0), objectives)
        examples = self._structure.most_examples or None
        return diagnose(self.param_groups, steps, self._marginals(), self._structure.clipped, examples, losses)

    def _steps_made(self, group: dict[str, Any]) -> int:
        """How many steps the group has made: those of its busiest parameter."""
        return max((int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)), default=0)

    # -- checkpoints and copies ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Holds the seed, the step counts and the curvature, so a resumed run draws the same noise."""
        self._structure.report_unusable(deferred=True)
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
        loop, structure = self.__dict__.get("_loop"), self.__dict__.get("_structure")
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it to a copy; groups must have the keys that they had
        for group in self.param_groups:  # a checkpoint may be older than an argument
            for name, value in (self.defaults | {METHOD: self._method()}).items():
                group.setdefault(name, value)
        self._start_afresh()
        self._fit_structure(self.param_groups)
        if structure is not None:
            self._structure.take_over(structure)
        if loop is not None and loop.attached:
            self._loop.attached = True
            note_hooks(self._sampling)

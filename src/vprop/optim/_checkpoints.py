"""What outlives a step: checkpoints and copies of an optimizer, and the report of what steps have left out."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from vprop.kernels.table import new_counter
from vprop.optim._ledger import Ledger, note_hooks
from vprop.optim._loading import (
    METHOD,
    StateForm,
    check_form,
    check_is_mapping,
    check_same_method,
    check_same_parameters,
    read_state,
)
from vprop.optim._sampling import SamplingOptimizer
from vprop.precision import compute_dtype


class CheckpointedOptimizer(SamplingOptimizer):
    """An optimizer whose state can be saved, loaded, copied and pickled between steps."""

    _state_form: StateForm
    """What the structure keeps of each parameter."""
    _kept_when_loading: tuple[str, ...] = ()
    """Hyperparameters that stay what the optimizer was built with."""

    # -- NaN and infinity ------------------------------------------------------------------------------------

    def _count_unusable(self, count: Tensor) -> None:
        self._unusable_on(count.device).view(-1)[0] += count

    def _unusable_on(self, device: torch.device) -> Tensor:
        """Where elements that are left out are counted; the sum counts."""
        if device not in self._ledger.unusable:
            self._ledger.unusable[device] = new_counter(device)
        return self._ledger.unusable[device]

    def _report_unusable(self, deferred: bool) -> None:
        """Warn of gradient elements that were left out. Looking is free on a CPU and stalls the queue elsewhere."""
        if torch.compiler.is_compiling():
            return
        for device, total in self._ledger.unusable.items():
            if not (deferred or device.type == "cpu"):
                continue
            count = int(total.sum())
            if count:
                total.zero_()  # in place: a captured CUDA graph goes on counting here
                warnings.warn(
                    f"{count} gradient elements were NaN or infinite and were left out of the step: their mean and "
                    "curvature are unchanged. Look for an overflow in the loss, lower lr, or clip the gradients.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    # -- checkpoints -----------------------------------------------------------------------------------------

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
        self._refuse_inside_sample("load_state_dict()")
        self._leave()
        former, former_groups = dict(vars(self)), [(group, dict(group)) for group in self.param_groups]
        kept = [{name: group[name] for name in self._kept_when_loading} for group in self.param_groups]
        state: dict[Any, dict[str, Any]] = {}

        def read(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            nonlocal state
            groups = self._read_groups(final)
            state = self._read_state(final, groups)
            numbers = [group["params"] for group in final["param_groups"]]  # in place of parameters, which torch copies
            plain = [group | {"params": own} for group, own in zip(groups, numbers, strict=True)]
            return {**final, "state": {}, "param_groups": plain}

        def take_over(_: Optimizer) -> None:
            self.state.update(state)
            for group, own in zip(self.param_groups, kept, strict=True):
                group.update(own)

        handles = [
            self.register_load_state_dict_pre_hook(read),  # the last one
            self.register_load_state_dict_post_hook(take_over, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            vars(self).update(former)
            self._open_ledger(self._ledger)
            for group, entries in former_groups:
                group.clear()
                group.update(entries)
            self._hold_again()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def _read_groups(self, saved: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups of a checkpoint as they will be here, after all checks."""
        check_form(saved)
        check_same_parameters(saved, self.param_groups)
        check_same_method(saved, self._method())
        groups = []
        for own, theirs in zip(self.param_groups, saved["param_groups"], strict=True):
            group = self.defaults | theirs | {"params": own["params"], METHOD: self._method()}
            group.update({name: own[name] for name in self._kept_when_loading})
            if "differentiable" not in own:
                group.pop("differentiable", None)  # of a copy by an earlier version
            self._check_group(group)
            groups.append(group)
        self._check_groups_together(groups)
        for group in groups:
            for name in self._kept_when_loading:
                del group[name]
        return groups

    def _read_state(self, saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """The state of a checkpoint as it will be here, after all checks."""
        state = read_state(saved, groups, self._state_form, self._state_dtype)
        self._check_state(state, groups)
        return state

    @classmethod
    def _method(cls) -> str:
        """The name of the class that chooses curvature and update: subclasses with other defaults do as it does."""
        chooses = ("_curvature", "_rule")
        return next((base for base in cls.__mro__ if any(name in vars(base) for name in chooses)), cls).__name__

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters that are not allowed, and put the others into the form that the updates read."""

    def _check_groups_together(self, groups: list[dict[str, Any]]) -> None:
        """Refuse groups that do not go together."""
        self._samples_in(groups)

    def _check_state(self, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Refuse a state, of which each tensor is as it should be, that does not go together."""

    def _state_dtype(self, key: str, p: Tensor) -> torch.dtype:
        """The precision that a tensor of the state is kept in."""
        return compute_dtype(p)

    def __getstate__(self) -> dict[str, Any]:
        if self._ledger.plan is not None or self._ledger.saved is not None or self._ledger.aside is not None:
            raise RuntimeError(
                "The optimizer cannot be copied or pickled while a sample is in the weights: the copy's weights would "
                "keep the noise. Call optimizer.discard_samples() first, or copy after step()."
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it to a copy; groups must have the keys that they had
        for group in self.param_groups:  # a checkpoint may be older than an argument
            for name, value in (self.defaults | {METHOD: self._method()}).items():
                group.setdefault(name, value)
        former = self.__dict__.get("_ledger", Ledger())
        self._open_ledger(
            Ledger(
                attached=former.attached,
                captured=former.captured,
                own_gradients=former.own_gradients,
            )
        )
        if former.attached:
            note_hooks(self._ledger)

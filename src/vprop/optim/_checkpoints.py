"""What outlives a step: checkpoints and copies of an optimizer, and the report of what steps have left out."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from vprop.kernels.table import new_counter
from vprop.optim._arguments import check_group, check_same_parameters
from vprop.optim._ledger import Ledger, note_hooks
from vprop.optim._sampling import SamplingOptimizer
from vprop.placement import part_of
from vprop.precision import compute_dtype


class CheckpointedOptimizer(SamplingOptimizer):
    """An optimizer whose state can be saved, loaded, copied and pickled between steps."""

    _matrix_prior = False
    """Whether the structure can have a prior with correlations."""

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
        """As torch's, but the state keeps its precision: torch would round it to that of bfloat16 weights."""
        self._refuse_inside_sample("load_state_dict()")
        self._leave()
        loaded = state_dict

        def see_what_other_hooks_made_of_it(_: Optimizer, final: dict[str, Any]) -> None:
            nonlocal loaded
            loaded = final
            check_same_parameters(final, self.param_groups, matrix=self._matrix_prior)

        handle = self.register_load_state_dict_pre_hook(see_what_other_hooks_made_of_it)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        members = [(group, p) for group in self.param_groups for p in group["params"]]
        for saved_id, (group, p) in zip(saved_ids, members, strict=True):
            for key, value in loaded["state"].get(saved_id, {}).items():
                if key == "step":
                    self.state[p][key] = value.to(p.device if group["capturable"] else "cpu", copy=True)
                else:
                    dtype = self._state_dtype(key, p)
                    self.state[p][key] = part_of(value, p).to(device=p.device, dtype=dtype, copy=True)
        for group in self.param_groups:
            check_group(group, self._matrix_prior)

    def _state_dtype(self, key: str, p: Tensor) -> torch.dtype:
        """The precision that a tensor of the state is kept in."""
        return compute_dtype(p)

    def __getstate__(self) -> dict[str, Any]:
        if self._ledger.plan is not None or self._ledger.saved is not None or self._ledger.aside is not None:
            raise RuntimeError(
                "The optimizer cannot be copied or pickled while a sample is in the weights: the copy's weights would "
                "keep the noise. Call optimizer.discard_samples() first, or copy after step() (without draw_ahead)."
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint may be older than an argument
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        former = self.__dict__.get("_ledger", Ledger())
        self._open_ledger(
            Ledger(
                attached=former.attached,
                draws_ahead=former.draws_ahead,
                captured=former.captured,
                own_gradients=former.own_gradients,
            )
        )
        if former.attached:
            note_hooks(self._ledger)

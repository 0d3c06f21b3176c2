"""Whole copies of spread parameters, which FSDP keeps between forwards: out of date once a sample is written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def drop_gathered(params: Iterable[Tensor]) -> None:
    """Let FSDP bring these parameters together anew at the next forward.

    It takes weights to change in a training step only, after a backward, which drops its copies. After a forward
    without a backward the root module keeps its own, and the next forward would see the weights of the last one.
    """
    ours = {id(p) for p in params}
    if not ours:
        return
    for module in _sharded_modules():
        for group in _groups_of(module):
            nothing_gathered = group.is_sharded and group._all_gather_result is None
            if not nothing_gathered and not ours.isdisjoint(id(own.sharded_param) for own in group.fsdp_params):
                group.wait_for_unshard()  # if it was asked for by unshard(async_op=True), it is out of date as well
                module.reshard()


def _sharded_modules() -> Iterator[Any]:
    """All modules that ``fully_shard`` was applied to. Parameters do not know theirs, but torch has a register."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    register = sys.modules.get("torch.distributed._composable_state")
    if fsdp is None or register is None:
        return
    for module in list(register._module_state_mapping):
        if isinstance(module, fsdp.FSDPModule):
            yield module


def _groups_of(module: Any) -> Iterator[Any]:
    """The sets of parameters that the module brings together in one go."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.11 has one at most
    yield from (group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None)

"""Checkpoints of an optimizer: taken over whole, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

from vprop.optim.loading import (
    METHOD,
    check_form,
    check_same_method,
    check_same_parameters,
    check_same_structures,
    read_state,
)
from vprop.optim.resolution import resolved
from vprop.parallel.sharding import local_grad

if TYPE_CHECKING:
    from vprop.optim.optimizer import VariationalOptimizer


def load(optimizer: VariationalOptimizer, state_dict: dict[str, Any]) -> None:
    """What ``load_state_dict`` does. All of the checkpoint is read and checked before any of it counts."""
    former, former_groups = dict(vars(optimizer)), [(group, dict(group)) for group in optimizer.param_groups]
    names = optimizer._kept_when_loading
    kept = [{name: group[name] for name in names} for group in optimizer.param_groups]
    state: dict[Any, dict[str, Any]] = {}

    def read(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
        nonlocal state
        groups = _read_groups(optimizer, final)
        state = read_state(final, groups, optimizer._structure.spec_of)
        optimizer._structure.check_state(resolved(optimizer, groups), state)
        numbers = [group["params"] for group in final["param_groups"]]  # in place of parameters, which torch copies
        plain = [
            {name: value for name, value in group.items() if name not in names} | {"params": own}
            for group, own in zip(groups, numbers, strict=True)
        ]
        return {**final, "state": {}, "param_groups": plain}

    def take_over(_: Optimizer) -> None:
        optimizer.state.update(state)
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update(own)

    handles = [
        optimizer.register_load_state_dict_pre_hook(read),  # the last one
        optimizer.register_load_state_dict_post_hook(take_over, prepend=True),
    ]
    try:
        Optimizer.load_state_dict(optimizer, state_dict)
    except BaseException:
        vars(optimizer).update(former)
        optimizer._watch_lifetime()
        for group, entries in former_groups:
            group.clear()
            group.update(entries)
        raise
    finally:
        for handle in handles:
            handle.remove()


def _read_groups(optimizer: VariationalOptimizer, saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of a checkpoint as they will be here, after all checks."""
    check_form(saved)
    check_same_parameters(saved, optimizer.param_groups)
    method = optimizer._method()
    check_same_method(saved, method)
    check_same_structures(saved, optimizer.param_groups)
    groups = []
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group = optimizer.defaults | theirs | {"params": own["params"], METHOD: method}
        group.update({name: own[name] for name in optimizer._kept_when_loading})
        if "differentiable" not in own:
            group.pop("differentiable", None)  # of a copy by an earlier version
        optimizer._check_group(group)
        groups.append(group)
    return groups


def is_asked_for_state(optimizer: Any) -> bool:
    """Whether this is no step, but a request for the state that a checkpoint can be loaded into.

    That is how ``torch.distributed.checkpoint`` asks: by a step before anything was done, of length zero, on
    gradients of zero.
    """
    if torch.compiler.is_compiling() or any(optimizer.state.values()):
        return False
    if any(float(group["lr"]) != 0 for group in optimizer.param_groups):
        return False
    grads = [local_grad(p) for p in optimizer._params if p.requires_grad]
    return all(grad is not None and not bool(grad.any()) for grad in grads)

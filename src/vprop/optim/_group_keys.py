"""Entries of a parameter group that are no arguments of the optimizer: which do no harm, and which would be lost."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from vprop.checks import invalid
from vprop.optim._arguments import callers_level
from vprop.optim.hyperparameters import OF_OTHERS, Hyperparameter

_OURS = frozenset({"params", "param_names", "auto_prior", "variational_method", "differentiable"})
_WRITTEN_BY_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "min_momentum", "base_momentum"}
    | {"warmup_steps", "last_epoch", "T_max", "lr_max", "lr_min"}
)
_MARKS = frozenset(
    {"name", "names", "group_name", "id", "tag", "label", "index", "layer", "layer_id", "layer_idx", "layer_name"}
    | {"block", "depth", "module", "fqn", "fqns", "fix_lr", "no_decay", "is_bias", "bias_params"}
    | {"lr_scale", "lr_mult", "lr_factor", "layer_decay", "weight_decay_mult", "wd_mult", "wd_scale", "decay_mult"}
)
"""What training programs write into groups for themselves, and multiply into lr before the optimizer sees it."""
ALLOWED = _OURS | _WRITTEN_BY_SCHEDULERS | _MARKS


def check_entries(group: dict[str, Any], arguments: Collection[str], optimizer: str) -> None:
    """Refuse entries that ask for something that the optimizer would not do; warn of those it cannot judge.

    ``arguments`` are the names that it knows. An unknown entry that is off (0, False, None) asks for nothing: there are
    frameworks that write ``weight_decay=0`` into every group.
    """
    for name in map(str, group):
        value = group.get(name)
        if name in arguments or name in ALLOWED:
            continue
        meant = difflib.get_close_matches(name.lower(), arguments, n=1, cutoff=0.8)
        if meant:
            raise ValueError(
                f"Invalid {name}={value!r} in a parameter group: {optimizer} has no such argument. Did you mean "
                f"{meant[0]}?"
            )
        if _is_off(value):
            continue
        if name in _REMEDIES:
            raise invalid(name, value, f"0 with {optimizer}, {_REMEDIES[name][0]}", _REMEDIES[name][1])
        if name in OF_OTHERS:
            raise invalid(name, value, f"left out with {optimizer}, which has no such argument", OF_OTHERS[name])
        if not isinstance(value, str):  # words are marks for somebody else
            warnings.warn(
                f"A parameter group has {name}={value!r}, which is no argument of {optimizer} and changes nothing. It "
                f"has: {', '.join(sorted(arguments))}.",
                UserWarning,
                stacklevel=callers_level(),
            )


def drop_duplicates(group: dict[str, Any], declared: Mapping[str, Hyperparameter]) -> None:
    """Let a group hold each parameter once, with what goes with it. Of one given twice torch has warned.

    It would have two samples at a time, and half of its gradients.
    """
    params, positions = group["params"], dict[int, int]()
    for i, p in enumerate(params):
        positions.setdefault(id(p), i)
    if len(positions) == len(params):
        return
    lists = [name for name, hyperparameter in declared.items() if hyperparameter.per_parameter]
    for name in ("params", "param_names", *lists):
        if isinstance(group.get(name), list | tuple) and len(group[name]) == len(params):
            group[name] = [group[name][i] for i in positions.values()]


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | Tensor) and not bool(value != 0))


_REMEDIES = {
    "weight_decay": (
        "whose prior does its work",
        "Give the group prior_precision=weight_decay*num_data in its place (weight_decay=0.1 of 50,000 examples is "
        "prior_precision=5000), and leave weight_decay out (in a Trainer: TrainingArguments(weight_decay=0)).",
    ),
    "momentum": (
        "which has betas",
        "Give the group betas=(momentum, decay of the curvature) in its place, and leave momentum out.",
    ),
}

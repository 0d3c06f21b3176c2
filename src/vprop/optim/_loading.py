"""What a checkpoint must be: all of it is read and checked before an optimizer takes over any of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vprop.checks import is_number
from vprop.parallel.sharding import shard_of, to_local

METHOD = "variational_method"
"""The entry of a parameter group that says which method made its state; groups are what every way of saving keeps."""

_REBUILD = (
    "Build model and optimizer as they were when it was saved: the same layers frozen, the same adapters, the same "
    "groups. For another model make a new optimizer; what was learned of its parameters can be its prior, "
    "posterior.as_prior()."
)


@dataclass(frozen=True)
class StateForm:
    """What a structure keeps of each parameter, beside the step count."""

    needed: tuple[str, ...]
    """Without these there is no going on."""
    like_parameter: tuple[str, ...]
    """Tensors of the parameter's own shape."""
    shared: tuple[str, ...] = ()
    """Tensors over several parameters, which the structure checks itself."""
    positive: tuple[str, ...] = ()
    may_be_anything: tuple[str, ...] = ()
    """Tensors whose NaNs do no harm: the update looks at them before it uses them."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.like_parameter + self.shared


def refused(what: str, remedy: str) -> ValueError:
    """The one form of message for a checkpoint that cannot be loaded."""
    return ValueError(f"load_state_dict(): {what}. {remedy}")


def broken(what: str) -> ValueError:
    """For a checkpoint that no optimizer of ours has written."""
    return refused(what, "The optimizer is as it was; load an earlier checkpoint, or let the optimizer start afresh.")


def other_shape(name: str, shape: tuple[int, ...], p: Tensor) -> ValueError:
    """For a checkpoint of other parameters."""
    return refused(f"{name} has shape {shape} in the checkpoint and {tuple(p.shape)} here", _REBUILD)


def check_is_mapping(saved: Any) -> None:
    """Refuse what cannot be a ``state_dict()``."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"load_state_dict(): got {type(saved).__name__}, must be what optimizer.state_dict() returned.")


def check_form(saved: Any) -> None:
    """Refuse what is no ``state_dict()`` of any optimizer."""
    check_is_mapping(saved)
    missing = [key for key in ("state", "param_groups") if key not in saved]
    if missing:
        raise broken(f"the checkpoint has no {missing[0]!r}, only {sorted(map(str, saved))}")
    groups, state = saved["param_groups"], saved["state"]
    if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise broken("'param_groups' of the checkpoint must be a list of dicts that each have 'params'")
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in _of_parameters(saved)):
        raise broken("'state' of the checkpoint must be a dict with a dict for each parameter")


def _of_parameters(saved: Mapping[str, Any]) -> list[Any]:
    numbers = {number for group in saved["param_groups"] for number in group["params"]}
    return [entry for number, entry in saved["state"].items() if number in numbers]


def check_same_parameters(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint of other groups than the optimizer has, or of an optimizer of another family."""
    theirs, ours = ([len(group["params"]) for group in some] for some in (saved["param_groups"], groups))
    if theirs != ours:
        raise refused(f"the checkpoint has {_sizes(theirs)}, this optimizer {_sizes(ours)}", _REBUILD)
    if any("num_data" not in group for group in saved["param_groups"]):
        raise refused(
            "this is no checkpoint of a variational optimizer, whose groups have num_data",
            "Load the model's weights alone, and let the optimizer start afresh.",
        )


def check_same_method(saved: Mapping[str, Any], method: str) -> None:
    """Refuse the checkpoint of another method. One that does not say which is older than the entry."""
    for group in saved["param_groups"]:
        theirs = group.get(METHOD, method)
        if theirs != method:
            raise refused(
                f"this is a checkpoint of {theirs}, the optimizer is {method}, whose state means something else",
                f"Build the optimizer that saved it ({theirs}); or go on from its posterior: load the checkpoint into "
                f"{theirs}, and give {method} the arguments that posterior.as_prior() makes.",
            )


def read_state(
    saved: Mapping[str, Any], groups: list[dict[str, Any]], form: StateForm, dtype_of: Any
) -> dict[Any, dict[str, Any]]:
    """The state by parameter, copied to where it belongs; of entries that no parameter has, as it is.

    ``groups`` are those of the optimizer as they will be; ``dtype_of(key, p)`` is the precision of a tensor.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    owners = [(p, group) for group in groups for p in group["params"]]
    owner_of = dict(zip(numbers, owners, strict=True))
    position = {number: i for i, number in enumerate(numbers)}
    state: dict[Any, dict[str, Any]] = {}
    for number, entry in saved["state"].items():
        if number not in owner_of:
            state[number] = entry
            continue
        p, group = owner_of[number]
        name = f"parameter {position[number]}"
        _check_entry(name, entry, p, form)
        state[p] = {key: _taken(name, key, value, p, group, form, dtype_of) for key, value in entry.items()}
    return state


def _check_entry(name: str, entry: Mapping[str, Any], p: Tensor, form: StateForm) -> None:
    missing = [key for key in ("step", *form.needed) if key not in entry]
    if entry and missing:
        raise broken(f"the state of {name} has no {missing[0]!r}, only {sorted(map(str, entry))}")
    for key in form.tensors:
        value = entry.get(key, p)
        if not isinstance(value, Tensor):
            raise broken(f"{key!r} of {name} is a {type(value).__name__}, must be a tensor")
        if key in form.like_parameter and value.shape != p.shape:
            raise other_shape(name, tuple(value.shape), p)


def _taken(name: str, key: str, value: Any, p: Tensor, group: dict[str, Any], form: StateForm, dtype_of: Any) -> Any:
    """An entry of the state as a copy in its place."""
    if key == "step":
        return step_count(value, name).to(p.device if group["capturable"] else "cpu")
    if key not in form.tensors:  # somebody else's, who put it there by a hook
        return value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    value = shard_of(value, p) if key in form.like_parameter else value
    value = value.detach().to(device=p.device, dtype=dtype_of(key, p), copy=True)
    if key not in form.may_be_anything and not bool(torch.isfinite(to_local(value)).all()):
        raise broken(f"{key!r} of {name} holds NaN or infinity")
    if key in form.positive and not bool((to_local(value) > 0).all()):
        raise broken(f"{key!r} of {name} must be > 0 everywhere")
    return value


def step_count(value: Any, name: str) -> Tensor:
    """The number of steps as the updates read it, from a tensor or a number."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not is_number(number) or number != number // 1 or not 0 <= number < 2**63:
        raise broken(f"'step' of {name} is {value!r}, must be a whole number >= 0")
    return torch.tensor(int(number), dtype=torch.int64, device="cpu")


def _sizes(counts: list[int]) -> str:
    groups = "1 parameter group" if len(counts) == 1 else f"{len(counts)} parameter groups"
    return f"{groups} with {' + '.join(map(str, counts))} parameters"

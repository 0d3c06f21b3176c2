"""What a checkpoint must be: all of it is read and checked before an optimizer takes over any of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vprop.checks import is_number
from vprop.parallel.sharding import shard_of, to_local
from vprop.structures.base import TensorSpec
from vprop.structures.checks import REBUILD, broken, other_shape, refused

SpecOf = Callable[[Mapping[str, Any]], Mapping[str, TensorSpec]]
METHOD = "variational_method"
"""The entry of a parameter group that says which method made its state; groups are what every way of saving keeps."""


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
        raise refused(f"the checkpoint has {_sizes(theirs)}, this optimizer {_sizes(ours)}", REBUILD)
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


def check_same_structures(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Refuse the checkpoint of another structure; one that does not say which is older than the others."""
    for i, (theirs, own) in enumerate(zip(saved["param_groups"], groups, strict=True)):
        wanted, found = own.get("structure", "diagonal"), theirs.get("structure", "diagonal")
        if "structure" in own and found != wanted:
            raise refused(
                f"group {i} of the checkpoint has structure={found!r}, that of this optimizer {wanted!r}",
                f"Build the optimizer with structure={found!r} for that group.",
            )


def read_state(saved: Mapping[str, Any], groups: list[dict[str, Any]], spec_of: SpecOf) -> dict[Any, dict[str, Any]]:
    """The state by parameter, copied to where it belongs; of entries that no parameter has, as it is.

    ``groups`` are those of the optimizer as they will be; ``spec_of`` says what the structure of a group keeps
    of a parameter.
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
        spec = spec_of(group)
        _check_entry(name, entry, p, spec)
        state[p] = {key: _taken(name, key, value, p, group, spec) for key, value in entry.items()}
    return state


def _check_entry(name: str, entry: Mapping[str, Any], p: Tensor, spec: Mapping[str, TensorSpec]) -> None:
    needed = ["step", *(key for key, tensor in spec.items() if tensor.needed)]
    missing = [key for key in needed if key not in entry]
    if entry and missing:
        raise broken(f"the state of {name} has no {missing[0]!r}, only {sorted(map(str, entry))}")
    for key, tensor in spec.items():
        value = entry.get(key, p)
        if not isinstance(value, Tensor):
            raise broken(f"{key!r} of {name} is a {type(value).__name__}, must be a tensor")
        if tensor.like_parameter and value.shape != p.shape:
            raise other_shape(name, tuple(value.shape), p)
        if key in entry and tensor.shape is not None and tuple(value.shape) != tensor.shape:
            raise broken(f"{key!r} of {name} has shape {tuple(value.shape)}, must have {tensor.shape}")


def _taken(name: str, key: str, value: Any, p: Tensor, group: dict[str, Any], specs: Mapping[str, TensorSpec]) -> Any:
    """An entry of the state as a copy in its place."""
    if key == "step":
        return step_count(value, name).to(p.device if group["capturable"] else "cpu")
    spec = specs.get(key)
    if spec is None:  # somebody else's, who put it there by a hook
        return value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    value = shard_of(value, p) if spec.like_parameter else value
    value = value.detach().to(device=p.device, dtype=spec.dtype_for(p), copy=True)
    if not spec.may_be_anything and not bool(torch.isfinite(to_local(value)).all()):
        raise broken(f"{key!r} of {name} holds NaN or infinity")
    if spec.positive and not bool((to_local(value) > 0).all()):
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

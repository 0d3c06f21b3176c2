"""The posterior of a model's last layer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


def last_layer(posterior: Posterior, head: Any) -> Posterior:
    """What ``posterior.last_layer`` does: the marginal of the head's weights, with the others at their mean."""
    name = _default(posterior) if head is None else head
    module = _module(posterior.model, name)
    _refuse_shared(posterior.model, name, module)  # their names may be those of another module
    own = [f"{name}.{inner}" for inner, _ in module.named_parameters()]
    names = [parameter for parameter in posterior.mean if parameter in own]
    if not names:
        raise ValueError(
            f"last_layer({name!r}): none of this module's weights has a posterior, must have one at least. Those that "
            f"have: {_some(list(posterior.mean))}."
        )
    other = copy.copy(posterior) if names == list(posterior.mean) else posterior._restricted(names)
    rest = {key: mean for key, mean in posterior.mean.items() if key not in names}
    other.head, other.constants = name, posterior.constants | posterior._in_model_dtypes(rest)
    return other


def _default(posterior: Posterior) -> str:
    """The smallest module that all weights belong to; of a posterior of all of the model the last that has weights."""
    owners = [name.rpartition(".")[0].split(".") for name in posterior.mean]
    shared = []
    for words in zip(*owners, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    name = ".".join(shared)
    everything = {key for key, _ in posterior.model.named_parameters()} == set(posterior.mean)
    if name and not everything:
        return name
    with_weights = [
        key
        for key, module in posterior.model.named_modules()
        if key and next(module.parameters(recurse=False), None) is not None
    ]
    if not with_weights:
        raise ValueError(
            "last_layer(): the model is a single module, and has no last one. Predict with the posterior itself."
        )
    return with_weights[-1]


def _module(model: nn.Module, name: Any) -> nn.Module:
    modules = {key: module for key, module in model.named_modules() if key}
    if isinstance(name, nn.Module):
        raise TypeError(
            f"last_layer(head): got the module {type(name).__name__}, must be its name in the model, "
            f"one of {_some(list(modules))}."
        )
    if name not in modules:
        found = f"It has {_some(list(modules))}." if modules else "It is a single one: leave out last_layer()."
        raise ValueError(f"last_layer({name!r}): the model has no such module. {found}")
    return modules[name]


def _refuse_shared(model: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a head whose weights the body uses as well: with other weights the body's outputs are others."""
    own = {id(p) for p in module.parameters()}
    for key, p in model.named_parameters(remove_duplicate=False):
        if id(p) in own and not key.startswith(f"{name}."):
            raise ValueError(
                f"last_layer({name!r}): this module shares the weight {key!r} with the rest of the model, must have "
                "its own. Predict with the posterior itself."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[-6:])
    return shown if len(names) <= 6 else f"…, {shown}"

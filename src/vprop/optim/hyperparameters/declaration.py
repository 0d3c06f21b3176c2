"""What is declared of a hyperparameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

from typing_extensions import NotRequired, Required, get_type_hints

Check = Callable[[str, dict[str, Any]], None]
"""Looks at ``group[name]``; may put it into the form that the updates read."""
REQUIRED = inspect.Parameter.empty


def anything(name: str, group: dict[str, Any]) -> None:
    """No check."""


@dataclass(frozen=True)
class Hyperparameter:
    """One declaration. Name and type are those of the field of the ``TypedDict`` that it annotates."""

    words: str
    """What the documentation says of it."""
    default: Any = REQUIRED
    check: Check = anything
    """Refuses values that it cannot have, whatever the other entries of the group are."""
    fits: Check = anything
    """Refuses values that do not go with the other entries, each of which has passed its own check."""
    shared_by_groups: bool = False
    """Whether one covariance over all groups needs one value in all of them."""
    per_parameter: bool = False
    """Whether it can be a list that goes with the parameters of a group."""
    type: Any = Any


def declared_in(arguments: Any) -> dict[str, Hyperparameter]:
    """The hyperparameters of a ``TypedDict``, in its order: each field is ``Annotated[type, Hyperparameter(...)]``."""
    declared = {}
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        while get_origin(hint) in (Required, NotRequired):
            (hint,) = get_args(hint)
        if get_origin(hint) is not Annotated or not isinstance(hint.__metadata__[0], Hyperparameter):
            raise TypeError(f"{arguments.__name__}.{name}: must be Annotated[type, Hyperparameter(...)], is {hint}.")
        declared[name] = replace(hint.__metadata__[0], type=hint.__origin__)
    return declared

"""What follows from the declarations for a class: its constructor, the signature of it, its documentation."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, get_args

from typing_extensions import get_type_hints

from vprop.optim.hyperparameters.declaration import REQUIRED, Hyperparameter, declared_in
from vprop.optim.hyperparameters.shared import LR

PARAMS = "parameters, named parameters or groups, as for every torch optimizer. All hyperparameters can be set per "
PARAMS += "group, except ``mc_samples``, which all groups share."

Class = TypeVar("Class", bound=type)

OF_OTHERS = {
    "structure": "Vprop, Vario and IVON have a choice of it; VON and VONG are full, all others diagonal.",
    "preconditioner": "Vprop, Vario, IVON, VOGN, CVI and MeanField have it.",
}
"""Arguments of other optimizers of this library, whose values are words."""

_ELSEWHERE = OF_OTHERS | {
    "weight_decay": "The prior does its work: pass prior_precision=weight_decay*num_data.",
    "momentum": "Pass betas=(momentum, decay of the curvature).",
    "eps": "The prior keeps the curvature away from zero: leave eps out.",
    "ess": "Pass num_data=len(train_set), which is what it is without temperature (ess = num_data/temperature).",
}
"""Arguments of other optimizers, and what to write for them here."""

_EXAMPLES = {"num_data": "num_data=len(train_set)", "batch_size": "batch_size=loader.batch_size"}
"""Of arguments that must be given."""


def with_hyperparameters(**changes: dict[str, Any]) -> Callable[[Class], Class]:
    """Complete a class whose ``__init__(self, params, lr=..., **hyperparameters: Unpack[Arguments])`` names them.

    Its constructor then refuses other names, and hands on all of ``Arguments``, those that were not given with their
    defaults; its signature and its documentation list them. ``changes`` are what the method has otherwise than the
    declarations: ``betas={"default": (0.9, 0.999)}``.
    """

    def complete(cls: Any) -> Any:
        init = cls.__init__
        hints = get_type_hints(init, include_extras=True)
        (arguments,) = get_args(hints["hyperparameters"])
        lr = replace(LR, default=inspect.signature(init).parameters["lr"].default, type=hints["lr"])
        own = {"lr": lr} | declared_in(arguments)
        for name, change in changes.items():
            own[name] = replace(own[name], **change)
        cls.__init__ = _constructor(init, own)
        cls.__doc__ = _with_arguments(cls.__doc__, own)
        # A subclass may take fewer than its base, which then gives the others; the group has them all.
        cls._hyperparameters = cls._hyperparameters | own
        return cls

    return complete


def _constructor(init: Callable[..., None], own: dict[str, Hyperparameter]) -> Callable[..., None]:
    """``init`` behind a check of the names, with the signature that is meant."""

    @functools.wraps(init)
    def construct(self: Any, *positional: Any, **given: Any) -> None:
        _check_names(init.__qualname__, own, given)
        defaults = {name: declared.default for name, declared in own.items() if name != "lr"}
        init(self, *positional, **(defaults | given))

    first = list(inspect.signature(init).parameters.values())[:3]  # self, params, lr
    listed = [*first[:2], first[2].replace(annotation=own["lr"].type)]
    for name, declared in list(own.items())[1:]:
        kind = inspect.Parameter.KEYWORD_ONLY
        listed.append(inspect.Parameter(name, kind, default=declared.default, annotation=declared.type))
    construct.__signature__ = inspect.Signature(listed, return_annotation=None)  # type: ignore[attr-defined]
    construct.__annotations__ = {p.name: p.annotation for p in listed[1:]} | {"return": None}
    return construct


def _check_names(constructor: str, own: dict[str, Hyperparameter], given: dict[str, Any]) -> None:
    """Refuse names as Python does, and say what to write instead."""
    for name in given:
        if name not in own and name != "params":
            meant = difflib.get_close_matches(name.lower(), own, n=1)
            hint = f". Did you mean {meant[0]!r}?" if meant else ""
            if name in _ELSEWHERE:
                hint = f". {_ELSEWHERE[name]}"
            raise TypeError(f"{constructor}() got an unexpected keyword argument {name!r}{hint}")
    missing = [name for name, declared in own.items() if declared.default is REQUIRED and name not in given]
    if missing:
        what = "argument" if len(missing) == 1 else "arguments"
        names = " and ".join(map(repr, missing))
        examples = [_EXAMPLES[name] for name in missing if name in _EXAMPLES]
        hint = f". Pass {', '.join(examples)}." if examples else ""
        raise TypeError(f"{constructor}() missing {len(missing)} required keyword-only {what}: {names}{hint}")


def _with_arguments(doc: str | None, own: dict[str, Hyperparameter]) -> str | None:
    """The documentation of a class with its arguments, before its examples."""
    if doc is None:  # python -OO
        return None
    words = {"params": PARAMS} | {name: declared.words for name, declared in own.items()}
    entries = [
        textwrap.fill(f"{name}: {text}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
        for name, text in words.items()
    ]
    section = "\n".join(["Args:", *entries])
    before, *examples = re.split(r"^(?=>>> )", inspect.cleandoc(doc), maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join([before.rstrip(), section, *examples]) + "\n"

"""What to do about a posterior that looks wrong, as words and as arguments.

Advice is there to be followed, and tests follow it to the letter. So a remedy is one that does no harm where the
symptom is a false alarm. That rules out what suggests itself. In a network most weights have next to no curvature:
whatever lets their noise grow to the prior's (a start that is forgotten, a smaller ``hess_init`` or prior precision)
drowns the signal, and a larger prior precision pulls the weights to zero as well. A bound relative to the weights does
neither. A step that divides by the precision is made smaller by it, and where the next lr would be is a matter of luck;
one that divides by the root is not. So the remedy of the one kind is the other kind, :class:`vprop.Vario`, whose bound
it is, and of the other kind the bound alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOISE_LIMIT = 0.2
"""Serves networks of all kinds."""
FIND_LR = "find lr anew (vprop.lr_find), and train from the start."


@dataclass(frozen=True)
class Advice:
    """What to change: another optimizer, or its arguments, or the step size."""

    words: str
    optimizer: str | None = None
    """The name of the class that is advised; ``None``: the same."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments beside ``num_data``."""
    find_lr: bool = False
    """Whether the step size has to be found anew."""


def another_lr() -> Advice:
    """The step size alone."""
    return Advice(FIND_LR.capitalize(), find_lr=True)


def less_noise(settings: Mapping[str, Any], examples: int | None, is_network: bool) -> Advice | None:
    """Against noise that drowns the signal of a network.

    ``None`` for one layer, whose noise goes through no other, and where the noise is bounded already.
    """
    if not is_network:
        return None
    if not _keeps_steps(settings):
        return vario(settings, examples)
    return _limited(NOISE_LIMIT) if settings["noise_limit"] > NOISE_LIMIT else None


def still_less_noise(settings: Mapping[str, Any], examples: int | None, is_network: bool) -> Advice | None:
    """The same where data say that the noise costs too much, be it of one layer or bounded; ``None`` for no idea."""
    if settings.get("preconditioner") in ("root", "identity") and not is_network:
        return None
    if is_network and _keeps_steps(settings):
        return _limited(min(NOISE_LIMIT, settings["noise_limit"] / 2))
    return vario(settings, examples)


def _limited(limit: float) -> Advice:
    return Advice(f"Set noise_limit={limit:g}, and train from the start.", change={"noise_limit": limit})


def mini_batches(settings: Mapping[str, Any], examples: int, is_network: bool) -> Advice:
    """For squared gradients that count for all data, where each is a mean of a few.

    One layer keeps its optimizer and its lr. A network needs a bound on the noise that becomes larger by it.
    """
    if is_network and "preconditioner" in settings:
        return vario(settings, examples)
    return Advice(f"Set batch_size={examples}, and train from the start.", change={"batch_size": examples})


def vario(settings: Mapping[str, Any], examples: int | None) -> Advice:
    """The optimizer that is made for mini-batches and networks, with the prior and the temperature that there are."""
    change: dict[str, Any] = {} if examples is None else {"batch_size": examples}
    prior = "auto" if settings.get("auto_prior") is not None else settings["prior_precision"]
    if isinstance(prior, str | float | int) and prior != 1:
        change["prior_precision"] = prior
    if settings["temperature"] != 1:
        change["temperature"] = settings["temperature"]
    if settings.get("structure") == "full":  # which has no bound, in Vario too
        change["structure"] = "diagonal"
    arguments = {"num_data": settings["num_data"], "batch_size": "M"} | change
    call = ", ".join(f"{name}={_shown(value)}" for name, value in arguments.items())
    note = " (M examples in a mini-batch)" if examples is None else ""
    return Advice(f"Use vprop.Vario(params, {call}){note}, {FIND_LR}", "Vario", change, find_lr=True)


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value if value == "M" else f'"{value}"'
    return f"{value:.15g}"


def _keeps_steps(settings: Mapping[str, Any]) -> bool:
    """Whether a bound on the noise leaves the steps as they are: Adam's kind and SGD's, and Vadam's, its only one."""
    return settings.get("preconditioner", "root") != "precision" and "noise_limit" in settings

"""Checks that all of the library shares: every error names the argument, its value, what is allowed, what to do."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import nn


def invalid(name: str, value: object, allowed: str, remedy: str) -> ValueError:
    """The one form of message for a bad argument."""
    return ValueError(f"Invalid {name}={shown(value)}: must be {allowed}. {remedy}")


def shown(value: object) -> str:
    """``repr(value)``, unless it is longer than anybody reads (an int of hundreds of digits, a large array)."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text)} characters)"


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether ``value`` is a real (or whole) number, NumPy's included, and not a bool."""
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold: not NaN, not infinite, not an int of 400 digits."""
    try:
        return is_number(value) and math.isfinite(float(value))
    except OverflowError:
        return False


def check_seed(seed: Any) -> int:
    """``seed`` as an int, if it is a key of the generator; others would silently stand for one of these."""
    if not is_number(seed, whole=True) or not 0 <= seed < 2**64:
        raise invalid("seed", seed, "an integer in [0, 2**64)", "Pass e.g. seed=0.")
    return int(seed)


def check_num_samples(num_samples: Any, *, least: int = 1, default: int = 32) -> int:
    """``num_samples`` as an int, if it is a number of samples. The generator counts no further than 2**30."""
    if not is_number(num_samples, whole=True) or not least <= num_samples < 2**30:
        allowed = f"an integer >= {least} (and below 2**30)"
        raise invalid("num_samples", num_samples, allowed, f"{default} is the default.")
    return int(num_samples)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither ``True`` nor ``False``: a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False", f"Pass {name}=True or leave it out.")


def check_loss(loss_fn: Any, where: str) -> None:
    """Refuse what cannot be called as ``loss_fn(output, y)``."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        found, remedy = f"the class {loss_fn.__name__}", f"Pass an instance of it, {loss_fn.__name__}()."
    elif not callable(loss_fn):
        found, remedy = shown(loss_fn), "Pass e.g. torch.nn.functional.cross_entropy."
    else:
        return
    raise TypeError(
        f"{where}: got loss_fn={found}, must be a function with loss_fn(model(x), y) the mean loss. {remedy}"
    )


def check_model(model: Any, where: str) -> None:
    """Refuse what is no module; ``where`` names the argument for the message, e.g. ``"posterior(model)"``."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        found, remedy = f"the class {model.__name__}", f"Pass an instance of it, {model.__name__}(...)."
    else:
        found, remedy = f"{type(model).__name__} ({shown(model)})", "Pass the module whose weights are trained."
    raise TypeError(f"{where}: got {found}, must be a torch.nn.Module. {remedy}")

"""Checks that every metric shares: every error names the argument, what it is, what is allowed, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from vprop import checks
from vprop.checks import is_number

MOST_BINS = 1_000_000


def invalid(name: str, found: str, allowed: str, remedy: str) -> ValueError:
    """The one form of message for a bad tensor."""
    return ValueError(f"Invalid {name}: {found}, must be {allowed}. {remedy}")


def shape_of(tensor: Tensor) -> str:
    """A shape as one writes it, ``(3, 2)``."""
    return str(tuple(tensor.shape))


def check_tensor(name: str, value: object) -> Tensor:
    """``value``, unless it is no real tensor with at least one element."""
    if not isinstance(value, Tensor):
        # as_tensor() on everything would silently round a list of floats to float32
        # torch looks for the rows 0, 1, … of a pandas Series by their labels, which need not be these
        call = f"torch.tensor({name}.to_numpy())" if hasattr(value, "to_numpy") else f"torch.as_tensor({name})"
        raise invalid(name, f"is a {type(value).__name__}", "a torch.Tensor", f"Convert it with {call}.")
    if value.is_meta or value.layout != torch.strided:
        found = "is on the meta device" if value.is_meta else f"has layout {value.layout}"
        raise invalid(name, found, "a dense tensor with values", "Move it to a real device, and use .to_dense().")
    if value.is_complex():
        raise invalid(name, f"has dtype {value.dtype}", "real", "Pass real and imaginary parts one by one.")
    if value.numel() == 0:
        raise invalid(name, f"has shape {shape_of(value)}", "at least one example", "The mean of nothing is undefined.")
    return value


def real(name: str, value: object) -> Tensor:
    """``value`` in float64, without its history."""
    return check_tensor(name, value).detach().to(torch.float64)


def check_bins(bins: int) -> None:
    """Refuse a number of bins that is none."""
    if not is_number(bins, whole=True) or not 1 <= bins <= MOST_BINS:
        raise checks.invalid("bins", bins, f"an integer >= 1 (and <= {MOST_BINS})", "15 is the default.")


def check_level(level: float) -> None:
    """Refuse a probability that no interval can have."""
    if not is_number(level) or not 0 < level < 1:
        raise checks.invalid("level", level, "a number in (0, 1)", "Use 0.9 for an interval of 90 %.")


def has_nan(*tensors: Tensor) -> bool:
    """Whether a comparison among these tensors would silently take a NaN for a number."""
    return any(bool(tensor.isnan().any()) for tensor in tensors)

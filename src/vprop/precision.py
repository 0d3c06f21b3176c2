"""In which precision the arithmetic and the optimizer state of a parameter are kept, and numbers as tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from vprop.checks import is_number

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """float64 for float64 weights; float32 for float32, bfloat16 and float16 ones."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def needs_master_copy(parameter: Tensor) -> bool:
    """Whether the weights are too coarse to hold the mean, which then lives in the optimizer state."""
    return parameter.dtype != compute_dtype(parameter)


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; a number or an array as a tensor on the CPU, whatever torch's default device is.

    Arrays are copied: they may be read-only, run backwards or have their bytes in another order, and a data frame has
    to be made one first.
    """
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__"):
        array = value.__array__()
        value = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value, device="cpu")


def as_labels(value: Any) -> Any:
    """Integers of any type as torch's losses take class numbers; all else as it is."""
    is_integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.long() if is_integer and value.dtype != torch.bool else value


def in_precision_of(value: Any, like: Tensor) -> Tensor:
    """``value``, a tensor or a number, in the dtype and on the device of ``like``; a number keeps its digits.

    torch makes float32 of a number that nobody names a dtype for, and float64 weights then have a prior of 1.70000005.
    """
    if hasattr(value, "__array__") and not is_number(value):  # tensors have it too, and NumPy's numbers
        return as_tensor(value).to(like)
    return torch.as_tensor(value, dtype=like.dtype, device="cpu").to(like.device)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float64 if device.type != "mps" else torch.float32


def widest(tensor: Tensor) -> Tensor:
    """In float64, where the device has it: for differences of large numbers, and for bases that stay orthogonal."""
    return tensor.to(widest_dtype(tensor.device))


def in_full_precision(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For functions with matrix products: autocast, which would round their factors to half precision, is off in them.

    Who calls ``step()`` or asks a posterior inside an autocast block means the model's arithmetic, not ours.
    """

    @wraps(function)
    def exact(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        kinds = {arg.device.type for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return exact(*args, **kwargs)
        return function(*args, **kwargs)

    return exact

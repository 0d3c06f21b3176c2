"""Why a model could not be run under ``torch.func``: a fault of the model, or what ``torch.func`` cannot do."""

from __future__ import annotations

import dis
from pathlib import Path

import torch

_FAULTS: tuple[type[BaseException], ...] = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
"""Errors that no other way of running the model is an answer to."""
_FAULT_WORDS = ("allocate memory", "not enough memory", "out of memory", "CUDA error", "cuDNN error", "CUBLAS_STATUS")
_LIMIT_WORDS = ("vmap", "functorch", "torch.func", "Batching rule", "data pointer of Tensor", "setup_context")
"""What torch says where ``torch.func`` reaches its limits. Not always: a write in place fails with shapes, say."""
_TORCH = str(Path(torch.__file__).parent)


def is_of_the_model(error: RuntimeError) -> bool:
    """Whether an error has surely nothing to do with ``torch.func``: memory, the device, the model's own ``raise``."""
    is_fault = isinstance(error, (*_FAULTS, RecursionError)) or any(words in str(error) for words in _FAULT_WORDS)
    return is_fault or _is_raised_outside_torch(error)


def is_of_torch_func(error: RuntimeError) -> bool:
    """Whether an error names what ``torch.func`` cannot do."""
    return any(words in str(error) for words in _LIMIT_WORDS)


def _is_raised_outside_torch(error: RuntimeError) -> bool:
    """Whether a ``raise`` of Python's, in a file that is not torch's, made the error.

    An operation of torch's fails in the file that calls it, but at a call and not at a ``raise``.
    """
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    at_a_raise = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return at_a_raise and not code.co_filename.startswith(_TORCH)

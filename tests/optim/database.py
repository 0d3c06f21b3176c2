"""The rows of ``tests/table.py`` as rows of torch's own database of optimizers.

torch checks its optimizers by a database, ``torch.testing._internal.common_optimizers``, and a file of tests that every
row of it runs through, ``test/test_optim.py``. The database is in the wheel (it needs the package ``expecttest``), the
tests are not: ``test_torch_generic*.py`` are written anew, and driven by the rows that are made here.

This is the only place that imports torch's private test modules.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.table import LESS_THAN_SHARED, SHARED_BAD_ARGUMENTS, TABLE
from tests.table import OptimizerInfo as Row
from vprop import VariationalOptimizer
from vprop.kernels import cpu

flags_were_frozen = torch.backends.flags_frozen()
try:
    with warnings.catch_warnings():
        from torch.testing._internal import common_optimizers as torchs
        from torch.testing._internal.common_utils import TestCase
except ImportError as missing:
    pytest.skip(f"torch's private database of optimizers cannot be imported: {missing}", allow_module_level=True)
finally:
    # Importing torch's test modules forbids all of this process to set flags of torch.backends.
    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", not flags_were_frozen)

DEVICE = "cpu"
NUM_DATA = 200
IMPLEMENTATIONS = ("foreach", "fused")
TORCH_DATABASE = torchs.optim_db
TensorTracker, ErrorInput, Input = torchs.TensorTracker, torchs.ErrorOptimizerInput, torchs.OptimizerInput
CONSTRUCTION = torchs.OptimizerErrorEnum.CONSTRUCTION_ERROR
TESTCASE = TestCase()
"""What torch's helpers compare tensors with."""

SCHEDULERS = next(info for info in TORCH_DATABASE if info.name == "Adam").scheduler_inputs
"""torch's lists of schedulers: Adam's row has all of them."""


def takes(row: Row, argument: str) -> bool:
    return argument in inspect.signature(row.constructor).parameters


# -- good inputs -----------------------------------------------------------------------------------------------------


def shared_inputs(row: Row) -> dict[str, dict[str, Any]]:
    """What every row of torch's is run with. The prior's precision stands where torch has ``weight_decay``."""
    inputs: dict[str, dict[str, Any]] = {
        "default": {},
        "non-default lr": {"lr": 0.02},
        "tensor lr": {"lr": torch.tensor(0.02)},
        "maximize": {"maximize": True},
        "prior": {"prior_precision": 10.0},
        "prior, maximize": {"prior_precision": 10.0, "maximize": True},
        "betas": {"betas": (0.9, 0.99)},
    }
    if takes(row, "capturable"):
        inputs["capturable, tensor lr"] = {"capturable": True, "lr": torch.tensor(0.02)}
    return inputs


def inputs_func(row: Row) -> Callable[..., list[Any]]:
    def inputs(device: Any, dtype: Any = None) -> list[Any]:
        every = shared_inputs(row) | {label: kwargs for label, kwargs in row.configurations.items() if kwargs}
        return [Input(params=None, kwargs=dict(kwargs), desc=desc) for desc, kwargs in every.items()]

    return inputs


# -- inputs that are refused -----------------------------------------------------------------------------------------

OWN_WORDS = {
    "Tensor lr must be 1-element": r"Invalid lr=tensor\(\[0\.0010, 0\.0010\]\): must be",
}
"""Where our message is another than torch's: argument, value, what is allowed, what to do."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]


def refused(desc: str, params: Any, error: type[Exception], words: str, **kwargs: Any) -> Any:
    return ErrorInput(Input(params=params, kwargs=kwargs, desc=desc), error_type=error, error_regex=words)


def refused_by_every_optimizer(dtype: torch.dtype) -> list[Any]:
    """torch's list, and what torch refuses and does not list."""
    inputs = torchs.get_error_inputs_for_all_optims(DEVICE, dtype)
    for error in inputs:
        words = OWN_WORDS.get(error.optimizer_error_input.desc)
        if words is not None:
            error.error_regex, error.optimizer_error_input.params = words, parameters()
    return [
        *inputs,
        refused("a set", [{"params": set(parameters())}], TypeError, "ordered collections"),
        refused("no leaf", [parameters()[0] * 2], ValueError, "can't optimize a non-leaf Tensor"),
        refused("no tensor", [1.0], TypeError, "can only optimize Tensors"),
        refused(
            "differentiable", parameters(), TypeError, "unexpected keyword .* 'differentiable'", differentiable=True
        ),
        refused("complex", [nn.Parameter(torch.zeros(2, dtype=torch.complex64))], ValueError, "complex"),
    ]


def error_inputs_func(row: Row) -> Callable[..., list[Any]]:
    bad = [*SHARED_BAD_ARGUMENTS, *row.bad_arguments] if row in TABLE else row.bad_arguments

    def inputs(device: Any, dtype: torch.dtype) -> list[Any]:
        own = [refused(str(kwargs), parameters(), ValueError, words, **kwargs) for kwargs, words in bad]
        return [*refused_by_every_optimizer(dtype), *own]

    return inputs


# -- the rows --------------------------------------------------------------------------------------------------------


def info_of(row: Row) -> Any:
    """torch's row for one of ours; the constructor has the arguments that have no default filled in."""
    constructor = functools.partial(row.constructor, num_data=NUM_DATA, **row.required)
    constructor.__name__ = row.name  # type: ignore[attr-defined]
    has_kernels = row.constructor.structure.has_kernels  # type: ignore[attr-defined]
    implementations = [name for name in IMPLEMENTATIONS if takes(row, name) and (name != "fused" or has_kernels)]
    return torchs.OptimizerInfo(
        constructor,
        optim_inputs_func=inputs_func(row),
        optim_error_inputs_func=error_inputs_func(row),
        scheduler_inputs=SCHEDULERS,
        supported_impls=tuple(implementations),
        not_og_supported_flags=(),
        supports_complex=False,
        step_requires_closure=constructor([torch.zeros(1, requires_grad=True)]).needs_objective,
        has_capturable_arg=takes(row, "capturable"),
        supports_fused_on=(*(["cpu"] if cpu.available() else []), "cuda") if has_kernels else (),
    )


DATABASE = [info_of(row) for row in [*TABLE, *LESS_THAN_SHARED]]


@dataclass(frozen=True)
class Entry:
    """One input of one row: a constructor whose arguments are fresh in every call, for steps change an lr tensor."""

    info: Any
    input: Any

    @property
    def kwargs(self) -> dict[str, Any]:
        return copy.deepcopy(self.input.kwargs)

    @property
    def forloop(self) -> dict[str, bool]:
        """Arguments that ask for one parameter after the other."""
        return dict.fromkeys(self.info.supported_impls, False)

    @property
    def maximizes(self) -> bool:
        return self.input.kwargs.get("maximize", False)

    def __call__(self, params: Any, **overrides: Any) -> VariationalOptimizer:
        return self.info.optim_cls(params, **(self.kwargs | overrides))


def inputs_of(info: Any, with_implementations: bool) -> list[Any]:
    if with_implementations:
        inputs = torchs._get_optim_inputs_including_global_cliquey_kwargs(
            DEVICE, torch.float32, info, skip=("differentiable",)
        )
        # Kernels are for the diagonal structure, also where an optimizer has others.
        others = [i for i in inputs if i.kwargs.get("structure", "diagonal") != "diagonal" and i.kwargs.get("fused")]
        return [entry for entry in inputs if entry not in others]
    return info.optim_inputs_func(DEVICE)


def entries(
    keep: Callable[[Entry], bool] = lambda entry: True,
    *,
    first_of_each: bool = False,
    with_implementations: bool = False,
) -> list[Any]:
    """Inputs of all rows as pytest parameters; with those of torch that ask for one implementation or another."""
    chosen = []
    for info in DATABASE:
        inputs = inputs_of(info, with_implementations)
        for optim_input in inputs[:1] if first_of_each else inputs:
            entry = Entry(info, optim_input)
            if keep(entry):
                chosen.append(pytest.param(entry, id=f"{info.name}-{optim_input.desc}"))
    return chosen


every_optimizer = pytest.mark.parametrize("case", entries(first_of_each=True))
every_input = pytest.mark.parametrize("case", entries())
every_implementation = pytest.mark.parametrize("case", entries(with_implementations=True))

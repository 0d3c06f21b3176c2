"""Mean and covariance of the outputs of the linearised model, N(f(x, μ), JΣJᵀ) for each example.

J has a row for each output of an example and a column for each weight. It is made row by row, with one backward for
each output, or column by column, and the shorter side decides. Examples are worked on a few at a time, so that no more
than about 2²³ numbers of J exist at once.

A column Jv is what torch's forward mode computes. But that counts its levels for the whole process: when two threads
use it at once, derivatives are silently 0. So columns come from reverse mode, used twice: u ↦ Jᵀu is linear, and the
derivative of vᵀJᵀu by u is Jv.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import jacrev, vjp, vmap

from vprop.posterior.predictive.functions import ModelFunction, Prepared, first_rows, function_of, told_with_input
from vprop.posterior.predictive.inputs import leaves, mapped
from vprop.precision import in_full_precision

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

ELEMENTS = 1 << 23
"""Of J that are held at once."""

Jacobian = dict[str, Tensor]
"""By parameter: (examples, outputs of an example, *the parameter's shape)."""
Linearization = tuple[Jacobian, Tensor]
"""With the outputs, (examples, outputs of an example), at which it was made."""


class LinearizedOutputs:
    """For each batch the mean of its outputs and, for each example, their covariance."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior = posterior
        self._function: ModelFunction = function_of(posterior)
        if self._function.anew:
            raise TypeError(
                'predict(method="linearized"): the model has modules that change their weights when they are put into '
                "evaluation mode, so that its output has no derivative there. Use the default, method='monte_carlo'."
            )
        self._weights = posterior._in_model_dtypes(posterior.mean)
        self._modes: list[Callable[..., Linearization]] | None = None

    @torch.no_grad()
    def __call__(self, x: Any, report: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        """Outputs at the mean, (examples, …), and JΣJᵀ, (examples, outputs, outputs)."""
        with told_with_input(x, self._posterior.model):
            prepared = self._function.prepare(x)
            mean = self._function(self._weights, prepared)
            if mean.dim() == 0:
                raise ValueError(
                    'predict(method="linearized"): the model returned one number, must return an output for each '
                    "example, in its first dimension."
                )
            rows, outputs = len(mean), math.prod(mean.shape[1:])
            at_once = max(1, ELEMENTS // max(1, outputs * self._posterior.num_parameters))
            covariances, coarse = [], self._coarse(mean)
            for start in range(0, rows, at_once):
                stop = min(rows, start + at_once)
                jacobian, at = self._linearization(first_rows(prepared, rows, start, stop), stop - start, outputs)
                _refuse_dependent(mean[start:stop].reshape(stop - start, outputs), at, coarse)
                covariances.append(self._covariance(jacobian))
                report(stop - start)
        empty = mean.new_zeros((0, outputs, outputs))
        return mean, torch.cat(covariances) if covariances else empty

    def _coarse(self, outputs: Tensor) -> bool:
        """Whether something is rounded to 16 bits on the way to the outputs, as far as that is seen."""
        model = self._posterior.model
        tensors = (outputs, *self._weights.values(), *model.parameters(), *model.buffers())
        autocast = torch.is_autocast_enabled(outputs.device.type)
        return autocast or any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)

    def _covariance(self, jacobian: Jacobian) -> Tensor:
        """Σ = RRᵀ, so JΣJᵀ = (JR)(JR)ᵀ: symmetric, and without a negative eigenvalue but for rounding."""
        total: Any = 0
        for part in self._posterior._times_root(jacobian):
            total = total + _times_own_transpose(part)
        return total

    def _linearization(self, prepared: Prepared, rows: int, outputs: int) -> Linearization:
        """By the mode that suits the sizes; by the next one, if the model has an operation that it lacks."""
        if self._modes is None:
            columns_first = self._posterior.num_parameters < outputs
            by_mode = [self._by_columns, self._by_rows] if columns_first else [self._by_rows]
            self._modes = [*by_mode, self._one_by_one]
        while len(self._modes) > 1:
            try:
                return self._modes[0](prepared, rows, outputs)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever is wrong beside the mode, the last one says it
                self._modes = self._modes[1:]
        return self._modes[0](prepared, rows, outputs)

    def _by_columns(self, prepared: Prepared, rows: int, outputs: int) -> Linearization:
        def of_all(weights: dict[str, Tensor]) -> Tensor:
            return self._function(weights, prepared).reshape(rows, outputs)

        output, pulled_back = vjp(of_all, self._weights)[:2]
        pushed_forward = vjp(lambda u: pulled_back(u)[0], torch.zeros_like(output))[1]
        jacobian, zeros = {}, {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():  # there are few: fewer than outputs of an example
            units = torch.eye(weight.numel(), dtype=weight.dtype, device=weight.device).view(-1, *weight.shape)
            columns = [pushed_forward(zeros | {name: unit})[0] for unit in units]
            jacobian[name] = torch.stack(columns, -1).reshape(rows, outputs, *weight.shape)
        return jacobian, output.detach()

    def _by_rows(self, prepared: Prepared, rows: int, outputs: int) -> Linearization:
        held = (prepared.args, prepared.kwargs)

        def is_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows

        def of_one(examples: list[Tensor]) -> Linearization:
            remaining = iter(examples)
            args, kwargs = mapped(lambda value: next(remaining) if is_rows(value) else value, held)

            def output(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                value = self._function(weights, Prepared(args, kwargs, prepared.tail))[0].reshape(-1)
                return value, value

            return jacrev(output, has_aux=True)(self._weights)

        # Each example as a batch of one, which is what models take.
        return vmap(of_one)([value.unsqueeze(1) for value in leaves(held) if is_rows(value)])

    def _one_by_one(self, prepared: Prepared, rows: int, outputs: int) -> Linearization:
        """An example after the other, an output after the other: slow, and for every model that has gradients."""
        jacobians: list[list[tuple[Tensor, ...]]] = []
        values = []
        with torch.enable_grad():
            for row in range(rows):
                weights = {name: weight.detach().requires_grad_() for name, weight in self._weights.items()}
                output = self._function(weights, first_rows(prepared, rows, row, row + 1)).reshape(-1)
                leaves = list(weights.values())
                jacobians.append(
                    [torch.autograd.grad(v, leaves, retain_graph=True, materialize_grads=True) for v in output]
                )
                values.append(output.detach())
        by_name = {
            name: torch.stack([torch.stack([of_output[i] for of_output in of_row]) for of_row in jacobians])
            for i, name in enumerate(self._weights)
        }
        return by_name, torch.stack(values)


@in_full_precision
def _times_own_transpose(part: Tensor) -> Tensor:
    return part @ part.mT


def _refuse_dependent(together: Tensor, apart: Tensor, coarse: bool) -> None:
    """Refuse a model whose output for an example depends on those beside it: a sequence with time first, say."""
    tolerance = 1e-2 if coarse else 1e-3
    scale = float(together.abs().nan_to_num(0.0, 0.0, 0.0).mean())
    if not torch.allclose(together, apart, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        raise ValueError(
            'predict(method="linearized"): the model returns something else for an example alone than among others. '
            "The first dimension of its input and output must be examples that do not depend on each other; a sequence "
            "needs the batch first (batch_first=True). A model that computes in 16 bits inside rounds an example "
            "otherwise than many. Use the default, method='monte_carlo'."
        )

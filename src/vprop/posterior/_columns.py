"""Derivatives by the weights of a parameter, as columns of a matrix."""

from __future__ import annotations

from torch import Tensor


def columns_of(jacobian: Tensor, parameter: Tensor) -> Tensor:
    """(…, *the parameter's shape) as (…, weights); a number is one weight."""
    return jacobian.flatten(-parameter.dim()) if parameter.dim() else jacobian.unsqueeze(-1)

"""Checks of the prior: numbers, tensors like the parameters, or a matrix over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vprop.checks import invalid, is_finite
from vprop.parallel.sharding import shard_of, to_local
from vprop.precision import compute_dtype


def precision(name: str, group: dict[str, Any]) -> None:
    """A number, or a list of tensors, of which copies are put into the precision of the parameters."""
    _precision(name, group, matrix_prior=False)


def precision_or_matrix(name: str, group: dict[str, Any]) -> None:
    """The same, or a matrix over all weights of the group."""
    if isinstance(group[name], Tensor):
        _matrix_prior(group)
    _precision(name, group, matrix_prior=True)


def _check_kind(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose numbers are not there or not real. A copy is made of them: gradients do not reach them."""
    wrong = None
    if tensor.is_meta:
        wrong, remedy = "is on the meta device, without values", "Move the prior to a real device first."
    elif tensor.layout != torch.strided:
        wrong, remedy = f"has layout {tensor.layout}", "Make it dense: tensor.to_dense()."
    elif not tensor.is_floating_point():
        wrong, remedy = f"has dtype {tensor.dtype}", "Convert it: tensor.float()."
    if wrong is not None:
        raise ValueError(f"Invalid {name}: {wrong}, must be a dense tensor of real floating-point numbers. {remedy}")


def _precision(name: str, group: dict[str, Any], matrix_prior: bool) -> None:
    params, precision = group["params"], group[name]
    remedy = "Pass one number for the group, or a list with one tensor per parameter (posterior.as_prior() makes one)."
    if isinstance(precision, list | tuple):
        group["prior_precision"] = _per_parameter("prior_precision", precision, params)
        for tensor in group["prior_precision"]:
            if not bool((torch.isfinite(to_local(tensor)) & (to_local(tensor) >= 0)).all()):
                raise invalid("prior_precision", "a tensor with bad entries", "finite and >= 0 everywhere", remedy)
    elif isinstance(precision, Tensor):
        if not matrix_prior:
            shape = f"a tensor of shape {tuple(precision.shape)}"
            if precision.numel() == 1:
                raise invalid(
                    "prior_precision", precision, "a finite number >= 0 or a list of tensors", "Pass a float."
                )
            hint = "A precision matrix is for VON and VONG; a diagonal optimizer takes the variances only: "
            hint += "[1 / v for v in posterior.variance.values()]."
            raise invalid("prior_precision", shape, "a finite number >= 0 or a list of tensors", hint)
    elif not is_finite(precision) or precision < 0:
        raise invalid("prior_precision", precision, "a finite number >= 0 or a list of tensors", remedy)


def mean(name: str, group: dict[str, Any]) -> None:
    """``None``, or a list of tensors, of which copies are put into the precision of the parameters."""
    if group[name] is None:
        return
    if not isinstance(group[name], list | tuple):
        raise invalid(name, group[name], "None or a list of tensors like params", "None means 0.")
    group[name] = _per_parameter(name, group[name], group["params"])
    for tensor in group[name]:
        if not bool(torch.isfinite(to_local(tensor)).all()):
            raise invalid(name, "a tensor with bad entries", "finite everywhere", "Check where it comes from.")


def _matrix_prior(group: dict[str, Any]) -> None:
    """A precision matrix over all weights of the group, in the order of its parameters."""
    matrix, size = group["prior_precision"], sum(p.numel() for p in group["params"])
    if matrix.shape != (size, size):
        raise ValueError(
            f"Invalid prior_precision: is a tensor of shape {tuple(matrix.shape)}, must be a number, a list of tensors "
            f"like params, or a matrix of shape {(size, size)} over all weights of the group, in the order of its "
            "parameters. With frozen parameters, of which posterior.as_prior() has none, pass only those that require "
            "a gradient."
        )
    _check_kind("prior_precision", matrix)
    wide = matrix.detach().to(device=group["params"][0].device, dtype=torch.float64, copy=True)
    finite = bool(torch.isfinite(wide).all())
    symmetric = finite and torch.allclose(wide, wide.T, rtol=1e-8, atol=1e-8 * float(wide.abs().max()))
    if not symmetric or int(torch.linalg.cholesky_ex(wide).info) != 0:
        remedy = "It is a precision, the inverse of a covariance (posterior.as_prior() makes one)."
        raise invalid("prior_precision", "a matrix", "symmetric and positive definite", remedy)
    group["prior_precision"] = wide


def _per_parameter(name: str, tensors: Sequence[Any], params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of ``tensors`` on the devices and in the precision of ``params``, after a check of the shapes."""
    if len(tensors) != len(params):
        raise ValueError(
            f"Invalid {name}: has {len(tensors)} tensors, must have one for each of the group's {len(params)} "
            "parameters, in their order. With several groups, give each group's dict its own list; with frozen "
            "parameters, of which posterior.as_prior() has none, pass only those that require a gradient."
        )
    copies = []
    for i, (tensor, p) in enumerate(zip(tensors, params, strict=True)):
        if not isinstance(tensor, Tensor) or tensor.shape != p.shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"Invalid {name}[{i}]: is {got}, must be a tensor of its parameter's shape {tuple(p.shape)}. "
                "The list goes in the order of the parameters."
            )
        _check_kind(f"{name}[{i}]", tensor)
        copies.append(shard_of(tensor.detach(), p).to(device=p.device, dtype=compute_dtype(p), copy=True))
    return copies


def in_place(prior: Any, params: Sequence[Tensor], *, may_be_matrix: bool) -> bool:
    """Whether a prior is a list of tensors, or a matrix, as the updates read them."""
    if isinstance(prior, Tensor):
        size = sum(p.numel() for p in params)
        return may_be_matrix and prior.dtype == torch.float64 and prior.shape == (size, size)
    if not isinstance(prior, list) or len(prior) != len(params):
        return False
    return all(
        isinstance(tensor, Tensor)
        and (tensor.shape, tensor.dtype, tensor.device) == (p.shape, compute_dtype(p), p.device)
        for tensor, p in zip(prior, params, strict=True)
    )

"""Checks of what goes with the hyperparameters: parameters, estimators, kernels, several groups."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vprop import kernels
from vprop.checks import invalid, shown
from vprop.curvature import CurvatureEstimator
from vprop.parallel.sharding import is_sharded


def checked_params(params: Any, optimizer: str) -> Any:
    """What an optimizer is built over, as torch takes it; what people pass instead is refused in words."""
    if isinstance(params, nn.Module):
        found, remedy = "a model", "Pass model.parameters()."
    elif isinstance(params, type) and issubclass(params, nn.Module):
        found, remedy = f"the class {params.__name__}", "Build the model, and pass model.parameters()."
    elif isinstance(params, str) or not isinstance(params, Iterable):
        found, remedy = shown(params), "Pass model.parameters() (with the parentheses)."
    else:
        return params
    raise TypeError(f"{optimizer}(params): got {found}, must be tensors or parameter groups. {remedy}")


def check_parameters(params: Sequence[Tensor]) -> None:
    """Refuse the kinds of parameter that have no Gaussian posterior here."""
    for i, p in enumerate(params):
        if p.is_complex():
            raise ValueError(
                f"Parameter {i} of the group has complex dtype {p.dtype}: complex parameters are not supported. "
                "Optimize real and imaginary parts (torch.view_as_real) as two real parameters."
            )
        if p.layout != torch.strided:
            raise ValueError(
                f"Parameter {i} of the group has layout {p.layout}: sparse parameters are not supported. "
                "Use a dense parameter (p.to_dense())."
            )
        if not p.is_floating_point():
            raise ValueError(
                f"Parameter {i} of the group has dtype {p.dtype}: must be a floating-point dtype. "
                "Leave integer tensors out of the optimizer."
            )


def check_estimator(estimator: CurvatureEstimator, group: dict[str, Any], optimizer: str) -> None:
    """Check the samples against what the curvature estimator needs of them."""
    count, name = group["mc_samples"], type(estimator).__name__
    if count < estimator.least_samples:
        raise invalid(
            "mc_samples",
            count,
            f">= {estimator.least_samples} for {optimizer}, whose curvature is {name}",
            f"Try mc_samples={estimator.least_samples}.",
        )
    if estimator.in_pairs and group["antithetic"] and count % 2:
        raise invalid("mc_samples", count, f"even for {name}", f"It takes pairs of samples: mc_samples={count + 1}.")
    if estimator.in_pairs and not group["antithetic"]:
        raise invalid(
            "antithetic",
            group["antithetic"],
            f"True for {name}",
            "It takes the difference of two gradients; SampleSpread is for independent samples.",
        )


def warn_of_shared_memory(group: dict[str, Any]) -> None:
    """Warn of weights that several processes may write to at once, each with a sample of its own."""
    shared = [
        i for i, p in enumerate(group["params"]) if p.device.type == "cpu" and not is_sharded(p) and p.is_shared()
    ]
    if shared and group["mc_samples"] > 0:
        warnings.warn(
            f"Parameter {shared[0]} of the group is in shared memory. If several processes train it at once (Hogwild), "
            "their samples mix in the weights, and noise stays in them for good. Give each process a copy of the model "
            "and average the gradients (torch.nn.parallel.DistributedDataParallel), or use mc_samples=0; with one "
            "process at a time all is well.",
            UserWarning,
            stacklevel=callers_level(),
        )


def check_fused(group: dict[str, Any], optimizer: str, has_kernels: bool) -> None:
    """Refuse ``fused=True`` where there is no kernel."""
    if not group["fused"]:
        return
    if not has_kernels:
        raise invalid("fused", True, f"None or False for {optimizer}", "It has no fused kernel.")
    for i, p in enumerate(group["params"]):
        if p.requires_grad and not kernels.takes(p):
            raise invalid(
                "fused",
                True,
                "None or False for parameters that no kernel takes",
                f"Parameter {i} of the group is {type(p).__name__} of {p.dtype} on {p.device}; there are kernels for "
                "plain float32, bfloat16 and float16 tensors on a GPU with Triton, and on a CPU if vprop was installed "
                "with its compiled part.",
            )


def callers_level() -> int:
    """How far up the line is that built the group, above ours and torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("vprop", "torch"):
        level, frame = level + 1, frame.f_back
    return level

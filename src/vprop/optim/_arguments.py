"""Checks of hyperparameters: every error names the argument, its value, what is allowed, and what to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from vprop import kernels
from vprop.checks import check_flag, check_seed, invalid, is_finite, is_number, shown
from vprop.curvature import CurvatureEstimator
from vprop.optim._prior_arguments import check_prior
from vprop.parallel.sharding import is_sharded, to_local
from vprop.precision import compute_dtype

NOT_HYPERPARAMETERS = ("self", "params", "__class__")
"""Local names of a constructor that do not go into the parameter groups."""


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


def check_group(group: dict[str, Any], matrix_prior: bool = False) -> None:
    """Check one parameter group and put its values into the form that the updates read.

    ``matrix_prior`` allows ``prior_precision`` to be a matrix over all weights of the group.
    """
    check_parameters(group["params"])
    for name, value in group.items():
        if is_number(value):  # NumPy's numbers would end up in checkpoints
            group[name] = int(value) if isinstance(value, Integral) else float(value)
    _number(group, "lr", "a finite number >= 0", lambda v: 0 <= v < math.inf, "0.1 is a good first try.")
    _number(
        group,
        "num_data",
        "a finite number > 0",
        lambda v: 0 < v < math.inf,
        "Pass the number of training examples, e.g. num_data=len(train_set).",
    )
    _number(
        group,
        "temperature",
        "a finite number > 0",
        lambda v: 0 < v < math.inf,
        "1 is the Bayesian posterior, smaller values are colder (less noise).",
    )
    _number(group, "clip_radius", "a number > 0", lambda v: v > 0, 'Use float("inf") for no clipping.')
    for name in ("antithetic", "centered", "maximize", "capturable", "sampled_fisher", "rescale_lr", "riemannian"):
        check_flag(name, group.get(name, False))
    if group.get("sampled_fisher") and group["centered"]:
        raise invalid("centered", True, "False when sampled_fisher=True", "Choose one of the two curvatures.")
    _betas(group)
    check_samples(group)
    check_noise(group)
    check_seed(group["seed"])
    _implementation(group)
    check_prior(group, matrix_prior)
    for name in ("chunk_size", "max_parameters"):
        if name not in group or (name == "chunk_size" and group[name] is None):
            continue
        if not is_number(group[name], whole=True) or group[name] < 1:
            raise invalid(name, group[name], "an integer >= 1", "Leave it out for the default.")
    _hess_init(group)
    _scales(group)


def _number(group: dict[str, Any], name: str, allowed: str, accept: Callable[[float], bool], remedy: str) -> None:
    value = group[name]
    if isinstance(value, Tensor) and name == "lr":
        group[name] = _checked_rate(value)
        value = value.item()
    if not (is_finite(value) or (is_number(value) and value == math.inf)) or not accept(value):
        raise invalid(name, group[name], allowed, remedy)


def _checked_rate(lr: Tensor) -> Tensor:
    """A step size that is a tensor, as a view: whoever changes the tensor changes the rate."""
    usable = lr.numel() == 1 and lr.is_floating_point() and lr.layout == torch.strided and not lr.is_meta
    if not usable or lr.requires_grad:
        allowed = (
            "a finite number >= 0, or a tensor with one such number, of a floating-point dtype, without a gradient"
        )
        raise invalid("lr", lr, allowed, "Pass e.g. lr=torch.tensor(0.1).")
    return lr.reshape(())


def _betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    allowed = "a pair of numbers, each in [0, 1)"
    remedy = "The first is the momentum of the gradient (0 = none), the second the decay of the curvature."
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise invalid("betas", betas, allowed, remedy)
    for i, beta in enumerate(betas):
        if not is_number(beta) or not 0 <= beta < 1:
            raise invalid(f"betas[{i}]", beta, "a number in [0, 1)", remedy)
    group["betas"] = (float(betas[0]), float(betas[1]))


def check_samples(group: dict[str, Any]) -> None:
    """Check the number of samples against what the other arguments need of it."""
    count, antithetic, centered = group["mc_samples"], group["antithetic"], group["centered"]
    if not is_number(count, whole=True) or not 0 <= count < 2**30:  # a draw has 30 bits for its number
        raise invalid(
            "mc_samples",
            count,
            "an integer >= 0 (and below 2**30)",
            "0 takes the gradient at the mean, K averages over K samples.",
        )
    if centered and count < 2:
        raise invalid(
            "mc_samples",
            count,
            ">= 2 when centered=True",
            "A spread needs two samples: try mc_samples=2, antithetic=True.",
        )
    if antithetic and count < 2:
        raise invalid("mc_samples", count, ">= 2 when antithetic=True", "A pair needs two samples: try mc_samples=2.")
    if antithetic and centered and count % 2:
        raise invalid(
            "mc_samples", count, "even when antithetic=True and centered=True", f"Use mc_samples={count + 1}."
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


def _implementation(group: dict[str, Any]) -> None:
    for name in ("foreach", "fused"):
        if group[name] not in (None, True, False):
            raise invalid(name, group[name], "None, True or False", "None lets the library choose.")
    if group["foreach"] and group["fused"]:
        raise invalid("fused", True, "None or False with foreach=True", "Ask for one implementation, or for none.")


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
            stacklevel=5,
        )


def check_noise(group: dict[str, Any]) -> None:
    """Check who draws the same noise."""
    noise = group.get("noise", "shared")
    if noise not in ("shared", "per_rank"):
        raise invalid(
            "noise",
            noise,
            '"shared" or "per_rank"',
            "Shared: the ranks of a data-parallel run draw the same samples; per_rank: each draws its own.",
        )
    if noise == "per_rank" and any(is_sharded(p) for p in group["params"]):
        raise invalid(
            "noise",
            noise,
            '"shared" where parameters are spread over ranks (FSDP, tensor parallel)',
            "A sample of a spread parameter is made by all ranks together. Use DistributedDataParallel for per_rank.",
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


def _hess_init(group: dict[str, Any]) -> None:
    _number(
        group,
        "hess_init",
        "a finite number >= 0",
        lambda v: 0 <= v < math.inf,
        "It is the curvature of the mean loss before any data: 1 is a good first try.",
    )
    precision = group["prior_precision"]
    if isinstance(precision, Tensor):
        return
    flat = any(bool((to_local(t) == 0).any()) for t in precision) if isinstance(precision, list) else precision == 0
    if group["hess_init"] == 0 and flat:
        raise invalid(
            "hess_init",
            group["hess_init"],
            "> 0 when prior_precision is 0",
            "Without either, the variance is infinite: set hess_init=1 or prior_precision > 0.",
        )


def _scales(group: dict[str, Any]) -> None:
    """Refuse numbers that are fine one by one, and together leave the range of the arithmetic.

    Looked at is what an update makes of them first: ess = N/τ, h + δ with δ = λ/ess, and the precision ess·(h + δ), the
    inverse of the variance.
    """
    wide = all(compute_dtype(p) == torch.float64 for p in group["params"])
    limits = torch.finfo(torch.float64 if wide else torch.float32)
    ess, hess, precision = group["num_data"] / group["temperature"], group["hess_init"], group["prior_precision"]
    if float(group["lr"]) > limits.max:
        raise invalid("lr", group["lr"], f"<= {limits.max:.2g}, the largest {limits.dtype}", "0.1 is a good first try.")
    made_of = {"hess_init": hess, "num_data/temperature": ess}
    if is_number(precision) and limits.tiny <= ess <= limits.max:
        damped = hess + precision / ess
        made_of["prior_precision"] = precision
        made_of["(hess_init + prior_precision*temperature/num_data)"] = damped
        made_of["num_data/temperature*(hess_init + prior_precision*temperature/num_data)"] = ess * damped
    for name, value in made_of.items():
        least = 0.0 if value == 0 and name in ("hess_init", "prior_precision") else limits.tiny
        if not least <= value <= 1 / limits.tiny:
            raise invalid(
                name,
                value,
                f"between {limits.tiny:.2g} and {1 / limits.tiny:.2g}, where {limits.dtype} can compute with it",
                "Choose numbers that are nearer to 1.",
            )

"""Checks of hyperparameters: every error names the argument, its value, what is allowed, and what to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from vprop import kernels
from vprop.curvature import CurvatureEstimator
from vprop.placement import here, is_spread, part_of
from vprop.precision import compute_dtype

NOT_HYPERPARAMETERS = ("self", "params", "__class__")
"""Local names of a constructor that do not go into the parameter groups."""


def invalid(name: str, value: object, allowed: str, remedy: str) -> ValueError:
    """The one form of message for a bad argument."""
    return ValueError(f"Invalid {name}={value!r}: must be {allowed}. {remedy}")


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether ``value`` is a real (or whole) number, NumPy's included, and not a bool."""
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)


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
        if not isinstance(group.get(name, False), bool):
            raise invalid(name, group[name], "True or False", f"Pass {name}=True or leave it out.")
    if group.get("sampled_fisher") and group["centered"]:
        raise invalid("centered", True, "False when sampled_fisher=True", "Choose one of the two curvatures.")
    _betas(group)
    check_samples(group)
    check_noise(group)
    _seed(group["seed"])
    _implementation(group)
    if isinstance(group["prior_precision"], Tensor) and matrix_prior:
        _matrix_prior(group)
    _prior(group, matrix_prior)
    for name in ("chunk_size", "max_parameters"):
        if name not in group or (name == "chunk_size" and group[name] is None):
            continue
        if not is_number(group[name], whole=True) or group[name] < 1:
            raise invalid(name, group[name], "an integer >= 1", "Leave it out for the default.")
    _hess_init(group)


def _number(group: dict[str, Any], name: str, allowed: str, accept: Callable[[float], bool], remedy: str) -> None:
    value = group[name]
    if isinstance(value, Tensor) and value.numel() == 1 and name == "lr":
        group[name] = value.reshape(())  # a view: whoever changes the tensor changes the rate
        value = value.item()
    if not is_number(value) or not accept(value):
        raise invalid(name, group[name], allowed, remedy)


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
    if not is_number(count, whole=True) or count < 0:
        raise invalid(
            "mc_samples",
            count,
            "an integer >= 0",
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


def _seed(seed: Any) -> None:
    if not is_number(seed, whole=True) or not 0 <= seed < 2**64:
        raise invalid("seed", seed, "an integer in [0, 2**64)", "Pass e.g. seed=0.")


def _implementation(group: dict[str, Any]) -> None:
    for name in ("foreach", "fused"):
        if group[name] not in (None, True, False):
            raise invalid(name, group[name], "None, True or False", "None lets the library choose.")
    if group["foreach"] and group["fused"]:
        raise invalid("fused", True, "None or False with foreach=True", "Ask for one implementation, or for none.")


def refuse_spread_parameters(group: dict[str, Any], optimizer: str) -> None:
    """Refuse parameters that are spread over ranks, for optimizers that need them whole."""
    if any(is_spread(p) for p in group["params"]):
        raise ValueError(
            f"{optimizer} needs whole parameters, but these are spread over ranks (FSDP, tensor parallel). Use "
            "DistributedDataParallel, or a diagonal optimizer: Vprop, IVON, Vadam."
        )


def warn_of_shared_memory(group: dict[str, Any]) -> None:
    """Warn of weights that several processes may write to at once, each with a sample of its own."""
    shared = [i for i, p in enumerate(group["params"]) if p.device.type == "cpu" and not is_spread(p) and p.is_shared()]
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
    if noise == "per_rank" and any(is_spread(p) for p in group["params"]):
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


def _prior(group: dict[str, Any], matrix_prior: bool) -> None:
    params, precision = group["params"], group["prior_precision"]
    remedy = "Pass one number for the group, or a list with one tensor per parameter (posterior.as_prior() makes one)."
    if isinstance(precision, list | tuple):
        group["prior_precision"] = _per_parameter("prior_precision", precision, params)
        for tensor in group["prior_precision"]:
            if not bool((torch.isfinite(here(tensor)) & (here(tensor) >= 0)).all()):
                raise invalid("prior_precision", "a tensor with bad entries", "finite and >= 0 everywhere", remedy)
    elif isinstance(precision, Tensor):
        if not matrix_prior:
            shape = f"a tensor of shape {tuple(precision.shape)}"
            hint = "A precision matrix is for VON and VONG; a diagonal optimizer takes the variances only: "
            hint += "[1 / v for v in posterior.variance.values()]."
            raise invalid("prior_precision", shape, "a finite number >= 0 or a list of tensors", hint)
    elif not is_number(precision) or not 0 <= precision < math.inf:
        raise invalid("prior_precision", precision, "a finite number >= 0 or a list of tensors", remedy)
    if group["prior_mean"] is not None:
        if not isinstance(group["prior_mean"], list | tuple):
            raise invalid("prior_mean", group["prior_mean"], "None or a list of tensors like params", "None means 0.")
        group["prior_mean"] = _per_parameter("prior_mean", group["prior_mean"], params)
        for tensor in group["prior_mean"]:
            if not bool(torch.isfinite(here(tensor)).all()):
                raise invalid(
                    "prior_mean",
                    "a tensor with bad entries",
                    "finite everywhere",
                    "Check where it comes from.",
                )


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
    wide = matrix.detach().to(device=group["params"][0].device, dtype=torch.float64, copy=True)
    finite = bool(torch.isfinite(wide).all())
    symmetric = finite and torch.allclose(wide, wide.T, rtol=1e-8, atol=1e-8 * float(wide.abs().max()))
    if not symmetric or int(torch.linalg.cholesky_ex(wide).info) != 0:
        raise invalid(
            "prior_precision",
            "a matrix",
            "symmetric and positive definite",
            "It is a precision, the inverse of a covariance (posterior.as_prior() makes one).",
        )
    group["prior_precision"] = wide


_SHARED_BY_GROUPS = (
    "num_data",
    "temperature",
    "betas",
    "antithetic",
    "centered",
    "maximize",
    "sampled_fisher",
    "noise",
)


def check_shared(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups that cannot have one covariance over all of them."""
    for name in _SHARED_BY_GROUPS:
        values = [group.get(name) for group in groups]
        if any(value != values[0] for value in values):
            raise invalid(
                name,
                values,
                "the same in all parameter groups of a full covariance",
                "One matrix covers all groups; lr, the prior and clip_radius may differ.",
            )
    if len(groups) > 1 and any(isinstance(group["prior_precision"], Tensor) for group in groups):
        raise ValueError(
            "Invalid prior_precision: a matrix covers all weights, so there can be one parameter group only. Put all "
            "parameters into one group."
        )
    kinds = {(p.device, compute_dtype(p)) for group in groups for p in group["params"] if p.requires_grad}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(
            f"One covariance over all parameters needs them on one device and in one precision, but there is {found}. "
            "Move the model, or use a diagonal optimizer (Vprop, CVI)."
        )


def check_size(name: str, params: Sequence[Tensor], limit: int) -> None:
    """Refuse a matrix that is larger than the user agreed to."""
    size = sum(p.numel() for p in params)
    if size > limit:
        gigabytes = 8 * size**2 / 1e9
        raise ValueError(
            f"{name} keeps one covariance over all parameters: {size:,} parameters make a matrix of {size:,} × "
            f"{size:,} numbers ({gigabytes:,.2f} GB, of which a step holds about five), more than "
            f"max_parameters={limit:,}. Pass max_parameters={size} if the memory is there; or use a diagonal optimizer "
            "(Vprop, CVI, VOGN); or pass only the parameters of the last layers."
        )


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
        copies.append(part_of(tensor.detach(), p).to(device=p.device, dtype=compute_dtype(p), copy=True))
    return copies


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
    flat = any(bool((here(t) == 0).any()) for t in precision) if isinstance(precision, list) else precision == 0
    if group["hess_init"] == 0 and flat:
        raise invalid(
            "hess_init",
            group["hess_init"],
            "> 0 when prior_precision is 0",
            "Without either, the variance is infinite: set hess_init=1 or prior_precision > 0.",
        )

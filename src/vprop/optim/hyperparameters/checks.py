"""Checks of hyperparameters: every error names the argument, its value, what is allowed, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from vprop import checks
from vprop.checks import check_flag, invalid, is_finite, is_number
from vprop.optim.hyperparameters.declaration import Check, Hyperparameter
from vprop.optim.hyperparameters.prior import in_place, precision_or_matrix
from vprop.parallel.sharding import is_sharded, to_local
from vprop.precision import compute_dtype


def check_hyperparameters(group: dict[str, Any], declared: Mapping[str, Hyperparameter]) -> None:
    """Check the entries of one parameter group and put them into the form that the updates read."""
    for name, value in group.items():
        if is_number(value):  # NumPy's numbers would end up in checkpoints
            group[name] = int(value) if isinstance(value, Integral) else float(value)
    present = {name: hyperparameter for name, hyperparameter in declared.items() if name in group}
    for name, hyperparameter in present.items():
        hyperparameter.check(name, group)
    for name, hyperparameter in present.items():
        hyperparameter.fits(name, group)
    _scales(group)


def check_edited(group: dict[str, Any], declared: Mapping[str, Hyperparameter], but: tuple[str, ...]) -> None:
    """Check the entries of a group again, ``but`` those.

    Tensors of a prior that have their place already stay what they are: they may be changed there.
    """
    for name, hyperparameter in declared.items():
        if name not in group or name in but:
            continue
        may_be_matrix = hyperparameter.check is precision_or_matrix
        if hyperparameter.per_parameter and in_place(group[name], group["params"], may_be_matrix=may_be_matrix):
            continue
        hyperparameter.check(name, group)
    for name, hyperparameter in declared.items():
        if name in group and name != "hess_init":  # which counted at the start
            hyperparameter.fits(name, group)


# -- each by itself --------------------------------------------------------------------------------------------


def number(allowed: str, accept: Callable[[float], bool], remedy: str) -> Check:
    """A number, finite unless ``accept`` takes infinity."""

    def check(name: str, group: dict[str, Any]) -> None:
        value = group[name]
        if not (is_finite(value) or (is_number(value) and value == math.inf)) or not accept(value):
            raise invalid(name, value, allowed, remedy)

    return check


def positive(remedy: str) -> Check:
    """A finite number > 0."""
    return number("a finite number > 0", lambda v: 0 < v < math.inf, remedy)


def not_negative(remedy: str, allowed: str = "a finite number >= 0") -> Check:
    """A finite number >= 0."""
    return number(allowed, lambda v: 0 <= v < math.inf, remedy)


def rate(first_try: float) -> Check:
    """A step size. One that is a tensor is kept as a view: whoever changes the tensor changes the rate."""

    def check(name: str, group: dict[str, Any]) -> None:
        lr = group[name]
        if isinstance(lr, Tensor):
            usable = lr.numel() == 1 and lr.is_floating_point() and lr.layout == torch.strided and not lr.is_meta
            if not usable or lr.requires_grad:
                allowed = (
                    "a finite number >= 0, or a tensor with one such number, of a floating-point dtype, without a "
                )
                raise invalid(name, lr, f"{allowed}gradient", f"Pass e.g. lr=torch.tensor({first_try}).")
            group[name] = lr.reshape(())
        value = lr.item() if isinstance(lr, Tensor) else lr
        if not is_finite(value) or value < 0:
            raise invalid(name, group[name], "a finite number >= 0", f"{first_try} is a good first try.")

    return check


def flag(name: str, group: dict[str, Any]) -> None:
    """``True`` or ``False``."""
    check_flag(name, group[name])


def seed(name: str, group: dict[str, Any]) -> None:
    """A key of the generator."""
    checks.check_seed(group[name])


def at_least_one(name: str, group: dict[str, Any]) -> None:
    """A whole number >= 1."""
    if not is_number(group[name], whole=True) or group[name] < 1:
        raise invalid(name, group[name], "an integer >= 1", "Leave it out for the default.")


def or_none(check: Check) -> Check:
    """What ``check`` takes, or ``None``."""
    return lambda name, group: None if group[name] is None else check(name, group)


def one_of(values: tuple[Any, ...], remedy: str, allowed: str | None = None) -> Check:
    """One of a few values, which ``allowed`` may say in words."""

    def check(name: str, group: dict[str, Any]) -> None:
        if isinstance(group[name], Tensor) or group[name] not in values:
            raise invalid(name, group[name], allowed or f"one of {values}", remedy)

    return check


choice = one_of((None, True, False), "None lets the library choose.", "None, True or False")
preconditioner = one_of(
    ("precision", "root", "identity"),
    "Precision: the natural-gradient step; root: a step of Adam's kind; identity: of SGD's.",
    '"precision", "root" or "identity"',
)
who_draws = one_of(
    ("shared", "per_rank"),
    "Shared: the ranks of a data-parallel run draw the same samples; per_rank: each draws its own.",
    '"shared" or "per_rank"',
)


def pair_of_decays(name: str, group: dict[str, Any]) -> None:
    """(β₁, β₂)."""
    betas = group[name]
    remedy = "The first is the momentum of the gradient (0 = none), the second the decay of the curvature."
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise invalid(name, betas, "a pair of numbers, each in [0, 1)", remedy)
    for i, beta in enumerate(betas):
        if not is_number(beta) or not 0 <= beta < 1:
            raise invalid(f"{name}[{i}]", beta, "a number in [0, 1)", remedy)
    group[name] = (float(betas[0]), float(betas[1]))


def sample_count(name: str, group: dict[str, Any]) -> None:
    """How many samples; a draw has 30 bits for its number."""
    if not is_number(group[name], whole=True) or not 0 <= group[name] < 2**30:
        remedy = "0 takes the gradient at the mean, K averages over K samples."
        raise invalid(name, group[name], "an integer >= 0 (and below 2**30)", remedy)


def batch_size(name: str, group: dict[str, Any]) -> None:
    """A number of examples, or that the objective knows it."""
    value = group[name]
    if value is None or (isinstance(value, str) and value == "objective"):
        return
    if not is_number(value) or not 1 <= value < math.inf:
        remedy = "Pass the rows of a mini-batch, e.g. batch_size=loader.batch_size."
        raise invalid(name, value, 'a number >= 1, "objective" or None', remedy)
    group[name] = float(value)


def not_centered(optimizer: str, why: str) -> dict[str, Any]:
    """What is otherwise with ``centered`` in a method whose curvature is no spread of gradients."""
    remedy = "Its curvature is no spread of gradients; Vprop and VONG can be centred."

    def check(name: str, group: dict[str, Any]) -> None:
        flag(name, group)
        if group[name]:
            raise invalid(name, True, f"False for {optimizer}", remedy)

    return {"words": f"not for {optimizer}, {why}.", "check": check}


# -- together with others --------------------------------------------------------------------------------------


def enough_samples(name: str, group: dict[str, Any]) -> None:
    """As many samples as the other arguments need."""
    count, antithetic, centered = group[name], group["antithetic"], group["centered"]
    if centered and count < 2:
        remedy = "A spread needs two samples: try mc_samples=2, antithetic=True."
        raise invalid(name, count, ">= 2 when centered=True", remedy)
    if antithetic and count < 2:
        raise invalid(name, count, ">= 2 when antithetic=True", "A pair needs two samples: try mc_samples=2.")
    if antithetic and centered and count % 2:
        raise invalid(name, count, "even when antithetic=True and centered=True", f"Use mc_samples={count + 1}.")


def check_samples(group: dict[str, Any]) -> None:
    """Check how many samples and examples there are, and the kind of step: groups can be edited at any time."""
    sample_count("mc_samples", group)
    enough_samples("mc_samples", group)
    if "batch_size" in group:  # not every method has it
        batch_size("batch_size", group)
    if "preconditioner" in group:
        preconditioner("preconditioner", group)
        root_of_known_batches("preconditioner", group)


def fisher_or_centered(name: str, group: dict[str, Any]) -> None:
    """One of the two curvatures."""
    if group[name] and group["centered"]:
        raise invalid("centered", True, f"False when {name}=True", "Choose one of the two curvatures.")


def root_of_known_batches(name: str, group: dict[str, Any]) -> None:
    """The size of a mini-batch's gradients is that of one example's over √M."""
    if group[name] == "root" and group["batch_size"] is None:
        remedy = "Pass the rows of a mini-batch, e.g. batch_size=loader.batch_size."
        raise invalid("batch_size", None, 'a number when preconditioner="root"', remedy)


def start_that_stays(name: str, group: dict[str, Any]) -> None:
    """Of a riemannian average, whose further term holds for small changes only and forgets nothing at once."""
    if group[name] is not None and group.get("riemannian", True):
        remedy = "Choose hess_init with care, or an optimizer whose average is a plain one (Vprop, Vario, MeanField)."
        raise invalid(name, group[name], "None with IVON's riemannian average", remedy)


def own_noise_of_whole_parameters(name: str, group: dict[str, Any]) -> None:
    """Noise of its own on each rank only where the parameters are whole on each."""
    if group[name] == "per_rank" and any(is_sharded(p) for p in group["params"]):
        raise invalid(
            name,
            group[name],
            '"shared" where parameters are spread over ranks (FSDP, tensor parallel)',
            "A sample of a spread parameter is made by all ranks together. Use DistributedDataParallel for per_rank.",
        )


def one_implementation(name: str, group: dict[str, Any]) -> None:
    """``fused`` or ``foreach``."""
    if group["foreach"] and group[name]:
        raise invalid(name, True, "None or False with foreach=True", "Ask for one implementation, or for none.")


def finite_variance(name: str, group: dict[str, Any]) -> None:
    """An initial curvature, where the prior has none."""
    precision = group["prior_precision"]
    if isinstance(precision, Tensor) or group[name] != 0:
        return
    if any(bool((to_local(t) == 0).any()) for t in precision) if isinstance(precision, list) else precision == 0:
        remedy = "Without either, the variance is infinite: set hess_init=1 or prior_precision > 0."
        raise invalid(name, group[name], "> 0 when prior_precision is 0", remedy)


def _scales(group: dict[str, Any]) -> None:
    """Refuse numbers that are fine one by one, and together leave the range of the arithmetic.

    Looked at is what an update makes of them first: ess = N/τ, h + δ with δ = λ/ess, and the precision ess·(h + δ), the
    inverse of the variance.
    """
    wide = all(compute_dtype(p) == torch.float64 for p in group["params"])
    limits = torch.finfo(torch.float64 if wide else torch.float32)
    ess, hess, precision = group["num_data"] / group["temperature"], group["hess_init"], group["prior_precision"]
    if float(group["lr"]) > limits.max:
        raise invalid(
            "lr", group["lr"], f"<= {limits.max:.2g}, the largest {limits.dtype}", "Useful step sizes are 1 or less."
        )
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

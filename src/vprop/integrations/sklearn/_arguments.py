"""Checks of the estimators' arguments: every error names the argument, its value, what is allowed, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vprop.checks import invalid, is_finite, is_number

PRIOR = "It is λ of the prior N(0, 1/λ) of every weight. Larger shrinks more."


def check_number(estimator: Any, name: str, allowed: str, accept: Callable[[float], bool], remedy: str) -> None:
    """Refuse an argument that is no number, or not one of those allowed."""
    value = getattr(estimator, name)
    if not is_finite(value) or not accept(value):
        raise invalid(name, value, allowed, remedy)


def check_count(estimator: Any, name: str, remedy: str, *, least: int = 1) -> None:
    """Refuse an argument that is no whole number, or a smaller one than ``least``."""
    value = getattr(estimator, name)
    if not is_number(value, whole=True) or value < least:
        raise invalid(name, value, f"an integer >= {least}", remedy)


def check_choice(estimator: Any, name: str, choices: tuple[str, ...], remedy: str) -> None:
    """Refuse an argument that is not one of the words in ``choices``."""
    value = getattr(estimator, name)
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, value, " or ".join(repr(choice) for choice in choices), remedy)


def check_flag(estimator: Any, name: str) -> None:
    """Refuse an argument that is neither true nor false."""
    value = getattr(estimator, name)
    if not isinstance(value, bool | int) and type(value).__name__ != "bool_":
        raise invalid(name, value, "True or False", f"Pass {name}=True or {name}=False.")


def check_shared(estimator: Any, decides: bool = False) -> None:
    """The arguments that all three estimators have; whether some may be left for the estimator to decide."""
    check_count(estimator, "max_iter", "It is the number of passes over the training data.")
    check_count(estimator, "n_posterior_samples", "It is the number of weight samples that a prediction averages over.")
    _check_learning_rate(estimator, decides)
    check_number(
        estimator,
        "validation_fraction",
        "a number between 0 and 1",
        lambda v: 0 < v < 1,
        "It is the share of the training data that early stopping holds out.",
    )
    check_count(estimator, "n_iter_no_change", "It is how many passes without progress early stopping waits.")
    check_number(
        estimator, "tol", "a number >= 0", lambda v: v >= 0, "It is the progress that counts, in nats per row."
    )
    for name in ("standardize", "early_stopping", "verbose"):
        check_flag(estimator, name)
    try:
        torch.device(estimator.device)
    except (RuntimeError, TypeError):
        raise invalid("device", estimator.device, "the name of a torch device", "'cpu' and 'cuda' are two.") from None


def _check_learning_rate(estimator: Any, decides: bool) -> None:
    remedy = "It is the size of the first steps; lower the default if training diverges."
    if not decides:
        check_positive(estimator, "learning_rate_init", remedy)
    elif estimator.learning_rate_init is not None:
        allowed = "a finite number > 0 or None"
        check_number(estimator, "learning_rate_init", allowed, lambda v: 0 < v < math.inf, remedy)


def check_regression(estimator: Any, families: tuple[str, ...]) -> None:
    """The arguments that only the regressor has."""
    check_choice(estimator, "noise", families, "'student_t' includes the normal and fits outliers too.")
    check_count(estimator, "noise_folds", "0 learns the noise from the training rows themselves.", least=0)
    if estimator.noise_folds == 1:
        raise invalid("noise_folds", 1, "0 or an integer >= 2", "One fold would leave no rows to train on.")
    check_positive(estimator, "weight_noise_limit", "It is σ as a share of a layer's root mean square weight.")


def check_network(
    estimator: Any, activations: tuple[str, ...], optimizers: tuple[str, ...], decides: bool = False
) -> None:
    """The arguments of the networks."""
    check_shared(estimator, decides)
    for size in hidden_sizes(estimator.hidden_layer_sizes):
        if not is_number(size, whole=True) or size < 1:
            raise invalid(
                "hidden_layer_sizes",
                estimator.hidden_layer_sizes,
                "integers >= 1",
                "(100,) is one hidden layer of 100 units, () none.",
            )
    check_choice(estimator, "activation", activations, "They are those of scikit-learn's MLPs.")
    check_choice(estimator, "optimizer", optimizers, "'ivon' takes two gradients a step, the others one.")
    check_count(estimator, "n_members", "1 is a single network.")
    if not (decides and isinstance(estimator.prior_precision, str)):
        check_positive(estimator, "prior_precision", PRIOR)
    elif estimator.prior_precision != "auto":
        raise invalid("prior_precision", estimator.prior_precision, "a finite number > 0 or 'auto'", PRIOR)
    check_positive(estimator, "temperature", "1 is Bayes; smaller is a narrower posterior.")
    if estimator.batch_size != "auto":
        if isinstance(estimator.batch_size, str):
            raise invalid("batch_size", estimator.batch_size, "'auto' or an integer >= 1", "'auto' is the default.")
        check_count(estimator, "batch_size", "'auto' is the default.")
    if estimator.betas is not None or not decides:
        _check_betas(estimator.betas)


def check_positive(estimator: Any, name: str, remedy: str) -> None:
    """Refuse what is no positive number."""
    check_number(estimator, name, "a finite number > 0", lambda v: 0 < v < math.inf, remedy)


def hidden_sizes(value: Any) -> tuple[Any, ...]:
    """The sizes of the hidden layers; one number is one layer, as in scikit-learn."""
    if is_number(value, whole=True):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        raise invalid("hidden_layer_sizes", value, "a tuple of integers", "(100,) is one layer of 100.") from None


def _check_betas(betas: Any) -> None:
    usable = isinstance(betas, tuple | list) and len(betas) == 2
    if not usable or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise invalid(
            "betas",
            betas,
            "a pair of numbers, each in [0, 1)",
            "The first is the momentum of the gradient, the second the decay of the curvature.",
        )

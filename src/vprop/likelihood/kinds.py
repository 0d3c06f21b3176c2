"""The kinds of likelihood, which of them a loss stands for, and the checks of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vprop.checks import invalid, is_number, shown
from vprop.likelihood.terms import options_beyond_a_log_likelihood
from vprop.precision import as_tensor

Likelihood = Literal["categorical", "bernoulli", "gaussian", "heteroscedastic"]
CLASSES = ("categorical", "bernoulli")
"""The kinds of classifiers."""


class LikelihoodModule(nn.Module):
    """A loss that says which likelihood it is the mean negative logarithm of.

    A subclass names its kind in ``likelihood``; its ``forward(output, y)`` is the mean over examples. One of kind
    "gaussian" overrides :meth:`current_noise`.
    """

    likelihood: ClassVar[Likelihood]

    def current_noise(self) -> float | Tensor:
        """The noise variance as it is now, a copy without a graph; 1.0 where the kind has none."""
        return 1.0


LikelihoodLike: TypeAlias = Likelihood | LikelihoodModule
"""What the argument ``likelihood`` may be: the name of a kind, or a loss that knows its own."""


def check_likelihood(likelihood: str | None, noise_variance: float | Tensor | None) -> None:
    """Refuse a likelihood that is not one of ours, and a variance that is none."""
    if likelihood is not None and likelihood not in get_args(Likelihood):
        names = ", ".join(repr(name) for name in get_args(Likelihood))
        raise ValueError(
            f"Invalid likelihood={likelihood!r}: must be one of {names}. Use 'categorical' for softmax logits, "
            "'bernoulli' for sigmoid logits, 'gaussian' for regression, 'heteroscedastic' for regression whose model "
            "returns means and log-variances, or pass the GaussianLikelihood that the model was trained with."
        )
    if noise_variance is None:
        return
    variance = variance_tensor(noise_variance)
    if not bool((torch.isfinite(variance) & (variance >= 0)).all()):
        raise ValueError(
            f"Invalid noise_variance={shown(noise_variance)}: must be finite and >= 0. It is the variance, not its "
            "logarithm, of an observation around its mean."
        )


def variance_tensor(noise_variance: Any) -> Tensor:
    """A variance that was given as a number, a list of numbers or a tensor."""
    try:
        variance = as_tensor(noise_variance)
        usable = not (variance.is_complex() or variance.is_meta or variance.dtype == torch.bool or variance.is_sparse)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        usable = False
    if not usable:
        raise invalid(
            "noise_variance",
            noise_variance,
            "a positive number, or a tensor of them",
            "It is the variance of an observation around its mean: 1.0 is the default.",
        )
    return variance.detach()


@torch.no_grad()
def snapshot_likelihood(
    likelihood: LikelihoodLike | None, noise_variance: float | Tensor | None = None
) -> tuple[Likelihood | None, float | Tensor]:
    """A likelihood as its name and a copy of its noise variance, both checked: what can be kept and saved.

    ``None`` and 1.0 are a variance that nobody gave; any other contradicts a likelihood that has its own.

    >>> from vprop.likelihood import GaussianLikelihood
    >>> snapshot_likelihood(GaussianLikelihood(0.25))
    ('gaussian', 0.25)
    >>> snapshot_likelihood("gaussian", 0.5), snapshot_likelihood("categorical")
    (('gaussian', 0.5), ('categorical', 1.0))
    """
    kind = likelihood.likelihood if isinstance(likelihood, LikelihoodModule) else likelihood
    check_likelihood(kind, noise_variance)
    noise_variance = _plain(noise_variance)
    given = noise_variance is not None and (isinstance(noise_variance, Tensor) or noise_variance != 1.0)
    if given and isinstance(likelihood, LikelihoodModule):
        raise _two_noises(likelihood, noise_variance)
    if given and kind == "heteroscedastic":
        raise ValueError(
            f"Invalid noise_variance={noise_variance!r}: must be left out with likelihood='heteroscedastic'. The noise "
            "is in the model's outputs: their last half are log-variances."
        )
    if given:
        refuse_noise_of_classes(kind, noise_variance)
    if isinstance(likelihood, LikelihoodModule):
        return kind, likelihood.current_noise()
    return kind, 1.0 if noise_variance is None else noise_variance


def _plain(noise_variance: Any) -> float | Tensor | None:
    """A number as a float, which JSON has a form for; a list or an array as a tensor, and a tensor as a copy."""
    if noise_variance is None:
        return None
    return float(noise_variance) if is_number(noise_variance) else variance_tensor(noise_variance).clone()


def refuse_noise_of_classes(kind: Any, noise_variance: float | Tensor | None) -> None:
    """Refuse a noise variance of a classifier, which would change nothing."""
    if kind in CLASSES:
        raise ValueError(
            f"Invalid noise_variance={shown(noise_variance)}: must be left out with likelihood={kind!r}. Classes have "
            "no noise variance; for a regression pass likelihood='gaussian'."
        )


def likelihood_of(loss_fn: Callable[..., Any]) -> tuple[Likelihood, float | Tensor] | None:
    """The likelihood and (present) noise variance that a loss stands for; ``None`` for a function that is not known.

    Known are this library's losses and torch's own. The squared error (y−f)² is the negative log-density of a Gaussian
    with variance ½, up to a constant.
    """
    if isinstance(loss_fn, LikelihoodModule):
        return loss_fn.likelihood, loss_fn.current_noise()
    if not _is_plain(loss_fn):
        return None
    if loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss):
        return "categorical", 1.0
    if loss_fn is F.binary_cross_entropy_with_logits or isinstance(loss_fn, nn.BCEWithLogitsLoss):
        return "bernoulli", 1.0
    if loss_fn is F.mse_loss or isinstance(loss_fn, nn.MSELoss):
        return "gaussian", 0.5
    return None


def likelihood_module_of(
    loss_fn: Callable[..., Any], likelihood: LikelihoodLike | None, noise_variance: float | Tensor | None
) -> LikelihoodModule | None:
    """The module, if any, that says what ``loss_fn`` stands for; refuses arguments that contradict it."""
    module = loss_fn if isinstance(loss_fn, LikelihoodModule) else likelihood
    if not isinstance(module, LikelihoodModule):
        return None
    if likelihood is not None and likelihood is not module and likelihood != module.likelihood:
        raise ValueError(
            f"Invalid likelihood={likelihood!r}: must be left out where the loss is a {type(module).__name__}, which "
            f"is {module.likelihood!r} and says so itself."
        )
    if noise_variance is not None:
        raise _two_noises(module, noise_variance)
    return module


def _two_noises(module: LikelihoodModule, noise_variance: float | Tensor | None) -> ValueError:
    return ValueError(
        f"Invalid noise_variance={noise_variance!r}: must be left out with a {type(module).__name__}, which has its "
        "own noise. Leave it out, or pass likelihood='gaussian' with the noise_variance you mean."
    )


def _is_plain(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss module has no option that makes it something else than a mean negative log-likelihood."""
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.BCEWithLogitsLoss | nn.MSELoss):
        return True
    return not options_beyond_a_log_likelihood(lambda name: getattr(loss_fn, name, None))

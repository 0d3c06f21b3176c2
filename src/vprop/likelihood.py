"""Which distribution a loss is the negative log-likelihood of, and labels drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vprop import noise

Likelihood = Literal["categorical", "bernoulli", "gaussian"]


def check_likelihood(likelihood: str | None, noise_variance: float | Tensor | None) -> None:
    """Refuse a likelihood that is not one of ours, and a variance that is none."""
    if likelihood is not None and likelihood not in get_args(Likelihood):
        names = ", ".join(repr(name) for name in get_args(Likelihood))
        raise ValueError(
            f"Invalid likelihood={likelihood!r}: must be one of {names}. Use 'categorical' for softmax logits, "
            "'bernoulli' for sigmoid logits, 'gaussian' for regression."
        )
    if noise_variance is not None and not bool((torch.as_tensor(noise_variance) >= 0).all()):
        raise ValueError(
            f"Invalid noise_variance={noise_variance!r}: must be >= 0. It is the variance, not its logarithm, of an "
            "observation around its mean."
        )


def likelihood_of(loss_fn: Callable[..., Any]) -> tuple[Likelihood, float] | None:
    """The likelihood and noise variance that torch's own losses stand for; ``None`` for any other function.

    The squared error (y−f)² is the negative log-density of a Gaussian with variance ½, up to a constant.
    """
    if not _is_plain(loss_fn):
        return None
    if loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss):
        return "categorical", 1.0
    if loss_fn is F.binary_cross_entropy_with_logits or isinstance(loss_fn, nn.BCEWithLogitsLoss):
        return "bernoulli", 1.0
    if loss_fn is F.mse_loss or isinstance(loss_fn, nn.MSELoss):
        return "gaussian", 0.5
    return None


def _is_plain(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss module has no option that makes it something else than a mean negative log-likelihood."""
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.BCEWithLogitsLoss | nn.MSELoss):
        return True
    weighted = any(getattr(loss_fn, name, None) is not None for name in ("weight", "pos_weight"))
    smoothed = getattr(loss_fn, "label_smoothing", 0.0) != 0.0
    ignoring = getattr(loss_fn, "ignore_index", -100) >= 0  # a class that could be drawn
    return loss_fn.reduction == "mean" and not (weighted or smoothed or ignoring)


@torch.no_grad()
def draw_labels(
    outputs: Tensor, labels: Tensor, likelihood: Likelihood, noise_variance: float | Tensor, draw: noise.Draw
) -> Tensor:
    """Labels drawn from p(y|outputs), in the shape and dtype of the real ``labels``.

    Classes lie along dimension 1 of the outputs, as for ``F.cross_entropy``; a negative class index (torch's
    ``ignore_index``) marks a label that does not count, and stays.
    """
    if likelihood == "categorical":
        class_dim = 1 if outputs.dim() > 1 else 0
        probs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).softmax(class_dim)
        cumulative = probs.movedim(class_dim, -1).cumsum(-1)
        uniform = _uniform(cumulative[..., 0], draw).unsqueeze(-1)
        classes = (uniform > cumulative[..., :-1]).sum(-1)
        if labels.is_floating_point():  # probabilities as targets
            one_hot = F.one_hot(classes, probs.shape[class_dim]).movedim(-1, class_dim)
            return one_hot.to(labels.dtype)
        return torch.where(labels >= 0, classes.to(labels.dtype), labels)
    if likelihood == "bernoulli":
        drawn = (_uniform(outputs, draw) < outputs.sigmoid()).to(labels.dtype)
    else:
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        normal = noise.normal(0, outputs.numel(), draw, device=outputs.device, dtype=dtype)
        std = torch.as_tensor(noise_variance).to(normal).sqrt()
        drawn = (outputs + std * normal.view(outputs.shape)).to(labels.dtype)
    return drawn.view(labels.shape)


def labels_in_the_mean(
    outputs: Tensor, labels: Tensor, slope: Tensor, likelihood: Likelihood, noise_variance: float | Tensor
) -> float:
    """M, how many independent labels the loss is a mean over, from its ``slope`` in the outputs.

    The slope of a mean over M labels is s/M, with s the slope of the negative log-likelihood itself. So M need not be
    guessed from shapes: a loss may sum over some dimensions and average over others.
    """
    if likelihood == "categorical":
        class_dim = 1 if outputs.dim() > 1 else 0
        probs = outputs.double().softmax(class_dim)
        if labels.is_floating_point():
            score = probs - labels
        else:
            one_hot = F.one_hot(labels.clamp_min(0), probs.shape[class_dim]).movedim(-1, class_dim)
            score = (probs - one_hot) * (labels >= 0).unsqueeze(class_dim)
    elif likelihood == "bernoulli":
        score = outputs.double().sigmoid() - labels.reshape(outputs.shape)
    else:
        score = (outputs - labels.reshape(outputs.shape)).double() / noise_variance
    return float(score.square().sum() / (score * slope).sum().clamp_min(1e-300))


def _uniform(like: Tensor, draw: noise.Draw) -> Tensor:
    """Uniform numbers in the shape of ``like``: normals through their distribution function."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.special.ndtr(noise.normal(0, like.numel(), draw, device=like.device, dtype=dtype)).view(like.shape)

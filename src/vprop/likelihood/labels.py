"""Labels drawn from the model's own distribution, and how many of them a loss is a mean over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vprop import noise
from vprop.likelihood.gaussian import split_heteroscedastic
from vprop.likelihood.kinds import Likelihood
from vprop.precision import as_tensor


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
        drawn = _uniform(outputs, draw) < outputs.sigmoid()
    elif likelihood == "heteroscedastic":
        mean, log_variance = split_heteroscedastic(outputs)
        drawn = mean + (0.5 * log_variance).exp() * _normal(mean, draw)
    else:
        normal = _normal(outputs, draw)
        drawn = outputs + as_tensor(noise_variance).to(normal).sqrt() * normal
    return drawn.to(labels.dtype).view(labels.shape)


@torch.no_grad()
def labels_in_the_mean(
    outputs: Tensor, labels: Tensor, slope: Tensor, likelihood: Likelihood, noise_variance: float | Tensor
) -> float:
    """M, how many independent labels the loss is a mean over, from its ``slope`` in the outputs.

    The slope of a mean over M labels is s/M, with s the slope of the negative log-likelihood itself, so M = sᵀs/sᵀslope
    need not be guessed from shapes: a loss may sum over some dimensions and average over others.
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
    elif likelihood == "heteroscedastic":
        # ∂/∂f and ∂/∂s of ½[(y−f)²e⁻ˢ + s]
        mean, log_variance = split_heteroscedastic(outputs.double())
        error, precision = mean - labels.reshape(mean.shape), (-log_variance).exp()
        score = torch.cat([error * precision, 0.5 - 0.5 * error.square() * precision], dim=-1)
    else:
        score = (outputs - labels.reshape(outputs.shape)).double() / noise_variance
    along = float((score * slope).sum().abs())
    return float(score.square().sum()) / along if along > 0 else 0.0  # a loss that no label has a part in


def _normal(like: Tensor, draw: noise.Draw) -> Tensor:
    """Normal numbers in the shape of ``like``, at least in float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return noise.normal(0, like.numel(), draw, device=like.device, dtype=dtype).view(like.shape)


def _uniform(like: Tensor, draw: noise.Draw) -> Tensor:
    """Uniform numbers in the shape of ``like``: normals through their distribution function."""
    return torch.special.ndtr(_normal(like, draw))

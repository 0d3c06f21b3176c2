"""ĥ = M·g̃² with g̃ the gradient on labels drawn from the model: the Fisher in place of squared observed gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.curvature._base import ObservedAverage
from vprop.curvature._second_derivatives import detached_copies
from vprop.likelihood import draw_labels, labels_in_the_mean
from vprop.noise import Draw
from vprop.objective import Objective


class SampledFisher(ObservedAverage):
    """The squared gradient of the mean loss on M drawn labels, times M.

    Unbiased for E_q[diag F̄], F̄ the mean over the mini-batch of the Fisher information, which for the usual
    likelihoods is the generalised Gauss–Newton matrix. Labels drawn from the model make independent scores of mean
    zero, so E[g̃g̃ᵀ] = F̄/M: the factor is the number of labels in the mean, whatever ess is. (With a full batch and
    temperature 1 it is ess, as in the squared gradient of observed labels.)
    """

    draws_labels = True

    @torch.enable_grad()
    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """√M·g̃ at the weights in the model."""
        if objective.likelihood is None:
            raise ValueError(
                "The sampled Fisher draws labels from the model, but the loss function does not say from which "
                "distribution. Pass Objective(..., likelihood='categorical' | 'bernoulli' | 'gaussian' | "
                "'heteroscedastic'), and for 'gaussian' noise_variance, so that the loss is its negative logarithm."
            )
        weights = detached_copies(parameters)
        outputs = objective.output_at(weights)
        likelihood, noise_variance = objective.likelihood, objective.noise_variance
        labels = draw_labels(outputs.detach(), objective.y, likelihood, noise_variance, draw)
        loss = objective.loss_fn(outputs, labels)
        (slope,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        count = labels_in_the_mean(outputs.detach(), labels, slope, likelihood, noise_variance)
        return [math.sqrt(count) * grad for grad in grads]

    def curvature_of(self, observed: Tensor) -> Tensor:
        """M·g̃², or the matrix M·g̃g̃ᵀ."""
        return self.multiply(observed, observed)

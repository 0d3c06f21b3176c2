"""ĥ = M·g̃² with g̃ the gradient on labels drawn from the model: the Fisher in place of squared observed gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.curvature._base import ObservedAverage
from vprop.curvature._second_derivatives import detached_copies
from vprop.likelihood import draw_labels, labels_in_the_mean
from vprop.likelihood.terms import LossCall, LossWatch, options_beyond_a_log_likelihood
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
        with LossWatch() as watch:
            loss = objective.loss_fn(outputs, labels)
        _refuse_options(watch.call_of(loss))
        (slope,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        count = labels_in_the_mean(outputs.detach(), labels, slope, likelihood, noise_variance)
        return [math.sqrt(count) * grad for grad in grads]

    def curvature_of(self, observed: Tensor) -> Tensor:
        """M·g̃², or the matrix M·g̃g̃ᵀ."""
        return self.multiply(observed, observed)


def _refuse_options(call: LossCall | None) -> None:
    """Refuse a loss of torch's that draws are no labels of, whatever likelihood it was said to have.

    With weights the scores of drawn labels have those of the drawn classes, with smoothing their mean is not zero, and
    a sum has no number of labels as a factor.
    """
    found = [] if call is None else options_beyond_a_log_likelihood(call.option)
    if call is not None and found:
        raise ValueError(
            f"Invalid loss_fn: {call.function.__name__} with {', '.join(found)}, must be a mean negative "
            "log-likelihood where the curvature comes from labels that are drawn from the model (sampled_fisher). "
            "Leave that option out, or take the curvature from the labels that are there: sampled_fisher=False, VOGN "
            "or CVI."
        )

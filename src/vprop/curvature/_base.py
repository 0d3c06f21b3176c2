"""What an estimator of the curvature is: it folds the samples of a step, one at a time, into running averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vprop.noise import Draw
from vprop.objective import Objective

Multiply = Callable[[Tensor, Tensor], Tensor]
"""``torch.mul`` for the diagonal of a product of gradients, ``torch.outer`` for the whole matrix."""


@dataclass
class Evidence:
    """What one weight sample tells of a parameter (diagonal structure) or of all of them as one vector (full)."""

    grad: Tensor
    """ĝ, the gradient of the mean loss at the sample."""
    observed: Tensor | None = None
    """The curvature that the estimator saw in the objective at the sample (:meth:`CurvatureEstimator.observe`)."""
    noise: Tensor | None = None
    """ε of the sample θ = μ + σε."""


@dataclass
class Folded:
    """The samples of the current step, folded so that memory does not grow with their number."""

    grad: Tensor
    """Mean of the samples' gradients, ĝ."""
    product: Tensor
    """The estimator's running statistic."""
    count: int = 1
    """Samples folded so far."""
    partner: Tensor | None = None
    """The gradient at +ε while its antithetic partner is still to come."""


def running_mean(folded: Folded | None, grad: Tensor, product: Tensor) -> Folded:
    """The means of the gradients and of the products so far. ``product`` is taken over, ``grad`` is not changed."""
    if folded is None:
        return Folded(grad, product)
    folded.count += 1
    folded.grad = folded.grad.lerp(grad, 1 / folded.count)
    folded.product.lerp_(product, 1 / folded.count)
    return folded


class CurvatureEstimator(ABC):
    """Turns what the samples of one step tell into ĥ.

    One class serves both structures: ``multiply`` is ``torch.mul`` for a diagonal ĥ and ``torch.outer`` for a matrix.
    """

    needs_objective = False
    """Whether ``step`` must be given an :class:`vprop.Objective`, for :meth:`observe` to look into."""
    needs_noise = False
    """Whether ε of the sample is part of the evidence, and 1/σ² of the conclusion."""
    least_samples = 0
    """How many weight samples a step must have; 0 if the gradient at the mean will do."""
    in_pairs = False
    """Whether the samples must be antithetic pairs."""
    draws_labels = False
    """Whether what is observed depends on labels that are drawn, which should be other ones on every rank."""
    counts_examples = False
    """Whether the factor of :meth:`hess` is M, the number of examples in a mini-batch, where that is known."""
    signed = False
    """Whether what is observed changes its sign with the loss, as a Hessian does and a square does not."""

    def __init__(self, multiply: Multiply = torch.mul) -> None:
        self.multiply = multiply

    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """What :meth:`fold` needs beside the gradient, at the weights that are in the model now.

        One tensor for each of ``parameters`` (the objective's model's, by name): of its shape, or for a matrix its
        block of rows. ``draw`` is where labels may be drawn from.
        """
        raise NotImplementedError(f"{type(self).__name__} looks at gradients only")

    def curvature_of(self, observed: Tensor) -> Tensor:
        """What an observation says of the curvature, which is what :meth:`fold` takes; by default it is that itself.

        Of the diagonal it is given one parameter's, of a matrix the observations of all parameters as one.
        """
        return observed

    def _nothing(self, grad: Tensor) -> Tensor:
        """A product of nothing, in the shape of a product of gradients."""
        nothing = torch.zeros_like(grad)
        return self.multiply(nothing, nothing)

    @abstractmethod
    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Take in the next sample, in the order of the samples. ``None`` starts a step.

        The first gradient may be kept by reference; ``folded`` may be changed in place.
        """

    @abstractmethod
    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """ĥ from all samples of the step. ``precision`` is 1/σ² of the samples, where ``needs_noise``.

        ``ess`` is N/τ, or M where the estimator ``counts_examples`` and ``batch_size`` is given.
        """


class ObservedAverage(CurvatureEstimator):
    """An estimator whose ĥ is the mean over samples of something observed through the objective."""

    needs_objective = True

    def fold(self, folded: Folded | None, evidence: Evidence) -> Folded:
        """Running means of ĝ and of the observation."""
        assert evidence.observed is not None
        return running_mean(folded, evidence.grad, evidence.observed)

    def hess(self, folded: Folded, ess: float, precision: Tensor | None = None) -> Tensor:
        """The mean itself: it is in units of the mean loss already."""
        return folded.product


def folded_before(estimator: CurvatureEstimator, grad: Tensor, samples: int) -> Folded | None:
    """The samples of this step in which a parameter took no part: they count with the gradient they had, zero."""
    folded = None
    for _ in range(samples):
        nothing = torch.zeros_like(grad)
        folded = estimator.fold(folded, Evidence(nothing, nothing, nothing))
    return folded

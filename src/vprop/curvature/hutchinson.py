"""ĥ = z⊙(∇²ℓ·z) with z of random signs: the Hessian's diagonal from products with vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from vprop import noise
from vprop.curvature._base import ObservedAverage
from vprop.curvature._second_derivatives import detached_copies, differentiable_gradients
from vprop.noise import Draw
from vprop.objective import Objective


class Hutchinson(ObservedAverage):
    """The mean over samples, and over ``probes`` vectors z of independent random signs, of z⊙(∇²ℓ(θ)z).

    Unbiased for E_q[diag ∇²ℓ], also with mini-batches. The variance of an element is the sum of the squares of the
    Hessian's other entries in its row, so it is exact, with a single probe, where the Hessian is diagonal. A probe
    costs about two gradients, whatever the number of parameters.
    """

    signed = True

    def __init__(self, probes: int = 1) -> None:
        super().__init__()
        if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
            raise ValueError(f"Invalid probes={probes!r}: must be an integer >= 1. 1 is the cheapest.")
        self.probes = probes

    @torch.enable_grad()
    def observe(self, objective: Objective, parameters: dict[str, Tensor], draw: Draw) -> list[Tensor]:
        """The mean over the probes, at the weights in the model."""
        weights = detached_copies(parameters)
        leaves = list(weights.values())
        grads = differentiable_gradients(objective, weights)
        totals = [torch.zeros_like(weight) for weight in leaves]
        for probe in range(self.probes):
            signs = _random_signs(leaves, draw, probe, self.probes)
            # A gradient that depends on no weight has no second derivative, and nothing to differentiate.
            curved = [(grad, sign) for grad, sign in zip(grads, signs, strict=True) if grad.requires_grad]
            if not curved:
                break
            products = torch.autograd.grad(
                [grad for grad, _ in curved],
                leaves,
                [sign for _, sign in curved],
                retain_graph=probe + 1 < self.probes,
                materialize_grads=True,
            )
            for total, sign, product in zip(totals, signs, products, strict=True):
                total.add_(sign * product, alpha=1 / self.probes)
        return totals


def _random_signs(like: list[Tensor], draw: Draw, probe: int, probes: int) -> list[Tensor]:
    """±1 in the shapes of ``like``: the signs of normal numbers, for each parameter its own."""
    draws = [
        draw._replace(parameter=draw.parameter + number, sample=draw.sample * probes + probe)
        for number in range(len(like))
    ]
    signs: list[Tensor] = list(like)
    for i, normals in noise.normals_like(like, draws):
        signs[i] = torch.where(normals < 0, -1.0, 1.0).to(like[i].dtype)
    return signs

"""What a network's variances are held against: the diagonal Laplace approximation at the method's own mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vprop.curvature import HessianDiagonal, PerExampleGaussNewton
from vprop.lab.engine.problem import Problem
from vprop.noise import Draw

CURVATURE = {"mlp": "exact Hessian diagonal", "cnn": "Gauss–Newton diagonal (squared gradients of single examples)"}
"""The exact Hessian diagonal of the convolutions would cost two gradients of all data per weight."""

_CHUNK = 250


def laplace_variance(task: Problem, model: nn.Module) -> Tensor:
    """1/(N·h+λ) for each weight, h ≥ 0 the curvature of the mean loss over all training data at the model's weights."""
    # Neither estimator draws anything, but they are told where they could.
    draw = Draw(seed=0, parameter=0, step=0)
    estimator = HessianDiagonal(_CHUNK) if task.name == "mlp" else PerExampleGaussNewton(_CHUNK)
    blocks = estimator.observe(task.objective(model), dict(model.named_parameters()), draw)
    hess = torch.cat([block.detach().double().flatten() for block in blocks]).clamp_min(0)
    return 1 / (task.num_data * hess + task.prior_precision)

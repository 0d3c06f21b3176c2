"""Linear regression with Gaussian noise: the posterior of any rows in closed form, written without the library."""

from __future__ import annotations

import torch
from torch import nn

from vprop.likelihood import GaussianLikelihood
from vprop.posterior import FullPosterior, GaussianPrior

NOISE, PRIOR, ROWS, COLUMNS = 0.3, 1.7, 12, 3


def make_rows(seed=0, outputs=1):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=random)
    x[:, 1] += 0.8 * x[:, 0]
    x[0] *= 3  # one row of high leverage
    noise = torch.randn(ROWS, outputs, dtype=torch.float64, generator=random)
    return x, x @ torch.randn(COLUMNS, outputs, dtype=torch.float64, generator=random) + 0.5 * noise


def normal_equations(x, y, temperature=1.0):
    """Mean and precision over one output's weights, with p(y|x)^(1/τ)."""
    precision = PRIOR * torch.eye(COLUMNS, dtype=torch.float64) + x.T @ x / (NOISE * temperature)
    return torch.linalg.solve(precision, x.T @ y / (NOISE * temperature)), precision


def make_posterior(x, y, temperature=1.0):
    """The exact posterior as the library holds it: outputs are independent given the rows."""
    outputs = y.shape[1]
    model = nn.Linear(COLUMNS, outputs, bias=False).double()
    mean, precision = normal_equations(x, y, temperature)
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(PRIOR)})
    return FullPosterior(
        model,
        {"weight": mean.T.contiguous()},
        torch.kron(torch.eye(outputs, dtype=torch.float64), precision),
        prior,
        ess=len(x) / temperature,
        temperature=temperature,
        likelihood="gaussian",
        noise_variance=NOISE,
    )


def loss():
    return GaussianLikelihood(NOISE, learnable=False).double()

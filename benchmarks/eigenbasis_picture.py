"""The picture of the documentation: the posterior of two correlated weights, under three structures, over the exact."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vprop
from vprop.plots import style

STEPS, COUNT, PRIOR = 1000, 60, 1.0
PAIRS: dict[str, Any] = {"mc_samples": 2, "antithetic": True, "betas": (0.0, 0.99), "num_data": COUNT}


def data() -> tuple[Tensor, Tensor]:
    """Two inputs that are nearly the same, and targets with noise of variance 1."""
    generator = torch.Generator().manual_seed(3)
    common, own = torch.randn(COUNT, 1, generator=generator), torch.randn(COUNT, 2, generator=generator)
    x = common + 0.35 * own
    return x, x @ torch.tensor([0.8, -0.4]) + torch.randn(COUNT, generator=generator)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the posterior."""
    precision = (x.T @ x + PRIOR * torch.eye(2)).double()
    return torch.linalg.solve(precision, (x.T @ y).double()), torch.linalg.inv(precision)


def trained(kind: Any, x: Tensor, y: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Mean and covariance after some steps on all data."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = kind(model.parameters(), lr=0.3, prior_precision=PRIOR, **PAIRS, **arguments)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (model(x).squeeze(-1) - y).square().mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / STEPS)
        optimizer.step(closure)
    posterior = optimizer.posterior(model)
    if hasattr(posterior, "covariance_of"):
        covariance = posterior.covariance_of("weight")
    elif hasattr(posterior, "covariance"):
        covariance = posterior.covariance
    else:
        covariance = posterior.variance["weight"].flatten().double().diag()
    return posterior.mean["weight"].flatten().double(), covariance


def ellipse(mean: Tensor, covariance: Tensor) -> Tensor:
    """Where the density is that of two standard deviations."""
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = 2 * torch.stack([angle.cos(), angle.sin()])
    return mean[:, None] + torch.linalg.cholesky(covariance) @ circle


@style.pictures()
def picture(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw it to ``--out``, and say how far each posterior is from the exact one, in nats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, y = data()
    mean, covariance = exact(x, y)
    contenders = {
        "diagonal": trained(vprop.IVON, x, y),
        "eigenbasis": trained(vprop.IVON, x, y, structure="eigenbasis", basis_every=5),
        "full": trained(vprop.Vprop, x, y, structure="full", centered=True),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3), sharex=True, sharey=True, layout="constrained")
    normal, rows = torch.distributions.MultivariateNormal(mean, covariance), []
    for axis, (name, (own_mean, own)) in zip(axes, contenders.items(), strict=True):
        kl = float(torch.distributions.kl_divergence(torch.distributions.MultivariateNormal(own_mean, own), normal))
        rows.append({"structure": name, "kl": kl})
        for scale in (0.5, 1.0, 1.5):
            axis.fill(*ellipse(mean, covariance * scale**2).numpy(), color=style.GREY, alpha=0.25, linewidth=0)
        axis.plot(*ellipse(own_mean, own).numpy(), color=style.ORANGE)
        axis.set_title(f"{name}\nKL {kl:.3f} nats")
        axis.set_xlabel("first weight")
        print(rows[-1], flush=True)
    axes[0].set_ylabel("second weight")
    if arguments.out:
        style.save(figure, Path(arguments.out))
    return rows

"""Laplace approximations of the laplace-torch package around the weights that another run has found."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from vprop.lab.deep import predictions
from vprop.lab.deep.derived import Derived
from vprop.lab.deep.predictions import Forward


@dataclass(frozen=True)
class LaplaceRun(Derived):
    """Fitted to all training data as they are, with the prior precision that maximizes the marginal likelihood."""

    def _compute(self) -> dict[str, Any]:
        work = self.work()
        model = self.network(work)
        assert isinstance(model, nn.Sequential)
        inputs = {"train": work.images.train_x, "test": work.test, **work.outliers}
        if dict(self.setting)["diagonal"]:
            fitted_model: nn.Module = model
        else:  # all but the last layer is the same in all draws, and so are its outputs
            body, fitted_model = model[:-1], model[-1]
            inputs = {name: features(body, x, work.rows) for name, x in inputs.items()}
        train_x = inputs.pop("train")
        drawn = self._sampled(fitted_model, train_x, work.images.train_y)
        options = ({"test": work.labels}, work.rows)
        at_mean = predictions.averaged([fitted_model], inputs, *options)
        over_draws = predictions.averaged(drawn, inputs, *options)
        return self.judged(work.labels, at_mean, over_draws)

    def _sampled(self, model: nn.Module, x: Tensor, y: Tensor) -> list[Forward]:
        """Of the Gaussian around the weights of ``model``."""
        package = importlib.import_module("laplace")
        # of a diagonal, asdl's curvature takes a pass over the data, where the package's own takes one for every weight
        of_diagonal = {"hessian_structure": "diag", "backend": package.curvature.AsdlGGN}
        shape = of_diagonal if dict(self.setting)["diagonal"] else {"hessian_structure": "full"}
        fitted = package.Laplace(model, "classification", subset_of_weights="all", **shape)
        fitted.fit(DataLoader(TensorDataset(x, y), batch_size=500))
        fitted.optimize_prior_precision(method="marglik")
        deviations = fitted.sample(self.task.samples).to(x) - fitted.mean.to(x)
        return [linearized(model, deviation) for deviation in deviations]


@torch.no_grad()
def features(body: nn.Module, x: Tensor, rows: int) -> Tensor:
    """What the last layer sees."""
    return torch.cat([body(part) for part in x.split(rows)])


def linearized(model: nn.Module, deviation: Tensor) -> Forward:
    """f(x; θ) + J(x)·(θₛ−θ), the network's first-order expansion at its weights, where Laplace's Gaussian holds.

    ``deviation`` is θₛ−θ as one vector. A product with the Jacobian is a forward with derivatives: no Jacobian is made.
    For a linear layer it is the layer itself at θₛ.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    pieces = deviation.detach().split([weight.numel() for weight in parameters.values()])
    directions = {
        name: piece.view_as(weight).to(weight) for (name, weight), piece in zip(parameters.items(), pieces, strict=True)
    }

    def forward(x: Tensor) -> Tensor:
        def of_weights(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(model, weights, (x,))

        output, change = torch.func.jvp(of_weights, (parameters,), (directions,))[:2]
        return output + change

    return forward

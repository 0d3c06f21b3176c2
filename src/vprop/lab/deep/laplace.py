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
from vprop.lab.deep.draws import OWN
from vprop.lab.deep.predictions import Forward
from vprop.lab.deep.run import DeepRun, judgement, predictions_path
from vprop.lab.deep.workloads import ImageWork
from vprop.lab.engine import sources


@dataclass(frozen=True)
class LaplaceRun(DeepRun):
    """Fitted to all training data as they are, with the prior precision that maximizes the marginal likelihood."""

    around: DeepRun

    @property
    def effort(self) -> float:
        """A pass over the data, and many predictions."""
        return 5.0

    def compute(self) -> dict[str, Any]:
        """Fit, predict, judge, keep."""
        torch.manual_seed(self.seed)
        work = ImageWork(self.task, self.part, self.data_dir, self.how)
        model = work.model(0.0)
        model.load_state_dict(torch.load(self.how.out / "weights" / f"{self.around.key}.pt", weights_only=True))
        model.eval()
        last = not dict(self.setting)["diagonal"]
        package = importlib.import_module("laplace")
        # asdl's curvature takes a pass over the data, where the package's own takes one for every weight of a diagonal
        options = {} if last else {"backend": package.curvature.AsdlGGN}
        shape = ("last_layer", "full") if last else ("all", "diag")
        fitted = package.Laplace(model, "classification", *shape, **options)
        fitted.fit(DataLoader(TensorDataset(work.images.train_x, work.images.train_y), batch_size=500))
        fitted.optimize_prior_precision(method="marglik")
        sets, labels = {"test": work.test, **work.outliers}, {"test": work.labels}
        at_mean = predictions.averaged([model], sets, labels, work.rows, self.how.autocast)
        names = [name for name, _ in model.named_parameters()][-2:] if last else None
        deviations = (sample - fitted.mean for sample in fitted.sample(self.task.samples))
        drawn = (linearized(model, deviation, names) for deviation in deviations)
        over_draws = predictions.averaged(drawn, sets, labels, work.rows)
        predictions.save_images(predictions_path(self), at_mean, over_draws, work.labels)
        return {"code": sources.core(), "steps": 0, "sigma": None} | judgement(at_mean, {OWN: over_draws}, work.labels)


def linearized(model: nn.Module, deviation: Tensor, names: list[str] | None = None) -> Forward:
    """f(x; θ) + J(x)·(θₛ−θ), the network's first-order expansion at its weights, where Laplace's Gaussian holds.

    ``deviation`` is θₛ−θ as one vector, over the parameters called ``names`` or over all. A product with the Jacobian
    is a forward with derivatives: no Jacobian is made. For the last layer it is the network itself at θₛ.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    chosen = {name: parameters[name] for name in names or parameters}
    pieces = deviation.detach().split([weight.numel() for weight in chosen.values()])
    directions = {
        name: piece.view_as(weight).to(weight) for (name, weight), piece in zip(chosen.items(), pieces, strict=True)
    }

    def forward(x: Tensor) -> Tensor:
        def of_weights(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(model, parameters | weights, (x,))

        output, change = torch.func.jvp(of_weights, (chosen,), (directions,))[:2]
        return output + change

    return forward

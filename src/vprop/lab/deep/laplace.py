"""Laplace approximations of the laplace-torch package around the weights that another run has found."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from vprop.lab.deep import predictions
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
        fitted = importlib.import_module("laplace").Laplace(
            model, "classification", "last_layer" if last else "all", "full" if last else "diag"
        )
        fitted.fit(DataLoader(TensorDataset(work.images.train_x, work.images.train_y), batch_size=500))
        fitted.optimize_prior_precision(method="marglik")
        sets, labels = {"test": work.test, **work.outliers}, {"test": work.labels}
        options = (sets, labels, work.rows, self.how.autocast)
        at_mean = predictions.averaged([model], *options)
        trained = list(model.parameters())[-2:] if last else list(model.parameters())
        over_draws = predictions.averaged(_drawn(fitted, model, trained, self.task.samples), *options)
        predictions.save_images(predictions_path(self), at_mean, over_draws, work.labels)
        return {"code": sources.core(), "steps": 0, "sigma": None} | judgement(at_mean, over_draws, work.labels)


def _drawn(fitted: Any, model: nn.Module, trained: list[nn.Parameter], count: int) -> Iterator[Forward]:
    """The model with weights drawn, of the last layer (its weight and bias come last) or of all."""
    for sample in fitted.sample(count):
        vector_to_parameters(sample.detach().to(trained[0]), trained)
        yield model
    vector_to_parameters(fitted.mean.detach().to(trained[0]), trained)

"""What is made from the weights of another run: nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vprop.lab.deep import predictions
from vprop.lab.deep.draws import MEAN, OWN, Statistics
from vprop.lab.deep.predictions import Averaged
from vprop.lab.deep.run import DeepRun, judgement, predictions_path, statistics_batches, weights_path
from vprop.lab.deep.workloads import ImageWork
from vprop.lab.engine import sources

Sets = dict[str, Averaged]
"""Predictions by what was predicted: the test data, outliers."""


@dataclass(frozen=True)
class Derived(DeepRun):
    """Around the weights that another run kept."""

    around: DeepRun

    @property
    def effort(self) -> float:
        """A pass over the data, and many predictions."""
        return 5.0

    def work(self) -> ImageWork:
        """The data of the task."""
        return ImageWork(self.task, self.part, self.data_dir, self.how)

    def network(self, work: ImageWork) -> nn.Module:
        """With the weights, ready to predict."""
        model = work.model(0.0)
        model.load_state_dict(torch.load(weights_path(self.around), weights_only=True))
        return model.eval()

    def judged(self, labels: Tensor, at_mean: Sets, over_draws: Sets | None = None) -> dict[str, Any]:
        """All scores of what it predicts, which is kept."""
        drawn = {} if over_draws is None else {OWN: over_draws}
        predictions.save_images(predictions_path(self), {MEAN: at_mean} | drawn, labels)
        return {"code": sources.core(), "steps": 0, "sigma": None} | judgement(at_mean, drawn, labels)


@dataclass(frozen=True)
class StatisticsRun(Derived):
    """A network that predicts with statistics of BatchNorm of its last weights.

    The running ones are an average over the last steps, in which the weights were others. A draw of a posterior has its
    own ones, so a plain network should be seen with them, too.
    """

    def _compute(self) -> dict[str, Any]:
        work = self.work()
        model = self.network(work)
        chunk = next(work.chunks(torch.Generator(work.test.device).manual_seed(self.seed)))[0]
        inputs = chunk[: round(dict(self.setting)["inputs"])]
        Statistics(lambda: statistics_batches(inputs), self.how.autocast).write(model)
        sets = {"test": work.test, **work.outliers}
        at_mean = predictions.averaged([model], sets, {"test": work.labels}, work.rows, self.how.autocast)
        return self.judged(work.labels, at_mean)

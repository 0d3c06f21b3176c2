"""Logs of the posterior in training, against the same by hand; and the arguments of the callback."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.integrations.lightning_harness import BATCHES, Classifier, Loader, assert_scores, fit, logged, make_trainer
from vprop import VONG, Vprop
from vprop.integrations.lightning import PosteriorCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")


def test_curvature_kl_and_noise_are_logged(tmp_path):
    module = Classifier()
    trainer = make_trainer(PosteriorCallback(every_n_steps=2), logger=CSVLogger(tmp_path, name="", version=""))
    trainer.fit(module, Loader(BATCHES))
    optimizer = trainer.optimizers[0]
    posterior = optimizer.posterior(module)
    hess, variance, mean = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in (
            [optimizer.state[p]["hess"] for p in module.parameters()],
            posterior.variance.values(),
            posterior.mean.values(),
        )
    )
    expected = {
        "curvature": float(hess.mean()),
        "kl": float(posterior.kl()),
        "kl_per_example": float(posterior.kl()) / 100,
        "noise": float(variance.mean().sqrt()),
        "noise_to_weights": float((variance.sum() / mean.square().sum()).sqrt()),
    }
    assert_scores(logged(trainer.callback_metrics, "posterior/"), expected)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    assert_scores({k.removeprefix("posterior/"): float(v) for k, v in rows[-1].items() if "/" in k}, expected)


@pytest.mark.parametrize(("every", "accumulate", "times"), [(1, 1, 6), (1, 2, 3), (4, 1, 1), (None, 1, 0)])
def test_how_often(every, accumulate, times, monkeypatch):
    calls = []
    monkeypatch.setattr(PosteriorCallback, "_log_summaries", lambda self, *args: calls.append(args))
    fit(PosteriorCallback(every_n_steps=every), accumulate_grad_batches=accumulate)
    assert len(calls) == times


def test_a_flat_prior_has_no_kl():
    trainer = make_trainer(PosteriorCallback(every_n_steps=1))
    trainer.fit(Classifier(prior_precision=0.0), Loader(BATCHES))
    assert logged(trainer.callback_metrics, "posterior/").keys() == {"curvature", "noise", "noise_to_weights"}


class WithPrior(Classifier):
    """Its optimizer, and a prior that is made for its parameters."""

    def __init__(self, constructor, make_prior):
        super().__init__()
        self.constructor, self.make_prior = constructor, make_prior

    def configure_optimizers(self):
        params = list(self.parameters())
        return self.constructor(params, lr=0.1, num_data=100, prior_precision=self.make_prior(params))


def test_a_prior_with_correlations_has_a_kl():
    module = WithPrior(VONG, lambda params: 2 * torch.eye(sum(p.numel() for p in params), dtype=torch.float64))
    trainer = make_trainer(PosteriorCallback(every_n_steps=1))
    trainer.fit(module, Loader(BATCHES))
    kl = float(trainer.optimizers[0].posterior(module).kl())
    assert_scores({"kl": logged(trainer.callback_metrics, "posterior/")["kl"]}, {"kl": kl})


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_a_prior_that_is_flat_for_some_weights_has_no_kl(constructor):
    def prior(params):
        return [torch.ones_like(p) if i else torch.zeros_like(p) for i, p in enumerate(params)]

    trainer = make_trainer(PosteriorCallback(every_n_steps=1))
    trainer.fit(WithPrior(constructor, prior), Loader(BATCHES))
    assert logged(trainer.callback_metrics, "posterior/").keys() == {"curvature", "noise", "noise_to_weights"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"likelihood": "softmax"}, r"Invalid likelihood='softmax': must be one of 'categorical'"),
        ({"likelihood": "gaussian", "noise_variance": -1.0}, r"Invalid noise_variance=-1\.0: must be finite and >= 0"),
        ({"num_samples": 0}, r"Invalid num_samples=0: must be an integer >= 1"),
        ({"every_n_steps": 2.5}, r"Invalid every_n_steps=2\.5: must be an integer >= 1, or None"),
        ({"every_n_steps": 0}, r"Invalid every_n_steps=0: must be an integer >= 1, or None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PosteriorCallback(**arguments)

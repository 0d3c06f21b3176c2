"""Scores of averaged predictions in validation, and logs of the posterior, against the same by hand."""

from __future__ import annotations

import math
import os

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from tests.harness import assert_same_run, make_batch
from tests.integrations.lightning_harness import (
    BATCHES,
    VALIDATION,
    Classifier,
    Loader,
    assert_scores,
    logged,
    make_optimizer,
    make_trainer,
    plain_loop,
)
from vprop import GaussianLikelihood, metrics
from vprop.integrations.lightning import PosteriorCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")
SCORES = {
    "log_loss": metrics.nll,
    "accuracy": metrics.accuracy,
    "calibration_error": metrics.expected_calibration_error,
}


def all_of(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def by_hand(posterior, batches, num_samples=8, seed=0, scores=SCORES):
    """The scores of posterior.predict on all batches at once."""
    x, y = all_of(batches)
    probs = posterior.predict(x, num_samples, seed).probs
    return {name: score(probs, y) for name, score in scores.items()}


def trained(callback, *, module=None, batches=BATCHES, validation=VALIDATION, **arguments):
    module = Classifier() if module is None else module
    trainer = make_trainer(callback, **arguments)
    trainer.fit(module, Loader(batches), Loader(validation))
    return trainer, module


# -- scores --------------------------------------------------------------------------------------------------------


def test_classifiers():
    trainer, module = trained(PosteriorCallback("categorical", num_samples=5, seed=3))
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    assert_scores(logged(trainer.callback_metrics), by_hand(posterior, VALIDATION, 5, 3))
    assert "val_loss" in trainer.callback_metrics  # the module's own, at the mean


@pytest.mark.parametrize("width", [None, 1, 2])
def test_binary_labels(width):
    """(n,), (n, 1), and two labels per example."""

    class Binary(Classifier):
        def forward(self, x):
            return self.model(x)[:, 0] if width is None else self.model(x)[:, :width]

        def training_step(self, batch, batch_idx):
            return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

        def validation_step(self, batch, batch_idx):
            pass

    def relabelled(batches):
        generator = torch.Generator().manual_seed(0)
        shape = () if width is None else (width,)
        return [(x, torch.randint(0, 2, (len(y), *shape), generator=generator)) for x, y in batches]

    validation = relabelled(VALIDATION)
    trainer, module = trained(
        PosteriorCallback("bernoulli"), module=Binary(), batches=relabelled(BATCHES), validation=validation
    )
    posterior = trainer.optimizers[0].posterior(module, likelihood="bernoulli")
    assert_scores(logged(trainer.callback_metrics), by_hand(posterior, validation))


class Regression(Classifier):
    def __init__(self):
        super().__init__(nn.Linear(4, 1))
        self.likelihood = GaussianLikelihood(0.5, learnable=False)

    def training_step(self, batch, batch_idx):
        return self.likelihood(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("by_module", [False, True])
def test_regression(by_module):
    module = Regression()
    arguments = {"likelihood": module.likelihood} if by_module else {"likelihood": "gaussian", "noise_variance": 0.5}
    batches, validation = ([(x, x.sum(1, keepdim=True)) for x, _ in part] for part in (BATCHES, VALIDATION))
    trainer, _ = trained(PosteriorCallback(**arguments), module=module, batches=batches, validation=validation)
    x, y = all_of(validation)
    prediction = trainer.optimizers[0].posterior(module, **arguments).predict(x, 8)
    expected = {
        "log_loss": metrics.gaussian_nll(prediction.mean, prediction.variance, y),
        "rmse": metrics.rmse(prediction.mean, y),
        "coverage": metrics.coverage(prediction.mean, prediction.variance, y, level=0.9),
    }
    assert_scores(logged(trainer.callback_metrics), expected)


def test_several_loaders_have_scores_of_their_own():
    module, callback = Classifier(), PosteriorCallback("categorical")
    trainer = make_trainer(callback)
    trainer.fit(module, Loader(BATCHES), [Loader(VALIDATION[:1]), Loader(VALIDATION[1:])])
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    expected = {
        f"{name}/dataloader_idx_{number}": value
        for number, batches in enumerate((VALIDATION[:1], VALIDATION[1:]))
        for name, value in by_hand(posterior, batches).items()
    }
    assert_scores(logged(trainer.callback_metrics), expected)


def test_other_batches_with_a_forward_of_ones_own():
    """A dict, a tuple of outputs, and tokens without a label."""

    class Tagger(Classifier):
        def forward(self, x, scale):
            return {"logits": self.model(x) * scale}

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["x"], 1.0)["logits"].flatten(0, 1), batch["y"].flatten())

        def validation_step(self, batch, batch_idx):
            pass

    def as_sequences(batches):
        return [{"x": x.view(3, -1, 4), "y": y.view(3, -1).index_fill(1, torch.tensor([1]), -100)} for x, y in batches]

    module, validation = Tagger(), as_sequences(VALIDATION[:2])
    forward = lambda module, batch: (module(batch["x"], 1.0)["logits"], batch["y"])  # noqa: E731
    trainer = make_trainer(PosteriorCallback("categorical", forward=forward))
    trainer.fit(module, Loader(as_sequences(BATCHES)), Loader(validation))
    x, y = (torch.cat([batch[key].flatten(0, 1) for batch in validation]) for key in "xy")
    posterior = trainer.optimizers[0].posterior(module.model, likelihood="categorical")
    assert_scores(logged(trainer.callback_metrics), by_hand(posterior, [(x[y >= 0], y[y >= 0])]))


def test_half_precision_sees_what_validation_sees():
    trainer, module = trained(PosteriorCallback("categorical"), precision="bf16-mixed")
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    with torch.autocast("cpu", torch.bfloat16):
        x, y = all_of(VALIDATION)
        logits = posterior.predict(x, 8)
    assert logits.samples.dtype == torch.bfloat16
    assert logged(trainer.callback_metrics)["log_loss"] == pytest.approx(metrics.nll(logits.probs, y), rel=1e-5)


def test_scores_can_be_monitored():
    stopping = EarlyStopping("val_posterior/log_loss", patience=0, min_delta=1e9)
    trainer = make_trainer(PosteriorCallback("categorical"), stopping, max_epochs=9)
    trainer.fit(Classifier(), Loader(BATCHES), Loader(VALIDATION))
    assert trainer.current_epoch == 2
    assert math.isfinite(float(stopping.best_score))


# -- without a trace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_training_goes_on_as_without_the_callback(mc_samples):
    """Bit for bit, with validations (and a check before the first step) in between."""
    callback = PosteriorCallback("categorical", every_n_steps=1)
    trainer, module = trained(
        callback, module=Classifier(mc_samples=mc_samples), num_sanity_val_steps=2, val_check_interval=2
    )
    reference = plain_loop([[batch] for batch in BATCHES], mc_samples=mc_samples)
    assert_same_run(reference, (module.model, trainer.optimizers[0]))


def test_validation_touches_neither_weights_nor_batchnorm_nor_modes():
    seen = []

    class Watching(pl.Callback):
        def _look(self, trainer, module, *args):
            seen.append(
                [{k: v.clone() for k, v in module.state_dict().items()}, [m.training for m in module.modules()]]
            )

        on_validation_batch_start = on_validation_end = _look

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    module = Classifier(network)
    trainer = make_trainer(PosteriorCallback("categorical"), Watching())
    trainer.fit(module, Loader(BATCHES), Loader(VALIDATION))
    before, after = seen[0], seen[-1]
    assert all(torch.equal(before[0][name], value) for name, value in after[0].items())
    assert before[1] == after[1]
    assert module.model[1].num_batches_tracked == len(BATCHES)


def test_the_check_before_the_first_step_sees_the_initial_posterior():
    scores = []

    class Watching(pl.Callback):
        def on_sanity_check_end(self, trainer, module):
            scores.append(logged(trainer.callback_metrics))

    module = Classifier()
    posterior = make_optimizer(module.parameters()).posterior(module, likelihood="categorical")
    trainer = make_trainer(PosteriorCallback("categorical"), Watching(), num_sanity_val_steps=-1)
    trainer.fit(module, Loader(BATCHES), Loader(VALIDATION))
    assert_scores(scores[0], by_hand(posterior, VALIDATION))


# -- outside of fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_after_training_with_the_same_trainer(stage):
    trainer, module = trained(PosteriorCallback("categorical"))
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    getattr(trainer, stage)(module, Loader(VALIDATION[:2]), verbose=False)
    prefix = {"validate": "val", "test": "test"}[stage] + "_posterior/"
    assert_scores(logged(trainer.callback_metrics, prefix), by_hand(posterior, VALIDATION[:2]))


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}]


class InDict(Classifier):
    def configure_optimizers(self):
        return {"optimizer": super().configure_optimizers()}


@pytest.mark.parametrize("kind", [Classifier, Scheduled, InDict])
def test_from_a_checkpoint_in_another_process(kind, tmp_path):
    trainer, module = trained(PosteriorCallback("categorical"), module=kind())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    fresh = make_trainer(PosteriorCallback("categorical"))
    fresh.validate(kind(), Loader(VALIDATION), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert_scores(logged(fresh.callback_metrics), by_hand(posterior, VALIDATION))


def test_a_checkpoint_counts_rather_than_what_the_trainer_has(tmp_path):
    trainer, module = trained(PosteriorCallback("categorical"))
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    expected = by_hand(posterior, VALIDATION)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, Loader(BATCHES), Loader(VALIDATION))
    assert logged(trainer.callback_metrics)["log_loss"] != pytest.approx(expected["log_loss"], rel=1e-3)
    trainer.validate(module, Loader(VALIDATION), ckpt_path=tmp_path / "early.ckpt", verbose=False)
    assert_scores(logged(trainer.callback_metrics), expected)


@pytest.mark.parametrize("weights_only", [None, True])
def test_without_a_posterior_there_is_a_warning_and_no_score(weights_only, tmp_path):
    """Neither trained nor loaded; or loaded from a checkpoint that has weights only."""
    path = None
    trainer, _ = trained(PosteriorCallback("categorical"))
    if weights_only:
        path = tmp_path / "weights.ckpt"
        trainer.save_checkpoint(path, weights_only=True)
    with pytest.warns(RuntimeWarning, match=r"knows no posterior of this module.*ckpt_path=\.\.\."):
        trainer.validate(Classifier(), Loader(VALIDATION), ckpt_path=path, verbose=False)
    assert logged(trainer.callback_metrics) == {}


# -- errors --------------------------------------------------------------------------------------------------------


def test_batches_that_are_no_pairs_are_an_error():
    batch = {"x": make_batch()[0], "y": make_batch()[1]}
    with pytest.raises(TypeError, match=r"a batch of type dict, .*forward\(module, batch\).*\(outputs, targets\)"):
        PosteriorCallback("categorical")._forward(Classifier(), batch)


def test_targets_that_are_no_class_numbers_are_an_error():
    one_hot = [(x, F.one_hot(y, 3)) for x, y in VALIDATION]

    class OneHot(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    with pytest.raises(ValueError, match=r"Invalid targets of shape \(12, 3\): must be \(12,\), class numbers"):
        trained(PosteriorCallback("categorical"), module=OneHot(), validation=one_hot)


def test_outputs_that_are_no_tensors_are_an_error():
    callback = PosteriorCallback("categorical", forward=lambda module, batch: ([module(batch[0])], batch[1]))
    with pytest.raises(TypeError, match=r"outputs of type list and targets of type Tensor, must be tensors.*forward="):
        trained(callback)


def test_an_output_with_logits_is_scored_by_them():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    callback = PosteriorCallback("categorical", forward=lambda module, batch: (Output(module(batch[0])), batch[1]))
    trainer, module = trained(callback)
    posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
    assert_scores(logged(trainer.callback_metrics), by_hand(posterior, VALIDATION))


def test_a_probability_that_underflows_has_a_finite_log_loss():
    """In float32 the probability of the label is 0 under every draw."""
    forward = lambda module, batch: (1e4 * F.one_hot(1 - batch[1], 3) + 0 * module(batch[0]), batch[1])  # noqa: E731
    validation = [(x, y.clamp_max(1)) for x, y in VALIDATION]
    trainer, _ = trained(PosteriorCallback("categorical", forward=forward), validation=validation)
    assert logged(trainer.callback_metrics)["log_loss"] == pytest.approx(1e4)


def test_two_posteriors_are_an_error():
    class Two(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return make_optimizer(self.model[0].parameters()), make_optimizer(self.model[2].parameters())

    with pytest.raises(RuntimeError, match=r"found 2 optimizers of vprop's.*parameter groups, or pass likelihood=None"):
        trained(PosteriorCallback("categorical"), module=Two(), num_sanity_val_steps=1)


# -- several processes ---------------------------------------------------------------------------------------------


class Shard(Loader):
    """Every process reads its own part of each batch; of an odd one the first process reads more."""

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        count = dist.get_world_size() if dist.is_initialized() else 1
        for x, y in self.batches:
            yield x[rank::count], y[rank::count]


@pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="forks, which CUDA does not survive")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_and_score_as_one_does(accumulate):
    runs = []
    for processes in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        module, callback = Classifier(), PosteriorCallback("categorical", every_n_steps=1)
        trainer = make_trainer(callback, accumulate_grad_batches=accumulate, **processes)
        trainer.fit(module, Shard(BATCHES), Shard(VALIDATION))
        runs.append((module, logged(trainer.callback_metrics), logged(trainer.callback_metrics, "posterior/")))
    (alone, scores, logs), (together, scores_together, logs_together) = runs
    for p, q in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)
    assert scores_together == pytest.approx(scores, rel=1e-4)
    assert logs_together == pytest.approx(logs, rel=1e-4)
    assert scores.keys() == SCORES.keys()

"""Resumed runs are the runs that never stopped, what is saved is the mean; either of Lightning's packages will do."""

from __future__ import annotations

import sys
from functools import partial
from importlib import metadata

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from tests.harness import assert_same_run, everything, make_model
from tests.integrations.lightning_harness import (
    BATCHES,
    VALIDATION,
    Classifier,
    Loader,
    fit,
    make_trainer,
    plain_loop,
)
from vprop.integrations.lightning import PosteriorCallback, _framework

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")


class Resumable(Loader):
    """Goes on where it was, as Lightning asks of a loader that is to be resumed in the middle of an epoch."""

    def __init__(self, batches):
        super().__init__(batches)
        self.position, self.start = 0, 0

    def __iter__(self):
        first, self.start = self.start, 0
        for position in range(first, len(self.batches)):
            self.position = position
            yield self.batches[position]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"] + 1


def saved_files(folder):
    return sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        ({}, "32-true"),
        ({"mc_samples": 2}, "32-true"),
        ({"betas": (0.9, 0.9)}, "bf16-mixed"),
        ({"betas": (0.9, 0.9)}, "bf16-true"),  # the optimizer keeps the mean in float32
    ],
)
def test_resumed_between_epochs(arguments, precision, tmp_path):
    run = partial(make_trainer, max_epochs=3, precision=precision)
    trainer = run(PosteriorCallback(), ModelCheckpoint(tmp_path, save_top_k=-1), enable_checkpointing=True)
    module = Classifier(**arguments)
    trainer.fit(module, Loader(BATCHES))
    uninterrupted = module.model, trainer.optimizers[0]
    for path in saved_files(tmp_path)[:2]:
        module, trainer = Classifier(**arguments), run(PosteriorCallback())
        trainer.fit(module, Loader(BATCHES), ckpt_path=path)
        assert int(trainer.optimizers[0].state[module.model[0].weight]["step"]) == 3 * len(BATCHES)
        assert_same_run(uninterrupted, (module.model, trainer.optimizers[0]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_in_the_middle_of_an_epoch(accumulate, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    trainer, module = (
        make_trainer(PosteriorCallback(), checkpoint, enable_checkpointing=True, **arguments),
        Classifier(),
    )
    trainer.fit(module, Resumable(BATCHES))
    uninterrupted = module.model, trainer.optimizers[0]
    windows = [BATCHES[i : i + accumulate] for i in range(0, len(BATCHES), accumulate)]
    assert_same_run(plain_loop(windows * 2), uninterrupted)
    resumed_at = saved_files(tmp_path)[1]
    module, trainer = Classifier(), make_trainer(PosteriorCallback(), **arguments)
    trainer.fit(module, Resumable(BATCHES), ckpt_path=resumed_at)
    assert_same_run(uninterrupted, (module.model, trainer.optimizers[0]))


def test_what_is_saved_in_the_middle_of_an_accumulation_is_the_mean(tmp_path):
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    run = fit(PosteriorCallback(), Saving(), accumulate_grad_batches=3)
    starts = [everything(*plain_loop([BATCHES[:3]] * steps)) for steps in (0, 1)]
    for batch_idx in range(len(BATCHES) - 1):
        saved = torch.load(tmp_path / f"{batch_idx}.ckpt", weights_only=False)["state_dict"]
        expected = starts[0] if batch_idx < 2 else starts[1]
        torch.testing.assert_close(saved["model.0.weight"], expected["0.weight"], rtol=1e-5, atol=1e-6)
    assert_same_run(plain_loop([BATCHES[:3], BATCHES[3:]]), run, rtol=1e-4, atol=1e-5)


def test_what_is_loaded_in_the_middle_of_an_accumulation_stays():
    """The sample of the half-finished step must not come back over it."""
    loaded = {f"model.{name}": value for name, value in make_model(seed=5).state_dict().items()}
    seen = []

    class Loading(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0:
                module.load_state_dict(loaded)
            elif batch_idx == 1:
                seen.append({name: value.clone() for name, value in module.state_dict().items()})

    fit(PosteriorCallback(), Loading(), accumulate_grad_batches=3)
    for name, value in loaded.items():
        torch.testing.assert_close(seen[0][name], value, rtol=1e-5, atol=1e-6)


def test_a_moving_average_of_the_weights_is_one_of_means():
    module = Classifier()
    trainer = make_trainer(EMAWeightAveraging(decay=0.5), PosteriorCallback("categorical"), accumulate_grad_batches=2)
    trainer.fit(module, Loader(BATCHES), Loader(VALIDATION))
    windows = [BATCHES[i : i + 2] for i in range(0, len(BATCHES), 2)]
    means = [everything(*plain_loop(windows[: n + 1]))["0.weight"] for n in range(len(windows))]
    average = means[0]
    for mean in means[1:]:
        average = average.lerp(mean, 0.5)
    torch.testing.assert_close(module.model[0].weight.detach(), average, rtol=1e-4, atol=1e-5)


# -- the two packages ----------------------------------------------------------------------------------------------


def test_pytorch_lightning_trains_and_validates_as_well():
    """The same module, but for its base class."""
    other = pytest.importorskip("pytorch_lightning")
    methods = ("forward", "training_step", "validation_step", "configure_optimizers")
    runs = []
    for package in (pl, other):
        callback = PosteriorCallback("categorical", every_n_steps=1)
        body = {name: getattr(Classifier, name) for name in methods}
        module = type("Other", (package.LightningModule,), body)()
        module.model, module.arguments = make_model(), {}
        trainer = make_trainer(callback, trainer=package.Trainer, accumulate_grad_batches=2)
        trainer.fit(module, Loader(BATCHES), Loader(VALIDATION))
        runs.append((trainer, module))
    (first, module), (second, other_module) = runs
    assert_same_run((module.model, first.optimizers[0]), (other_module.model, second.optimizers[0]))
    assert first.callback_metrics == second.callback_metrics
    assert "val_posterior/accuracy" in second.callback_metrics


@pytest.mark.parametrize(
    ("imported", "chosen"),
    [
        (["lightning.pytorch"], ["lightning.pytorch"]),
        (["pytorch_lightning"], ["pytorch_lightning"]),
        (["lightning.pytorch", "pytorch_lightning"], ["lightning.pytorch", "pytorch_lightning"]),
        ([], ["lightning.pytorch"]),
    ],
)
def test_what_is_imported_is_in_use(imported, chosen, monkeypatch):
    monkeypatch.setattr(_framework.sys, "modules", dict.fromkeys(imported))
    monkeypatch.setattr(metadata, "version", lambda package: "2.5")
    assert _framework.modules_in_use() == chosen


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"lightning": "2.1.4"}, r"needs lightning >= 2\.2, but version 2\.1\.4 is installed.*'lightning>=2\.2'"),
        ({"pytorch-lightning": "1.9"}, r"needs pytorch-lightning >= 2\.2, but version 1\.9 is installed"),
        ({}, r"needs lightning >= 2\.2, which is not installed.*pip install 'lightning>=2\.2'"),
    ],
)
def test_missing_and_old_packages_are_errors(installed, message, monkeypatch):
    def version(package):
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        _framework.sys, "modules", {name: m for name, m in sys.modules.items() if "lightning" not in name}
    )
    with pytest.raises(ImportError, match=message):
        _framework.modules_in_use()

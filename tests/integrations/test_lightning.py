"""Training with Lightning's Trainer is training with a plain closure, and what cannot be is an error."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.amp import GradScaler

from tests.harness import assert_same_run, everything, make_model
from tests.integrations.lightning_harness import (
    BATCHES,
    Classifier,
    Loader,
    fit,
    make_optimizer,
    make_trainer,
    plain_loop,
)
from vprop import VOGN, Objective
from vprop.integrations.lightning import PosteriorCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")
EACH = [[batch] for batch in BATCHES]


def pairs(size):
    return [BATCHES[i : i + size] for i in range(0, len(BATCHES), size)]


# -- automatic optimization ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("callbacks", [0, 1])
@pytest.mark.parametrize("mc_samples", [0, 1, 2])
def test_automatic_optimization_is_the_plain_closure(mc_samples, callbacks):
    run = fit(*[PosteriorCallback()][:callbacks], module=Classifier(mc_samples=mc_samples))
    assert_same_run(plain_loop(EACH, mc_samples=mc_samples), run)


@pytest.mark.parametrize("mc_samples", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("norm", partial(nn.utils.clip_grad_norm_, max_norm=0.05)),
        ("value", partial(nn.utils.clip_grad_value_, clip_value=0.02)),
    ],
)
def test_clipping_by_the_trainer_is_clipping_in_the_closure(algorithm, clip, mc_samples):
    limits = {"norm": 0.05, "value": 0.02}
    run = fit(
        module=Classifier(mc_samples=mc_samples),
        gradient_clip_val=limits[algorithm],
        gradient_clip_algorithm=algorithm,
    )
    assert_same_run(plain_loop(EACH, clip=clip, mc_samples=mc_samples), run)
    unclipped = plain_loop(EACH, mc_samples=mc_samples)
    assert not torch.allclose(unclipped[0][0].weight, run[0][0].weight, atol=1e-4)


def test_bfloat16_autocast():
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    assert_same_run(plain_loop(EACH, context=autocast), fit(PosteriorCallback(), precision="bf16-mixed"))


def test_a_training_step_that_returns_nothing_is_skipped():
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    run = fit(PosteriorCallback(), module=Skipping())
    assert_same_run(plain_loop([window for i, window in enumerate(EACH) if i != 2]), run)


# -- gradient accumulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mc_samples", [0, 1])
def test_accumulation_is_a_closure_over_the_micro_batches(mc_samples):
    run = fit(PosteriorCallback(), module=Classifier(mc_samples=mc_samples), accumulate_grad_batches=3)
    assert_same_run(plain_loop(pairs(3), mc_samples=mc_samples), run)


def test_accumulation_is_one_large_batch():
    large = [[tuple(torch.cat(parts) for parts in zip(*window, strict=True))] for window in pairs(3)]
    run = fit(PosteriorCallback(), accumulate_grad_batches=3)
    assert_same_run(plain_loop(large), run, rtol=1e-4, atol=1e-5)


def test_accumulation_with_clipping_and_a_short_last_window():
    """Lightning divides by the number of micro-batches of a full window, as it does for every optimizer."""
    run = fit(PosteriorCallback(), accumulate_grad_batches=4, gradient_clip_val=0.05)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    assert_same_run(plain_loop(pairs(4), clip=clip, divide_by=4), run)


def test_accumulation_that_begins_later():
    run = fit(PosteriorCallback(), GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2)
    assert_same_run(plain_loop(EACH + pairs(2)), run)


def test_a_validation_in_the_middle_of_an_accumulation():
    """It sees the mean, and afterwards the same sample is back (rounded once more)."""
    seen = []

    class Watching(Classifier):
        def validation_step(self, batch, batch_idx):
            seen.append(self.model[0].weight.detach().clone())

    module = Watching()
    start = module.model[0].weight.detach().clone()
    trainer = make_trainer(PosteriorCallback(), accumulate_grad_batches=3, val_check_interval=1)
    trainer.fit(module, Loader(BATCHES), Loader(BATCHES[:1]))
    torch.testing.assert_close(seen[0], start)
    torch.testing.assert_close(seen[1], start)
    assert not torch.allclose(seen[2], start)
    assert_same_run(plain_loop(pairs(3)), (module.model, trainer.optimizers[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("mc_samples", [1, 2])
def test_accumulation_without_the_callback_is_an_error(mc_samples, arguments):
    with pytest.raises(RuntimeError, match=r"added its gradients to others.*PosteriorCallback\(\)"):
        fit(module=Classifier(mc_samples=mc_samples), accumulate_grad_batches=2, **arguments)


def test_accumulation_of_several_samples_is_an_error():
    with pytest.raises(RuntimeError, match=r"accumulate_grad_batches=2 with mc_samples=2: .*Use mc_samples=1, or"):
        fit(PosteriorCallback(), module=Classifier(mc_samples=2), accumulate_grad_batches=2)


def test_an_exception_in_the_middle_of_an_accumulation_leaves_the_mean():
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("a bad batch")
            return super().training_step(batch, batch_idx)

    module = Failing()
    before = module.model[0].weight.detach().clone()
    with pytest.raises(KeyError, match="a bad batch"):
        fit(PosteriorCallback(), module=module, accumulate_grad_batches=3)
    torch.testing.assert_close(module.model[0].weight.detach(), before)
    assert not module._state_dict_pre_hooks


# -- 16-bit precision with a scaler --------------------------------------------------------------------------------


def half_precision(scale):
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_grad_scaler_with_the_callback(accumulate):
    run = fit(PosteriorCallback(), plugins=[half_precision(2.0**10)], accumulate_grad_batches=accumulate)
    model, scaler = make_model(), GradScaler("cpu", init_scale=2.0**10)
    optimizer = make_optimizer(model.parameters())
    for window in pairs(accumulate):
        optimizer.zero_grad()
        optimizer.hold_sample()
        for x, y in window:
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_run((model, optimizer), run)
    assert_same_run(plain_loop(pairs(accumulate)), run, rtol=0.05, atol=0.05)  # float16 has 3 digits


def test_a_step_that_the_scaler_skips_leaves_the_mean():
    means = []

    class Watching(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            means.append(module.model[0].weight.detach().clone())

    model, optimizer = fit(PosteriorCallback(), Watching(), plugins=[half_precision(2.0**40)])
    torch.testing.assert_close(means[0], make_model()[0].weight.detach())
    assert int(optimizer.state[model[0].weight]["step"]) < len(BATCHES)


def test_a_grad_scaler_without_the_callback_is_an_error():
    with pytest.raises(
        RuntimeError, match=r"step\(\) without a sample: .* add the PosteriorCallback\(\) of vprop\.integrations\.li"
    ):
        fit(plugins=[half_precision(2.0**10)])


def test_a_grad_scaler_with_several_samples_is_an_error():
    with pytest.raises(RuntimeError, match=r"precision='16-mixed' with mc_samples=2: .*'bf16-mixed' instead"):
        fit(PosteriorCallback(), module=Classifier(mc_samples=2), plugins=[half_precision(2.0**10)])


# -- manual optimization, several optimizers -----------------------------------------------------------------------


class Manual(Classifier):
    """Two optimizers: ours for the network, Adam for a temperature of the outputs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.automatic_optimization = False

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]) / self.log_temperature.exp(), batch[1])

    def training_step(self, batch, batch_idx):
        network, temperature = self.optimizers()
        with network.toggle_model():
            network.zero_grad()
            self.manual_backward(self.loss(batch))
            network.step()
        temperature.zero_grad()
        self.manual_backward(self.loss(batch))
        temperature.step()

    def configure_optimizers(self):
        ours = make_optimizer(self.model.parameters(), **self.arguments)
        return ours, torch.optim.Adam([self.log_temperature], lr=0.1)


def test_manual_optimization_beside_another_optimizer():
    module = Manual()
    run = fit(PosteriorCallback(every_n_steps=1), module=module)
    reference = Manual()
    ours, adam = reference.configure_optimizers()
    for batch in BATCHES:

        def closure(batch=batch):
            ours.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        ours.step(closure)
        adam.zero_grad()
        reference.loss(batch).backward()
        adam.step()
    assert_same_run((reference.model, ours), run)
    torch.testing.assert_close(module.log_temperature, reference.log_temperature)


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_manual_optimization_without_a_sample_is_an_error(mc_samples):
    callbacks = [] if mc_samples == 1 else [PosteriorCallback()]
    with pytest.raises(RuntimeError, match=r"computed neither loss nor gradients.*pass your own closure to step\(\)"):
        fit(*callbacks, module=Manual(mc_samples=mc_samples))


@pytest.mark.parametrize("mc_samples", [1, 2])
@pytest.mark.parametrize("callbacks", [0, 1])
def test_manual_optimization_with_a_closure(callbacks, mc_samples):
    class WithClosure(Classifier):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    run = fit(*[PosteriorCallback()][:callbacks], module=WithClosure(mc_samples=mc_samples))
    assert_same_run(plain_loop(EACH, mc_samples=mc_samples), run)


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_an_optimizer_that_needs_an_objective_is_given_one_in_manual_optimization(mc_samples):
    class WithObjective(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.step(Objective(self.model, F.cross_entropy, *batch))

        def configure_optimizers(self):
            return VOGN(self.parameters(), num_data=100, mc_samples=mc_samples)

    run = fit(PosteriorCallback(), module=WithObjective())
    model = make_model()
    optimizer = VOGN(model.parameters(), num_data=100, mc_samples=mc_samples)
    for batch in BATCHES:
        optimizer.step(Objective(model, F.cross_entropy, *batch))
    assert_same_run((model, optimizer), run)


def test_no_optimizer_of_ours_is_an_error():
    class Ordinary(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(
        RuntimeError, match=r"needs an optimizer of vprop's, but configure_optimizers returned \['SGD'\]"
    ):
        fit(PosteriorCallback(), module=Ordinary())


# -- averages of the weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_averages_of_the_weights_are_averages_of_means(accumulate):
    """Lightning averages what is in the weights when an epoch starts, and ends with the average."""
    epochs = 3
    averaging = StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=2, annealing_epochs=1)
    run = fit(averaging, PosteriorCallback(), max_epochs=epochs, accumulate_grad_batches=accumulate)
    means = [everything(*plain_loop(pairs(accumulate) * epoch, lr=0.2))["0.weight"] for epoch in range(1, epochs)]
    torch.testing.assert_close(run[0][0].weight.detach(), torch.stack(means).mean(0))


def test_the_pass_for_batchnorm_after_averaging_changes_no_weight():
    class WithBatchNorm(Classifier):
        def __init__(self):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                super().__init__(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))

    averaging = StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=1)
    average = []

    class Watching(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            average.append(module.model[0].weight.detach().clone())

    model, _ = fit(averaging, Watching(), PosteriorCallback(), module=WithBatchNorm(), max_epochs=2)
    assert len(average) == 3
    torch.testing.assert_close(model[0].weight.detach(), average[-1])

"""A loop with Accelerate is the plain loop, bit for bit, wherever the optimizer is attached."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import assert_same_run, make_batch, make_model
from vprop import IVON
from vprop.integrations.huggingface import variational_optimizer

STEPS, MICRO_BATCHES = 3, 2


@pytest.fixture(autouse=True)
def own_accelerator():
    """Accelerate keeps its state in the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_run():
    model = make_model()
    optimizer = IVON(model.parameters(), lr=0.1, num_data=100, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(*make_batch(size=6 * STEPS * MICRO_BATCHES)), batch_size=6)
    return model, optimizer, schedule, loader


def train_plainly(autocast=None, micro_batches=MICRO_BATCHES):
    model, optimizer, schedule, loader = make_run()
    optimizer.attach(model)
    for number, (x, y) in enumerate(loader, start=1):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(x).float(), y)
        (loss / micro_batches).backward()
        if number % micro_batches == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    optimizer.discard_samples()
    return model, optimizer


def accelerated(attach, accelerator):
    """Model, optimizer, loader and schedule after ``prepare``, attached before or after it."""
    model, optimizer, schedule, loader = make_run()
    if attach == "before":
        optimizer.attach(model)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    if attach == "after":
        variational_optimizer(prepared[1]).attach(accelerator.unwrap_model(prepared[0]))
    elif attach == "prepared model":
        prepared[1].optimizer.attach(prepared[0])
    return prepared


def loop(accelerator, model, optimizer, batches, schedule):
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("attach", ["before", "after", "prepared model"])
def test_an_accelerated_loop_is_the_plain_one(attach):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer, loader, schedule = accelerated(attach, accelerator)
    loop(accelerator, model, optimizer, loader, schedule)
    assert isinstance(optimizer, AcceleratedOptimizer)
    optimizer.optimizer.discard_samples()
    assert_same_run(train_plainly(), (accelerator.unwrap_model(model), optimizer.optimizer))


def test_the_context_in_an_accelerated_loop():
    """The draw is the same in both micro-batches; taking it out in between costs a rounding."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer, loader, schedule = accelerated("not at all", accelerator)
    for x, y in loader:
        with accelerator.accumulate(model):
            with optimizer.optimizer.sampled_params():
                accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_same_run(train_plainly(), (model, optimizer.optimizer), rtol=1e-4, atol=1e-6)


def test_forgetting_to_attach():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerated("not at all", accelerator)
    with pytest.raises(RuntimeError, match=r"step\(\) without a sample.*or call optimizer\.attach\(model\)"):
        loop(accelerator, model, optimizer, loader, schedule)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bfloat16():
    with torch.backends.mkldnn.flags(enabled=False):  # its bfloat16 needs instructions that some machines lack
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES)
        model, optimizer, loader, schedule = accelerated("before", accelerator)
        loop(accelerator, model, optimizer, loader, schedule)
        optimizer.optimizer.discard_samples()
        assert_same_run(train_plainly(autocast=torch.bfloat16), (model, optimizer.optimizer))


def test_a_scaler_and_a_step_that_it_skips():
    """Accelerate has a scaler on GPUs only; its optimizer takes one anywhere. An overflow leaves the draw as it is."""
    expected = train_plainly(micro_batches=1)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerated("before", accelerator)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled = AcceleratedOptimizer(optimizer.optimizer, scaler=scaler)
    skipped = 0
    for number, (x, y) in enumerate(loader):
        for overflow in (True, False) if number == 1 else (False,):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
            scaler.unscale_(scaled.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaled.step()
            skipped += scaled.step_was_skipped
            if not overflow:
                schedule.scheduler.step()
            scaled.zero_grad()
    scaled.optimizer.discard_samples()
    assert skipped == 1
    assert_same_run(expected, (model, scaled.optimizer), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("when", "rtol"), [("between steps", 0.0), ("after a forward", 1e-4)])
def test_resuming_is_exact(tmp_path, when, rtol):
    """Also while a sample is in the weights, up to the rounding of taking it out: what is saved is the mean."""
    runs = []
    for interrupted in (False, True):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True)
        parts = accelerated("before", accelerator)
        loop(accelerator, parts[0], parts[1], islice(parts[2], 3), parts[3])
        if interrupted:
            if when == "after a forward":
                parts[0].train()(make_batch()[0])
            accelerator.save_state(str(tmp_path / "state"))
            parts = accelerated("before", accelerator := Accelerator(cpu=True))
            accelerator.load_state(str(tmp_path / "state"))
        loop(accelerator, parts[0], parts[1], islice(parts[2], 3, None), parts[3])
        parts[1].optimizer.discard_samples()
        runs.append((parts[0], parts[1].optimizer))
    assert_same_run(*runs, rtol=rtol, atol=rtol / 100)


def test_an_optimizer_that_is_not_ours():
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(make_model().parameters()))
    with pytest.raises(TypeError, match=r"SGD is not one of vprop's.*or to accelerator\.prepare"):
        variational_optimizer(optimizer)

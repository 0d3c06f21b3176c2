"""Learning rates: every scheduler of torch, tensors, and torch.compile without recompiling."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.optim import lr_scheduler

from tests.harness import assert_same_run, closure_step, context_step, make_batch, make_model, train
from tests.table import cases

ARGUMENTS = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "PolynomialLR": {},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0},
}
COMPOSED = {"SequentialLR", "ChainedScheduler", "LRScheduler"}


def schedulers() -> list[str]:
    names = [
        name
        for name, cls in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(cls, lr_scheduler.LRScheduler) and not name.startswith("_")
    ]
    return [name for name in names if name not in COMPOSED]


def test_every_scheduler_of_this_torch_is_in_the_table():
    assert set(schedulers()) == set(ARGUMENTS)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("case", cases(first_only=True))
def test_every_scheduler_runs(case, name):
    model = make_model()
    optimizer = case(model.parameters())
    scheduler = getattr(lr_scheduler, name)(optimizer, **ARGUMENTS[name])
    rates = []
    for _ in range(6):
        closure_step(optimizer, model, [make_batch()])
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("case", cases(first_only=True))
def test_composed_schedulers_run(case):
    model = make_model()
    optimizer = case(model.parameters(), lr=0.1)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    rates = []
    for _ in range(4):
        closure_step(optimizer, model, [make_batch()])
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == pytest.approx([0.01, 0.055, 0.1, 0.05])


@pytest.mark.parametrize("case", cases())
def test_lr_as_a_tensor(case):
    assert_same_run(train(case, lr=0.05), train(case, lr=torch.tensor(0.05)), rtol=1e-5, atol=1e-7)


def make_layer():
    """A weight and a bias: compiling takes its time for each parameter."""
    return make_model()[0]


def numbers_and_tensors():
    """Every configuration with a number as ``lr``; each optimizer with a tensor, which is the same code for all."""
    numbers = cases(any_loop=True, has_hess=True)
    tensors = cases(any_loop=True, has_hess=True, first_of_each=True)
    return [
        pytest.param(*case.values, is_tensor, id=f"{case.id}-{is_tensor}")
        for is_tensor, chosen in ((False, numbers), (True, tensors))
        for case in chosen
    ]


@pytest.mark.parametrize(("case", "lr_is_tensor"), numbers_and_tensors())
def test_compiled_step_is_the_same_and_does_not_recompile_when_lr_changes(case, lr_is_tensor):
    """Two compilations are expected: the first step creates the state, all others find it."""
    torch._dynamo.reset()
    counter = CompileCounter()
    runs = [make_layer(), make_layer()]
    # What is traced is the portable path.
    optimizers = [
        case(model.parameters(), lr=torch.tensor(0.05) if lr_is_tensor else 0.05, fused=False) for model in runs
    ]
    eager_step = optimizers[1].step
    optimizers[1].step = torch.compile(eager_step, backend=counter, fullgraph=True)
    for step in range(6):
        for model, optimizer in zip(runs, optimizers, strict=True):
            rate = 0.05 / (step + 1)
            if lr_is_tensor:
                optimizer.param_groups[0]["lr"].fill_(rate)
            else:
                optimizer.param_groups[0]["lr"] = rate
            context_step(optimizer, model, [make_batch(seed=step)])
    assert counter.frame_count == 2
    assert_same_run((runs[0], optimizers[0]), (runs[1], optimizers[1]))
    torch._dynamo.reset()


def one_of_each_kind():
    """One of those that share their step (the others are left to the slow tests), and all with a step of their own."""
    kinds = ("Vprop", "VOGN", "CVI", "VON", "VONG", "BBVI")
    return [
        pytest.param(*case.values, id=case.id, marks=() if case.values[0].info.name in kinds else pytest.mark.slow)
        for case in cases(first_only=True)
    ]


@pytest.mark.parametrize("case", one_of_each_kind())
def test_compiled_step_with_a_closure(case):
    """Sampling, forward and backward inside break the graph; the result is the same, and compiling ends."""
    torch._dynamo.reset()
    counter, counts = CompileCounter(), []
    eager = train(case, model=make_layer(), steps=4, fused=False)
    model = make_layer()
    optimizer = case(model.parameters(), fused=False)
    optimizer.step = torch.compile(optimizer.step, backend=counter)
    for step in range(4):
        train(case, model=model, optimizer=optimizer, first_step=step, steps=1)
        counts.append(counter.frame_count)
    assert_same_run(eager, (model, optimizer), rtol=1e-6, atol=1e-7)
    assert counts[2] == counts[3]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(any_loop=True))
def test_compiled_by_inductor(case):
    """Of an eigenbasis in float64: eigenvectors whose values are near each other turn a rounding into a rotation."""
    torch._dynamo.reset()
    structure = case(make_model().parameters()).param_groups[0].get("structure")
    dtype = torch.float64 if structure == "eigenbasis" else torch.float32
    model, again = make_model(dtype), make_model(dtype)
    eager = train(case, "context", model=again, steps=4)
    optimizer = case(model.parameters())
    optimizer.step = torch.compile(optimizer.step)
    compiled = train(case, "context", model=model, optimizer=optimizer, steps=4)
    assert_same_run(eager, compiled, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_a_scheduler_state_resumes():
    model = make_model()
    case = cases(first_only=True)[0].values[0]
    optimizer = case(model.parameters())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    copies = None
    for step in range(4):
        closure_step(optimizer, model, [make_batch(seed=step)])
        scheduler.step()
        if step == 1:
            copies = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    other = make_model(seed=3)
    resumed = case(other.parameters())
    other_scheduler = lr_scheduler.CosineAnnealingLR(resumed, T_max=6)
    for target, saved in zip((other, resumed, other_scheduler), copies, strict=True):
        target.load_state_dict(saved)
    for step in (2, 3):
        closure_step(resumed, other, [make_batch(seed=step)])
        other_scheduler.step()
    assert_same_run((model, optimizer), (other, resumed))

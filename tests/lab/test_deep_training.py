"""A training whose step could be recorded is the plain loop's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import vprop
from vprop.lab.deep.contenders import BY_NAME as CONTENDERS
from vprop.lab.deep.networks import resnet20
from vprop.lab.deep.run import make_optimizer as make_deep_optimizer
from vprop.lab.deep.run import make_trainer
from vprop.lab.deep.tasks import BY_NAME as TASKS
from vprop.lab.deep.training import Trainer, epochs, flips_and_crops, one_cycle
from vprop.lab.deep.workloads import How, workload


def data(count=40, channels=1):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, channels, 8, 8, generator=generator)
    return x, torch.randint(0, 3, (count,), generator=generator)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("steps", [40, 101])
def test_the_rates_are_those_of_torch(steps):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = OneCycleLR(optimizer, 0.3, steps, pct_start=0.05, cycle_momentum=False)
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
        expected.append(optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(one_cycle(0.3, steps), torch.tensor(expected, dtype=torch.float64))


def make_optimizer(kind, model, lr):
    if kind == "vario":
        return vprop.Vario(model.parameters(), lr=lr, num_data=40, batch_size=8)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@pytest.mark.parametrize("kind", ["vario", "sgd"])
def test_it_trains_as_a_plain_loop_does(kind):
    x, y = data()
    rates = one_cycle(0.05, 25)
    trained = small_model()
    trainer = Trainer(trained, make_optimizer(kind, trained, torch.tensor(0.05)), rates, 8)
    for images, labels in epochs(x, y, 5, torch.Generator().manual_seed(1)):
        trainer.run_epoch(images, labels)
    assert trainer.steps_done == 25

    model = small_model()
    optimizer, generator, step = make_optimizer(kind, model, 0.05), torch.Generator().manual_seed(1), 0
    for _ in range(5):
        for rows in torch.randperm(40, generator=generator).split(8):
            optimizer.param_groups[0]["lr"] = float(rates[step])

            def closure(rows=rows):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                return loss

            optimizer.step(closure)
            step += 1
    for ours, plain in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_rows_that_fill_no_batch_are_left_out_and_too_few_are_an_error():
    x, y = data(21)
    model = small_model()
    trainer = Trainer(model, make_optimizer("sgd", model, torch.tensor(0.1)), one_cycle(0.1, 50), 8)
    trainer.run_epoch(x, y)
    assert trainer.steps_done == 2
    with pytest.raises(ValueError, match="no batch of 8"):
        trainer.run_epoch(x[:7], y[:7])


def test_no_step_beyond_the_last_rate():
    x, y = data()
    model = small_model()
    trainer = Trainer(model, make_optimizer("sgd", model, torch.tensor(0.1)), one_cycle(0.1, 42)[:7], 8)
    for _ in range(3):
        trainer.run_epoch(x, y)
    assert trainer.steps_done == 7


@pytest.mark.parametrize(("fast", "dtype"), [((), torch.float32), (("bfloat16",), torch.bfloat16)])
def test_a_cpu_trains_in_bfloat16_if_asked_for(tmp_path, fast, dtype):
    how, task = How(out=tmp_path, fast=fast), TASKS["short-images"]
    work, seen = workload(task, "final", None, how), set()
    model = work.model(0.0)
    model.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    optimizer = make_deep_optimizer(CONTENDERS["sgd"], {"lr": 0.1}, model, work, 0, how)
    trainer = make_trainer(CONTENDERS["sgd"], work, model, optimizer, one_cycle(0.1, 2), how)
    trainer.run_epoch(work.test, work.labels)
    assert seen == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_flips_and_crops_move_every_image_as_a_whole():
    x = torch.arange(1.0, 2 * 5 * 5 + 1).view(1, 2, 5, 5).expand(200, -1, -1, -1).contiguous()
    changed = flips_and_crops(torch.Generator().manual_seed(0), by=1)(x)
    expected = {
        tuple(F.pad(image, (1, 1, 1, 1))[:, i : i + 5, j : j + 5].flatten().tolist())
        for image in (x[0], x[0].flip(-1))
        for i in range(3)
        for j in range(3)
    }
    seen = {tuple(image.flatten().tolist()) for image in changed}
    assert seen == expected


def test_resnet20_is_the_published_one():
    assert sum(p.numel() for p in resnet20(3).parameters()) == 269_722
    assert resnet20(3, classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_what_makes_a_gpu_fast_is_taken_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    with How(device="cuda", fast=("cudnn-benchmark",)).at_speed():
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("high", True)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before
    with How(device="cpu").at_speed():
        assert torch.get_float32_matmul_precision() == before[0]

"""Trainings in cycles of `vprop compare deep`: when each is over, and what predicts in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import vprop
from vprop.lab.deep import contenders, table
from vprop.lab.deep.predictions import averaged, probabilities
from vprop.lab.deep.protocol import Bench
from vprop.lab.deep.run import ends_of_cycles, make_rates
from vprop.lab.deep.snapshots import Snapshots
from vprop.lab.deep.tasks import SHORT, TASKS
from vprop.lab.deep.workloads import How

IMAGES = replace(SHORT[0], epochs=10)
CYCLES = {"cycles": 3.0, "first": 0.4}


@pytest.mark.parametrize(
    ("steps", "chunk", "setting", "ends"),
    [
        (500, 5, CYCLES, (200, 350, 500)),
        (2500, 100, CYCLES, (1000, 1800, 2500)),  # whole hundreds
        (130, 50, {"cycles": 2.0, "first": 0.5}, (100, 130)),  # the last one is not whole
        (500, 5, {"lr": 0.1}, ()),
    ],
)
def test_cycles_end_with_an_epoch(steps, chunk, setting, ends):
    assert ends_of_cycles(setting, steps, chunk) == ends


def test_rates_of_every_cycle_are_those_of_a_training_of_its_length():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    rates = make_rates(CYCLES, optimizer, 500, (200, 350, 500))
    expected = []
    for steps in (200, 150, 150):
        schedule = OneCycleLR(optimizer, 0.2, steps, pct_start=0.05, cycle_momentum=False)
        expected.append(optimizer.param_groups[0]["lr"])
        for _ in range(steps - 1):
            optimizer.step()
            schedule.step()
            expected.append(optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(rates, torch.tensor(expected, dtype=torch.float64))


def trained_in_cycles(make_optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = make_optimizer(model)
    snapshots = Snapshots(model, optimizer, (2, 4, 6))
    for step in range(1, 7):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        snapshots.take(step)
    return model.eval(), optimizer, snapshots


X = torch.linspace(-1, 1, 15).view(5, 3)


def test_networks_are_those_of_the_ends():
    model, _, snapshots = trained_in_cycles(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    networks = list(snapshots.networks())
    assert len(networks) == 3
    outputs = [network(X) for network in networks]
    assert torch.equal(outputs[2], model(X))
    assert not torch.equal(outputs[0], outputs[1])
    found = averaged(snapshots.networks(), {"test": X}, {}, 5)["test"].probs
    torch.testing.assert_close(found, torch.stack([probabilities(one, X, 5) for one in networks]).mean(0))


def test_draws_are_of_all_posteriors_in_turn_and_leave_the_training_as_it_was():
    model, optimizer, snapshots = trained_in_cycles(
        lambda model: vprop.Vario(model.parameters(), lr=0.05, num_data=8, batch_size=8, noise_limit=1e-3)
    )
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = optimizer.posterior(model).variance
    means = [one.mean["0.weight"] for one in snapshots.posteriors]
    drawn = [next(iter(forward.parameters())).clone() for forward in snapshots.draws(7)]
    noise = [one - means[number % 3] for number, one in enumerate(drawn)]
    sigma = before["0.weight"].sqrt()
    assert len(drawn) == 7
    assert all(float((one / sigma).abs().max()) < 20 for one in noise)
    assert min(float((means[0] - mean).abs().max() / sigma.max()) for mean in means[1:]) > 20  # as others' would be
    assert len({float(one[0, 0]) for one in noise}) == 7  # no two have the same noise
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    after = optimizer.posterior(model).variance
    assert all(torch.equal(after[name], variance) for name, variance in before.items())


def test_fewer_draws_than_cycles():
    _, _, snapshots = trained_in_cycles(
        lambda model: vprop.Vario(model.parameters(), lr=0.05, num_data=8, batch_size=8, noise_limit=1e-3)
    )
    assert len(list(snapshots.draws(2))) == 2


@pytest.mark.parametrize("name", ["sgd-cycles", "ivon-cycles"])
def test_a_run_in_cycles_predicts_with_all_of_them(name, tmp_path, monkeypatch):
    """Its last network alone is the mean; five networks are averaged, or as many draws as there are of others."""
    taken = []
    take = Snapshots.take
    monkeypatch.setattr(Snapshots, "take", lambda self, steps: (taken.append(steps), take(self, steps)))
    one = contenders.BY_NAME[name]
    result = Bench(How(tmp_path)).run(IMAGES, one, one.grid(IMAGES)[0], 0, "final").execute()
    assert result["steps"] == 120
    assert taken == list(range(12, 121, 12))
    kinds = ["mean", "averaged"] if name == "sgd-cycles" else ["mean", "averaged", "running"]
    assert list(result["scores"]) == kinds
    assert result["scores"]["mean"] != result["scores"]["averaged"]
    assert list(result["nll_by_draws"]) == (["1", "2", "4", "5"] if name == "sgd-cycles" else ["1", "2", "4"])


def test_every_task_of_images_is_trained_in_cycles_too():
    names = {one.name for one in contenders.CONTENDERS if one.grid(TASKS[0])}
    assert {"sgd-cycles", "ivon-cycles"} <= names
    for task in (task for task in TASKS if task.of_images):
        for name in ("sgd-cycles", "ivon-cycles"):
            for setting in contenders.BY_NAME[name].grid(task):
                ends = ends_of_cycles(setting, task.epochs * 40, 40)
                assert len(set(ends)) == setting["cycles"]


def test_tables_say_what_a_row_predicts_with():
    row = {"setting": {"lr": 0.1, **CYCLES}, "kind": "networks"}
    assert table._kinds({"mean": 1, "averaged": 2}, row) == [("mean", "the last mean"), ("averaged", "all networks")]
    row = {"setting": {"sigma": 0.01, **CYCLES}, "kind": "posterior"}
    assert [words for _, words in table._kinds({"mean": 1, "averaged": 2}, row)] == ["the last mean", "draws"]

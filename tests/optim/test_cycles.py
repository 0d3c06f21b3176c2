"""One training in cycles: the step sizes are torch's in each of them, and every end is a member of a mixture."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import vprop
from vprop import CosineCycles


def sgd(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def rates_of(optimizer, scheduler, steps):
    """Those that each of the steps is made with, by group."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return torch.tensor(found, dtype=torch.float64)


def of_torch(peak, steps, warm_up):
    optimizer = sgd(1.0)
    scheduler = OneCycleLR(optimizer, peak, steps, pct_start=warm_up, cycle_momentum=False)
    found = [[optimizer.param_groups[0]["lr"]]]
    for _ in range(steps - 1):
        optimizer.step()
        scheduler.step()
        found.append([optimizer.param_groups[0]["lr"]])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("warm_up", [0.05, 0.3])
@pytest.mark.parametrize("steps", [40, 101])
def test_one_cycle_is_that_of_torch(steps, warm_up):
    optimizer = sgd(0.3)
    found = rates_of(optimizer, CosineCycles(optimizer, steps, cycles=1, warm_up=warm_up), steps)
    torch.testing.assert_close(found, of_torch(0.3, steps, warm_up))


def test_every_cycle_is_a_training_of_its_length():
    optimizer = sgd(0.3, 0.01)
    scheduler = CosineCycles(optimizer, 200, cycles=4, first=0.4)
    assert scheduler.ends == (80, 120, 160, 200)
    found = rates_of(optimizer, scheduler, 200)
    parts = torch.cat([of_torch(1.0, steps, 0.05) for steps in (80, 40, 40, 40)])
    torch.testing.assert_close(found, parts * torch.tensor([0.3, 0.01], dtype=torch.float64))


@pytest.mark.parametrize("cycles", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [97, 1000])
def test_cycles_end_where_they_say(total, cycles):
    optimizer = sgd(0.1)
    scheduler = CosineCycles(optimizer, total, cycles=cycles)
    ended = []
    assert not scheduler.ended
    for step in range(1, total + 1):
        optimizer.step()
        scheduler.step()
        ended += [step] * scheduler.ended
    assert tuple(ended) == scheduler.ends
    assert len(ended) == cycles
    assert ended[-1] == total


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    weight = nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.1)
    optimizer = vprop.Vario([weight], lr=rate, num_data=8, batch_size=8, mc_samples=0)
    scheduler = CosineCycles(optimizer, 20)
    place = optimizer.param_groups[0]["lr"].data_ptr()
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].data_ptr() == place
    plain = sgd(0.1)
    expected = rates_of(plain, CosineCycles(plain, 20), 2)[1]
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(float(expected), rel=1e-6)


def test_it_goes_on_from_a_checkpoint():
    whole = sgd(0.1)
    expected = rates_of(whole, CosineCycles(whole, 60), 60)
    optimizer = sgd(0.1)
    scheduler = CosineCycles(optimizer, 60)
    first = rates_of(optimizer, scheduler, 35)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other = sgd(0.1)
    resumed = CosineCycles(other, 60)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    torch.testing.assert_close(torch.cat([first, rates_of(other, resumed, 25)]), expected)
    assert resumed.ended


@pytest.mark.parametrize("made", [0, 1, 35, 59])
def test_it_goes_on_from_a_number_of_steps(made):
    """As torch's schedulers do, whose ``last_epoch`` is the number of the last step: one less than were made."""
    whole = sgd(0.1)
    expected = rates_of(whole, CosineCycles(whole, 60), 60)
    optimizer = sgd(0.1)
    if made:
        optimizer.param_groups[0]["initial_lr"] = 0.1
    scheduler = CosineCycles(optimizer, 60, last_epoch=made - 1)
    assert scheduler.last_epoch == made
    torch.testing.assert_close(rates_of(optimizer, scheduler, 60 - made), expected[made:].view(-1, 1))
    assert scheduler.ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_steps": 0}, r"Invalid total_steps=0: must be an integer >= 1. It is epochs \* len\(loader\)"),
        ({"total_steps": 2.5}, "Invalid total_steps=2.5"),
        ({"cycles": 0}, "Invalid cycles=0: must be an integer >= 1"),
        ({"cycles": 10**9}, "a cycle would have fewer than 2 steps"),
        ({"total_steps": 10**400}, "Invalid total_steps="),
        ({"cycles": True}, "Invalid cycles=True"),
        ({"first": 0}, r"Invalid first=0: must be a number in \(0, 1\)"),
        ({"first": 1.0}, "Invalid first=1.0"),
        ({"warm_up": 1}, r"Invalid warm_up=1: must be a number in \[0, 1\)"),
        ({"warm_up": float("nan")}, "Invalid warm_up=nan"),
        ({"total_steps": 6, "cycles": 5}, "a cycle would have fewer than 2 steps. Take fewer cycles"),
        ({"total_steps": 10, "first": 0.99}, "a cycle would have fewer than 2 steps"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        CosineCycles(sgd(0.1), **{"total_steps": 100, **options})


def test_more_steps_than_it_was_told_of_are_refused():
    optimizer = sgd(0.1)
    scheduler = CosineCycles(optimizer, 10, cycles=2)
    rates_of(optimizer, scheduler, 10)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"total_steps=10\): step\(\) was called 11 times. Pass the steps of the whole"
    ):
        scheduler.step()


# -- mixtures --------------------------------------------------------------------------------------------------------


def data(count=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator)
    return x, (x.sum(1) > 0).long()


def network():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def vario(model, seed):
    return vprop.Vario(model.parameters(), lr=0.05, num_data=48, batch_size=16, seed=seed)


def in_three_cycles(optimizer):
    return CosineCycles(optimizer, 3 * 8, cycles=3)


def batches():
    x, y = data()
    return list(zip(x.split(16), y.split(16), strict=True))


def members_of_a_loop(seed):
    """The posteriors at the ends, and the networks as they were then."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network()
    optimizer = vario(model, seed)
    scheduler, members, copies = in_three_cycles(optimizer), [], []
    for _ in range(8):
        for x, y in batches():
            optimizer.step(vprop.Objective(model, F.cross_entropy, x, y))
            scheduler.step()
            if scheduler.ended:
                members.append(optimizer.posterior(model, likelihood="categorical"))
                copies.append(copy.deepcopy(model).eval())
    return members, copies


def test_a_mixture_from_one_training():
    """The same as a loop that takes the posterior at every end."""
    mixture = vprop.train_mixture(
        network, vario, batches(), F.cross_entropy, members=1, epochs=8, seed=3, make_scheduler=in_three_cycles
    )
    members, _ = members_of_a_loop(3)
    assert (len(mixture), len(members)) == (3, 3)
    x = data()[0]
    ours, theirs = mixture.predict(x, num_samples=6), vprop.Mixture(members).predict(x, num_samples=6)
    assert torch.equal(ours.samples, theirs.samples)
    for ours, theirs in zip(mixture.members, members, strict=True):
        assert all(torch.equal(ours.mean[name], mean) for name, mean in theirs.mean.items())


def test_members_stay_as_they_were_at_the_ends():
    """Weights, and the statistics of BatchNorm, which they predict with."""
    members, copies = members_of_a_loop(0)
    for member, network_then in zip(members, copies, strict=True):
        assert all(torch.equal(member.mean[name], p) for name, p in network_then.named_parameters())
        assert all(torch.equal(member.buffers[name], b) for name, b in network_then.named_buffers())
    assert len({float(member.mean["0.weight"].sum()) for member in members}) == 3
    assert len({float(member.buffers["1.running_mean"].sum()) for member in members}) == 3


def test_several_networks_in_cycles_make_the_product_of_members():
    mixture = vprop.train_mixture(
        network, vario, batches(), F.cross_entropy, members=2, epochs=8, make_scheduler=in_three_cycles
    )
    assert len(mixture) == 6
    assert len({id(member.model) for member in mixture.members}) == 2


class Unsized:
    """Batches in passes of these lengths, one after the other, which nobody knows before."""

    def __init__(self, *lengths):
        self.lengths = iter(lengths)

    def __iter__(self):
        return iter(batches()[:1] * next(self.lengths))


def train(loader, total, epochs, cycles=3, loss=F.cross_entropy):
    return vprop.train_mixture(
        network, vario, loader, loss, members=1, epochs=epochs,
        make_scheduler=lambda optimizer: CosineCycles(optimizer, total, cycles=cycles),
    )  # fmt: skip


@pytest.mark.parametrize("steps", [23, 60])
def test_a_training_of_another_length_is_refused_before_it_begins(steps):
    def loss(output, y):
        raise AssertionError("it began")

    message = rf"CosineCycles\(total_steps={steps}\) for a training of 24 steps. Pass total_steps=24"
    with pytest.raises(ValueError, match=message):
        train(batches(), steps, 8, loss=loss)


def test_passes_of_different_lengths_count_together():
    """Of a loader that does not say how long it is; a cycle that did not end is no member, and no silence."""
    assert len(train(Unsized(10, 8), 18, 2)) == 3
    for total in (19, 40):
        with pytest.raises(ValueError, match=rf"total_steps={total}\) for a training of 18 steps"):
            train(Unsized(10, 8), total, 2)
    with pytest.raises(ValueError, match=r"total_steps=16\): step\(\) was called 17 times"):
        train(Unsized(10, 8), 16, 2)


@pytest.mark.parametrize("combine", ["chained", "sequential"])
def test_cycles_inside_of_another_scheduler_are_refused(combine):
    def make(optimizer):
        cycles = CosineCycles(optimizer, 24)
        if combine == "chained":
            return torch.optim.lr_scheduler.ChainedScheduler([cycles], optimizer)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, cycles], [2])

    with pytest.raises(TypeError, match="with CosineCycles inside, must return the CosineCycles itself"):
        vprop.train_mixture(network, vario, batches(), F.cross_entropy, epochs=8, make_scheduler=make)

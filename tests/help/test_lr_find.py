"""A step size from short trials: it works, it agrees with longer runs, and it leaves no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import everything, make_batch, make_model, train
from tests.table import cases
from vprop import GaussianLikelihood, Vprop, lr_find

BATCHES = [make_batch(size=16, seed=seed) for seed in range(6)]


def quadratic(output, y):
    """Curvature 1 in the single output, whatever the input."""
    return 0.5 * (output - y).square().mean()


def test_on_a_quadratic_it_is_the_newton_step():
    """h stays at 1 (β₂ ≈ 1) on a loss of curvature 100: steps above 2/100 diverge, those far below hardly move."""
    weight = nn.Linear(1, 1, bias=False)
    batches = [(torch.full((4, 1), 10.0), torch.full((4, 1), 30.0))]
    optimizer = Vprop(weight.parameters(), lr=0.1, num_data=10_000, betas=(0.0, 1 - 1e-14), mc_samples=0)
    trials = lr_find(optimizer, weight, quadratic, batches, steps=20, lrs=[1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert trials.suggestion == 1e-2
    assert trials.losses[-1] == math.inf
    assert "lr=0.01 (loss at the end of each trial: 0.0001: " in str(trials)


@pytest.mark.parametrize("case", cases(first_only=True))
def test_it_leaves_no_trace(case):
    model, optimizer = train(case, steps=3)
    model.eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(everything(model, optimizer))
    groups, random = copy.deepcopy(optimizer.state_dict()["param_groups"]), torch.random.get_rng_state()
    trials = lr_find(optimizer, model, F.cross_entropy, BATCHES, steps=12, lrs=[0.01, 0.1])
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for group, old in zip(optimizer.state_dict()["param_groups"], groups, strict=True):
        assert {name: group[name] for name in old} == old
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not model.training
    assert model[0].weight.grad.eq(1).all()
    assert trials.suggestion in (0.01, 0.1)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, lambda output, y: F.cross_entropy(output, y)])
def test_batches_in_which_nothing_counts_are_no_divergence(loss_fn):
    """The first one, too: what a trial is compared with is its first loss that is one."""
    x, y = make_batch(size=16)
    unlabelled = (x, torch.full_like(y, -100))
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    trials = lr_find(optimizer, model, loss_fn, [unlabelled, *BATCHES, unlabelled], steps=24)
    assert math.isfinite(trials.losses[0])
    with pytest.raises(ValueError, match="not finite from the start"):
        lr_find(optimizer, model, loss_fn, [unlabelled], steps=10)


def test_a_loss_that_is_nan_is_divergence_where_labels_count():
    x, y = make_batch(size=16)
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    with pytest.raises(ValueError, match="diverged with every lr"):
        lr_find(optimizer, model, F.cross_entropy, [*BATCHES, (x * math.nan, y)], steps=12)


def test_an_optimizer_that_has_made_no_step_stays_without_state():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    lr_find(optimizer, model, F.cross_entropy, BATCHES, steps=10)
    assert not any(optimizer.state.values())


def test_groups_keep_their_ratio_and_a_tensor_stays_the_tensor():
    model, rate = make_model(), torch.tensor(0.2)
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = Vprop(groups, num_data=100)
    seen, own = [], optimizer.param_groups[0]["lr"]
    optimizer.register_step_pre_hook(lambda *_: seen.append([float(group["lr"]) for group in optimizer.param_groups]))
    lr_find(optimizer, model, F.cross_entropy, BATCHES, steps=10, lrs=[1.0])
    seen = [rates for rates in seen if rates[0] > 0]  # once there is a trial without steps, to compare with
    assert all(first == pytest.approx(10 * second) for first, second in seen)
    assert seen[0][0] == pytest.approx(1.0)
    assert optimizer.param_groups[0]["lr"] is own
    assert float(rate) == pytest.approx(0.2)


def test_the_edge_is_pointed_out():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    text = str(lr_find(optimizer, model, F.cross_entropy, BATCHES, steps=10, lrs=[1e-6, 1e-5]))
    assert "It is the largest that was tried: try values beyond it" in text


def test_it_is_put_back_after_an_error():
    model = make_model()
    optimizer, start = Vprop(model.parameters(), num_data=100), copy.deepcopy(model.state_dict())
    calls = []

    def failing(output, y):
        calls.append(1)
        if len(calls) > 15:
            raise KeyError("the data")
        return F.cross_entropy(output, y)

    with pytest.raises(KeyError):
        lr_find(optimizer, model, failing, BATCHES, steps=10)
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 5}, r"Invalid steps=5: must be an integer >= 10 "),
        ({"lrs": [0.1, -1.0]}, r"Invalid lrs=\[0\.1, -1\.0\]: must be finite numbers > 0\. "),
        ({"lrs": []}, r"Invalid lrs=\[\]: must be"),
        ({"loader": []}, r"the loader is empty, or can be read only once"),
        ({"loader": iter(BATCHES)}, r"the loader is empty, or can be read only once"),
        (
            {"loss_fn": lambda f, y: f.sum() * math.nan},
            r"diverged with every lr tried \(0\.01, 0\.03, .*look at",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    arguments = {"loss_fn": F.cross_entropy, "loader": BATCHES} | arguments
    with pytest.raises(ValueError, match=message):
        lr_find(optimizer, model, arguments.pop("loss_fn"), arguments.pop("loader"), **arguments)


def test_lr_zero_has_nothing_to_multiply():
    model = make_model()
    optimizer = Vprop(model.parameters(), lr=0.0, num_data=100)
    with pytest.raises(ValueError, match=r"Invalid lr=0\.0: must be > 0 for lr_find"):
        lr_find(optimizer, model, F.cross_entropy, BATCHES)


class Counting(nn.Module):
    """A buffer that no state_dict has, and a parameter that the optimizer does not hold."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.scale * self.layer(x)


def test_it_leaves_no_trace_beyond_the_optimizer():
    model, likelihood = Counting(), GaussianLikelihood()
    model.scale.grad = torch.tensor(7.0)
    optimizer = Vprop(model.layer.parameters(), num_data=100)
    batches = [(x, F.one_hot(y, 3).float()) for x, y in BATCHES]
    lr_find(optimizer, model, likelihood, batches, steps=10, lrs=[0.01])
    assert likelihood.log_noise_variance.grad is None
    assert float(model.scale.grad) == 7.0
    assert float(model.calls) == 0.0


def test_a_loss_with_weights_and_inputs_that_are_written_into_are_put_back():
    """A trial must not begin where the one before ended, be it by the noise or by the data."""
    model, likelihood, x = nn.Linear(3, 1), GaussianLikelihood(0.5), torch.ones(8, 3)
    model.register_forward_pre_hook(lambda module, arguments: (arguments[0].mul_(0.5),))
    optimizer = Vprop([*model.parameters(), *likelihood.parameters()], num_data=8)
    before = likelihood.log_noise_variance.item()
    lr_find(optimizer, model, likelihood, [(x, torch.ones(8, 1))], steps=10, lrs=[0.1])
    assert likelihood.log_noise_variance.item() == before
    assert torch.equal(x, torch.ones(8, 3))


@pytest.mark.parametrize("batch", [(torch.ones(2, 4), torch.zeros(2), torch.zeros(2)), torch.ones(2, 4)])
def test_batches_that_are_no_pairs(batch):
    optimizer = Vprop((model := make_model()).parameters(), num_data=100)
    with pytest.raises(TypeError, match=r"must be a pair \(x, y\) .* but it is a (tuple of 3|Tensor)\. .*dict"):
        lr_find(optimizer, model, F.cross_entropy, [batch])


@pytest.mark.parametrize("curvature", [1e-4, 1.0, 1e3])
def test_the_search_goes_on_beyond_the_better_end(curvature):
    """h stays at 1, so that the best lr is 1/curvature, within three decades of the optimizer's own, and no further."""
    weight = nn.Linear(1, 1, bias=False)
    x = math.sqrt(curvature)
    batches = [(torch.full((4, 1), x), torch.full((4, 1), 3 * x))]
    optimizer = Vprop(weight.parameters(), lr=0.1, num_data=10_000, betas=(0.0, 1 - 1e-14), mc_samples=0)
    trials = lr_find(optimizer, weight, quadratic, batches, steps=20)
    assert trials.lrs == sorted(trials.lrs)
    assert {0.01, 0.03, 0.1} <= {round(lr, 6) for lr in trials.lrs}
    nearest = min(100.0, max(1e-4, 1 / curvature))
    assert nearest / 4 < trials.suggestion < nearest * 4
    assert ("try values beyond it" in str(trials)) == (curvature < 1e-2)


def test_where_nothing_is_learned_both_sides_are_searched():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    trials = lr_find(optimizer, model, lambda f, y: 1 + 0 * f.sum(), BATCHES, steps=10)
    wanted = [factor * 10.0**decade for decade in range(-4, 3) for factor in (1, 3)][:-1]
    assert trials.lrs == pytest.approx(wanted)

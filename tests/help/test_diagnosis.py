"""``optimizer.diagnose()``: each symptom is found where it is, and only there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import everything, make_batch, make_model, train
from tests.table import cases
from vprop import CVI, IVON, VON, VONG, AutoPrior, GaussianLikelihood, Objective, Vario, Vprop


def symptoms(optimizer):
    return {finding.symptom for finding in optimizer.diagnose()}


def healthy(**arguments):
    """A regression that the data determine: 100 rows, 3 weights far from zero, curvature 1, long enough."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    y = x @ torch.tensor([2.0, -3.0, 1.0]) + 0.1 * torch.randn(100, generator=generator)
    model = nn.Linear(3, 1, bias=False)
    settings = {"lr": 0.3, "num_data": 100, "betas": (0.0, 0.9), "hess_init": 3.0} | arguments
    optimizer = CVI(model.parameters(), **settings)

    def loss_fn(output, y):
        return 0.5 * (output.squeeze(-1) - y).square().mean()

    for _ in range(100):
        optimizer.step(Objective(model, loss_fn, x, y))
    return optimizer


def test_nothing_is_wrong():
    diagnosis = healthy().diagnose()
    assert len(diagnosis) == 0
    assert str(diagnosis).startswith("Nothing looks wrong.\n(How the model predicts is not known without data")
    assert not diagnosis


@pytest.mark.parametrize(
    ("arguments", "symptom", "words"),
    [
        ({"betas": (0.0, 0.9999)}, "curvature at hess_init", ["After 100 steps", "hess_init=3", "train longer"]),
        ({"prior_precision": 1e6}, "variance at prior", ["as wide as their prior", "num_data=100", "one layer"]),
        ({"clip_radius": 1e-4}, "steps clipped", ["clip_radius=0.0001", "vprop.lr_find"]),
        ({"temperature": 1e4, "prior_precision": 0.01}, "noise dominates", ["larger than the weights", "num_data=100"]),
    ],
)
def test_each_symptom_is_found(arguments, symptom, words):
    diagnosis = healthy(**arguments).diagnose()
    finding = next(finding for finding in diagnosis if finding.symptom == symptom)
    assert finding.group == 0
    for word in words:
        assert word in str(diagnosis)


def test_clipping_counts_the_last_step_only():
    optimizer = healthy(clip_radius=1e-4)
    assert "steps clipped" in symptoms(optimizer)
    optimizer.param_groups[0]["clip_radius"] = float("inf")
    model = nn.Linear(3, 1, bias=False)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step(Objective(model, F.mse_loss, torch.ones(4, 3), torch.ones(4, 1)))
    assert "steps clipped" not in symptoms(optimizer)


def test_not_finite():
    optimizer = healthy()
    (weight,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        weight[0, 1] = torch.nan
    (finding,) = [finding for finding in optimizer.diagnose() if finding.symptom == "not finite"]
    assert "33.3%" in finding.what


def test_no_steps_and_no_gradient():
    used, unused, never = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = Vprop([{"params": [used, unused]}, {"params": [never]}, {"params": [frozen]}], num_data=10)
    assert [finding.symptom for finding in optimizer.diagnose()] == ["no steps", "no steps"]

    def closure():
        optimizer.zero_grad()
        used.square().sum().backward()

    optimizer.step(closure)
    by_group = [(finding.group, finding.symptom) for finding in optimizer.diagnose()]
    assert (0, "no gradient") in by_group
    assert (1, "no steps") in by_group
    assert not any(group == 2 for group, _ in by_group)


def test_an_automatic_prior_at_its_bound():
    optimizer = healthy(prior_precision=AutoPrior(warmup=0, every=1))
    assert "prior at its bound" not in symptoms(optimizer)
    optimizer.param_groups[0]["prior_precision"] = 1e8
    assert "prior at its bound" in symptoms(optimizer)


def test_the_long_average_of_ivon_is_pointed_out():
    """The classic: β₂ = 0.99999 and a thousand steps, so that the posterior is that of hess_init."""
    model = make_model()
    optimizer = IVON(model.parameters(), num_data=1000)
    for seed in range(30):
        optimizer.step(Objective(model, F.cross_entropy, *make_batch(seed=seed)))
    assert "curvature at hess_init" in symptoms(optimizer)


@pytest.mark.parametrize("case", cases())
def test_every_optimizer_can_be_asked_and_is_not_changed(case):
    model, optimizer = train(case, steps=3)
    before = copy.deepcopy(everything(model, optimizer))
    random, draws = torch.random.get_rng_state(), optimizer._snapshots
    assert str(optimizer.diagnose())
    diagnosis = optimizer.diagnose(Objective(model, F.cross_entropy, *make_batch()))
    assert "of a constant prediction" in str(diagnosis)
    after = everything(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert model.training
    assert optimizer._snapshots == draws
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize("init_steps", [0.0, 5.0])
def test_an_average_that_forgets_its_start_is_believed(init_steps):
    """Of w₀ = 0 nothing is left after one step, whatever β₂."""
    optimizer = healthy(betas=(0.0, 0.9999), init_steps=init_steps)
    assert "curvature at hess_init" not in symptoms(optimizer)


def in_batches(size, arguments, *, network=True, rows=64, constructor=Vprop):
    model = make_model() if network else nn.Linear(4, 3)
    optimizer = constructor(model.parameters(), num_data=rows, **arguments)
    for seed in range(3):
        optimizer.step(Objective(model, F.cross_entropy, *make_batch(size=size, seed=seed)))
    optimizer.step(Objective(model, F.cross_entropy, *make_batch(size=2)))  # the last one of an epoch is smaller
    return next((f for f in optimizer.diagnose() if f.symptom == "too certain"), None)


def test_squared_gradients_of_mini_batches_that_count_for_all_data():
    finding = in_batches(16, {})
    assert "about 4 times too large" in finding.what
    assert "vprop.Vario(params, num_data=64, batch_size=16), find lr anew" in finding.remedy
    assert (finding.advice.optimizer, finding.advice.change) == ("Vario", {"batch_size": 16})
    kept = in_batches(16, {"prior_precision": 2.5, "temperature": 0.5})
    assert "batch_size=16, prior_precision=2.5, temperature=0.5), find lr" in kept.remedy
    assert kept.advice.change == {"batch_size": 16, "prior_precision": 2.5, "temperature": 0.5}
    kept = in_batches(16, {"prior_precision": "auto"})
    assert 'batch_size=16, prior_precision="auto"), find lr' in kept.remedy
    for constructor in (Vprop, VONG):
        one_layer = in_batches(16, {}, network=False, constructor=constructor)
        assert (one_layer.advice.optimizer, one_layer.advice.change) == (None, {"batch_size": 16})
        assert one_layer.remedy == "Set batch_size=16, and train from the start."


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        (64, {}),
        (16, {"batch_size": 16}),
        (16, {"batch_size": "objective"}),
        (16, {"centered": True, "mc_samples": 2, "antithetic": True}),
        (16, {"sampled_fisher": True}),
    ],
)
def test_others_are_not_too_certain(size, arguments):
    assert in_batches(size, arguments) is None


def test_without_an_objective_the_batches_are_not_known():
    _, optimizer = train(Vprop, num_data=1000)
    assert "too certain" not in symptoms(optimizer)
    _, optimizer = train(Vprop, num_data=1000, temperature=1e4)
    (finding,) = [finding for finding in optimizer.diagnose() if finding.symptom == "noise dominates"]
    assert "batch_size=M, temperature=10000) (M examples in a mini-batch), find lr anew" in finding.remedy


@pytest.mark.parametrize(
    ("loss_fn", "y", "constant"),
    [
        (F.cross_entropy, torch.tensor([0, 0, 2, -100]), math.log(3) - 2 / 3 * math.log(2)),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 4.0])), torch.tensor([0, 0, 2, -100]), 0.6365141683),
        (nn.CrossEntropyLoss(label_smoothing=0.3), torch.tensor([0, 0, 2, -100]), 0.9183188),
        (F.mse_loss, torch.tensor([[1.0], [2.0], [3.0], [6.0]]), 3.5),
        (lambda f, y: 0.5 * F.mse_loss(f.squeeze(-1), y), torch.tensor([1.0, 2.0, 3.0, 6.0]), 3.5),
        (F.binary_cross_entropy_with_logits, torch.tensor([[0.0], [0.0], [0.0], [1.0]]), 0.5623351446),
        (GaussianLikelihood(noise_variance=2.0), torch.tensor([[1.0], [2.0], [3.0], [6.0]]), 2.140512123),
        (lambda f, y: (f - y).abs().mean(), torch.tensor([[1.0], [2.0], [3.0], [6.0]]), None),
        (F.mse_loss, torch.tensor(2.0).expand(4, 3), 0.0),
    ],
)
def test_the_loss_of_a_constant(loss_fn, y, constant):
    """By hand: the entropy of the labels that count, the variance of the targets, −log N(y; ȳ, 2) in the mean.

    Weights of classes and smoothing change the best constant: (2, 0, 4)/6 and (1.7, 0.3, 1)/3 here.
    """
    model = nn.Linear(2, 3 if y.dtype == torch.int64 or y.shape[1:] == (3,) else 1)
    optimizer = Vprop(model.parameters(), num_data=100)
    losses = optimizer.diagnose(Objective(model, loss_fn, torch.ones(4, 2), y)).losses
    assert losses.constant == (constant if constant is None else pytest.approx(constant, abs=1e-5))


@pytest.mark.parametrize(("num_data", "rows", "found"), [(100, 12, True), (1, 12, False), (100, 1, False)])
def test_a_loss_that_is_a_sum_is_named(num_data, rows, found):
    """The sum over all data is the mean over one example that stands for all."""
    model, (x, y) = make_model(), make_batch()
    optimizer = Vario(model.parameters(), num_data=num_data, batch_size=1)
    objective = Objective(model, nn.CrossEntropyLoss(reduction="sum"), x[:rows], y[:rows])
    findings = [finding for finding in optimizer.diagnose(objective) if finding.symptom == "loss is a sum"]
    assert len(findings) == found
    assert all('reduction="mean"' in finding.remedy for finding in findings)


def test_a_loss_that_is_changed_in_place_is_no_sum_and_is_not_compared():
    model, (x, y) = make_model(), make_batch()
    optimizer = Vario(model.parameters(), num_data=100, batch_size=12)

    def divided(output, target):
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        loss /= len(target)
        return loss

    def penalized(output, target):
        loss = nn.functional.cross_entropy(output, target)
        loss += 100
        return loss

    for loss_fn in (divided, penalized):
        symptoms = {finding.symptom for finding in optimizer.diagnose(Objective(model, loss_fn, x, y))}
        assert symptoms == {"no steps"}


def test_a_model_at_chance_level_is_named():
    model = make_model()
    optimizer = Vario(model.parameters(), num_data=100, batch_size=12)
    x, y = make_batch()
    with torch.no_grad():
        model[2].weight.zero_()
    objective = Objective(model, F.cross_entropy, x, y)
    finding = optimizer.diagnose(objective)[0]
    assert (finding.symptom, finding.group) == ("chance level", None)
    assert str(finding).startswith("the whole model, chance level: The mean of the weights predicts no better than a")
    assert finding.remedy.startswith("Find lr anew (vprop.lr_find), and train from the start. If that does not help")
    optimizer.step(objective)
    with torch.no_grad():
        model[0].weight.fill_(math.inf)
    assert "not finite" in {finding.symptom for finding in optimizer.diagnose(objective)}


def test_a_model_that_writes_into_its_inputs_is_given_them_anew():
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    model.register_forward_pre_hook(lambda module, arguments: (arguments[0].mul_(2),))
    Vprop(model.parameters(), num_data=4).diagnose(Objective(model, F.mse_loss, x, torch.zeros(4, 1)))
    assert torch.equal(x, torch.ones(4, 2))


def test_a_loss_that_is_not_finite_is_no_better_than_a_constant():
    model = nn.Linear(2, 1)
    optimizer = Vprop(model.parameters(), num_data=100)
    diagnosis = optimizer.diagnose(Objective(model, lambda f, y: f.sum() * math.nan, torch.ones(4, 2), torch.ones(4)))
    assert diagnosis[0].symptom == "chance level"
    assert "its loss is nan." in diagnosis[0].what


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (3, TypeError, r"got 3, must be a vprop\.Objective or several"),
        ([(1, 2)], TypeError, r"got \(1, 2\), must be a vprop\.Objective or several"),
        ([], ValueError, r"got no objective\. Pass None"),
    ],
)
def test_bad_objectives(objective, error, message):
    optimizer = Vprop(nn.Linear(2, 1).parameters(), num_data=100)
    with pytest.raises(error, match=message):
        optimizer.diagnose(objective)


def test_an_objective_without_targets():
    model = nn.Linear(2, 3)
    optimizer = Vprop(model.parameters(), num_data=100)
    ignored = Objective(model, F.cross_entropy, torch.ones(4, 2), torch.full((4,), -100))
    with pytest.raises(
        ValueError, match=r"diagnose\(objective\): the objective has no examples, or none of its targets"
    ):
        optimizer.diagnose(ignored)


def test_not_inside_a_sample():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Vprop([weight], num_data=10)
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match=r"diagnose\(\) inside an active sample"):
        optimizer.diagnose()


def test_a_curvature_of_zero_is_not_the_start():
    """A loss that curves downwards: h is kept at zero, long after the start is forgotten."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = CVI(model.parameters(), num_data=100, betas=(0.0, 0.9), lr=1e-5)
    for _ in range(300):
        optimizer.step(Objective(model, lambda f, y: -f.square().mean(), torch.ones(4, 3), torch.ones(4)))
    assert "curvature at hess_init" not in symptoms(optimizer)


@pytest.mark.parametrize("constructor", [VON, VONG])
def test_the_full_structure_counts_clipped_steps(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=100, clip_radius=1e-6)
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    assert "steps clipped" in symptoms(optimizer)


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_groups_without_weights_have_nothing_wrong(case):
    """An empty list of parameters, and a parameter without elements; also where the prior follows the posterior."""
    weight, nothing = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(0, 3))
    groups = [{"params": []}, {"params": [nothing]}, {"params": [weight]}]
    optimizer = case(groups, prior_precision=AutoPrior(warmup=0, every=1))
    assert {finding.group for finding in optimizer.diagnose()} == {2}

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum() + nothing.sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert {finding.group for finding in optimizer.diagnose()} <= {2}
    assert [group["prior_precision"] for group in optimizer.param_groups[:2]] == [1.0, 1.0]
    assert optimizer.param_groups[2]["prior_precision"] != 1.0


def test_a_full_structure_in_vario_is_told_to_be_diagonal():
    """It is Vario already, and "use Vario" alone would say nothing."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(64, 4), torch.randn(64, 1)
    full = {"structure": "full", "preconditioner": "precision", "noise_limit": math.inf}
    optimizer = Vario(
        model.parameters(), lr=0.1, num_data=64, batch_size=64, temperature=1e4, prior_precision=0.01, **full
    )
    for _ in range(20):
        optimizer.step(Objective(model, F.mse_loss, x, y))
    (finding,) = (finding for finding in optimizer.diagnose() if finding.symptom == "noise dominates")
    assert finding.advice.change["structure"] == "diagonal"
    assert 'structure="diagonal"' in str(finding)

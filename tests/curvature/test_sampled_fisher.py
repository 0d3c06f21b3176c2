"""The sampled Fisher against the exact one, and the labels that it draws."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

from tests.harness import make_batch, make_model
from vprop import VONG, Objective, Vprop
from vprop.curvature import SampledFisher
from vprop.likelihood import draw_labels
from vprop.noise import Draw, Stream

DRAW = Draw(3, 0, 0, stream=Stream.LABELS)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def exact_fisher(objective):
    """JᵀAJ with A the Hessian of the loss in the outputs, which for these likelihoods does not depend on the labels."""
    weights = {name: p.detach() for name, p in objective.model.named_parameters()}
    output = functional_call(objective.model, weights, objective.x)
    blocks = jacrev(lambda weights: functional_call(objective.model, weights, objective.x))(weights)
    jacobian = torch.cat([block.reshape(output.numel(), -1) for block in blocks.values()], dim=1)
    curvature = torch.autograd.functional.hessian(lambda f: objective.loss_fn(f, objective.y), output)
    return jacobian.T @ curvature.reshape(output.numel(), -1) @ jacobian


def pixels_with_holes():
    labels = randint(3, 4, 2, seed=2)
    labels[0, 0] = labels[2, 1] = -100
    return labels


def gaussian_log_likelihood(output, y):
    """Mean over the batch of −log p(y|x) of a whole vector y of variance 0.3, constants left out."""
    return 0.5 * (output - y).square().sum(-1).mean() / 0.3


MLP = lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
REGRESSION, SEQUENCE = (lambda: nn.Linear(3, 2)), (lambda: nn.Conv1d(3, 3, 1))
# name: (model, loss, x, y, arguments of the objective)
FISHERS = {
    "categorical": (MLP, F.cross_entropy, randn(5, 4), randint(3, 5), {}),
    "categorical, a module": (lambda: nn.Linear(4, 3), nn.CrossEntropyLoss(), randn(5, 4), randint(3, 5), {}),
    "probabilities as targets": (lambda: nn.Linear(4, 3), F.cross_entropy, randn(5, 4), randn(5, 3).softmax(1), {}),
    "sequences": (SEQUENCE, F.cross_entropy, randn(4, 3, 2), randint(3, 4, 2), {}),
    "ignored labels": (SEQUENCE, F.cross_entropy, randn(4, 3, 2), pixels_with_holes(), {}),
    "bernoulli": (REGRESSION, F.binary_cross_entropy_with_logits, randn(5, 3), randint(2, 5, 2).double(), {}),
    "squared error": (REGRESSION, F.mse_loss, randn(5, 3), randn(5, 2), {}),
    "squared error, said to be gaussian": (
        REGRESSION,
        F.mse_loss,
        randn(5, 3),
        randn(5, 2),
        {"likelihood": "gaussian"},
    ),
    "half the squared error": (
        REGRESSION,
        lambda f, y: 0.5 * F.mse_loss(f, y),
        randn(5, 3),
        randn(5, 2),
        {"likelihood": "gaussian", "noise_variance": 1.0},
    ),
    "joint density of vectors": (
        REGRESSION,
        gaussian_log_likelihood,
        randn(5, 3),
        randn(5, 2),
        {"likelihood": "gaussian", "noise_variance": 0.3},
    ),
}


@pytest.mark.parametrize("name", FISHERS)
def test_the_sampled_fisher_is_unbiased(name):
    """The mean over 600 draws of labels, diagonal and matrix: 5 standard errors for each of at most 405 elements.

    About one false alarm in 4,000 runs of the largest case; the seed is fixed.
    """
    make, loss_fn, x, y, arguments = FISHERS[name]
    objective = Objective(seeded(make), loss_fn, x, y, **arguments)
    estimators = {"diagonal": SampledFisher(), "full": SampledFisher(torch.outer)}
    expected, parameters = exact_fisher(objective), dict(objective.model.named_parameters())
    draws = torch.stack(
        [torch.cat([g.flatten() for g in SampledFisher().observe(objective, parameters, DRAW._replace(step=k))])
         for k in range(600)]
    )  # fmt: skip
    for kind, estimator in estimators.items():
        values = torch.stack([estimator.curvature_of(draw) for draw in draws])
        exact = expected if kind == "full" else expected.diagonal()
        assert ((values.mean(0) - exact).abs() <= 5 * values.std(0) / math.sqrt(len(draws)) + 1e-12).all()


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_the_sampled_fisher_has_the_number_of_labels_as_factor(constructor):
    """… whatever num_data, so that the curvature is that of the mean loss: 10 and 10,000 give the same h."""
    x, y = make_batch(dtype=torch.float64)
    states = []
    for num_data in (10, 10_000):
        model = make_model(torch.float64)
        settings = {"num_data": num_data, "mc_samples": 0, "sampled_fisher": True, "betas": (0.0, 0.0)}
        optimizer = constructor(model.parameters(), 0.0, **settings)
        optimizer.step(Objective(model, F.cross_entropy, x, y))
        states.append(optimizer.state[model[0].weight]["hess"])
    assert torch.equal(*states)


def test_a_loss_of_unknown_likelihood_is_an_error():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=10, sampled_fisher=True)
    objective = Objective(model, lambda output, y: F.cross_entropy(output, y), *make_batch())
    with pytest.raises(ValueError, match=r"does not say from which distribution. Pass Objective\(\.\.\., likelihood="):
        optimizer.step(objective)
    optimizer.step(Objective(model, objective.loss_fn, *make_batch(), likelihood="categorical"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_frequencies_of_drawn_labels(dtype):
    """20,000 labels of each kind; 5 standard errors (3e-6 false alarms), after rounding the outputs to the dtype."""
    count = 20_000
    logits = torch.tensor([1.0, -0.5, 0.0, 2.0]).to(dtype)
    probs = logits.double().softmax(0)
    drawn = draw_labels(logits.expand(count, 4), torch.zeros(count, dtype=torch.int64), "categorical", 1.0, DRAW)
    frequencies = torch.bincount(drawn, minlength=4) / count
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt()).all()
    zeros = torch.zeros(count, 4, dtype=dtype)
    rates, exact = draw_labels(logits.expand(count, 4), zeros, "bernoulli", 1.0, DRAW), logits.double().sigmoid()
    assert (rates.dtype, rates.shape) == (dtype, (count, 4))
    assert ((rates.double().mean(0) - exact).abs() < 5 * (exact * (1 - exact) / count).sqrt()).all()
    normals = draw_labels(logits.expand(count, 4), zeros, "gaussian", 0.25, DRAW).double() - logits.double()
    assert (normals.mean(0).abs() < 5 * 0.5 / math.sqrt(count)).all()
    assert ((normals.var(0) / 0.25 - 1).abs() < 5 * math.sqrt(2 / count)).all()


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        nn.BCEWithLogitsLoss(weight=torch.tensor(3.0)),
        nn.MSELoss(reduction="sum"),
    ],
    ids=["ignored class", "smoothing", "weights", "sum", "positive weight", "weight", "sum of squares"],
)
def test_a_loss_that_is_no_mean_log_likelihood_is_not_taken_for_one(loss_fn):
    """The scores of drawn labels would not have mean zero, or their number would not be the factor (a label that is
    drawn as the ignored class counts for nothing): a curvature that is wrong and does not say so."""
    model, (x, y) = make_model(), make_batch()
    labels = y if isinstance(loss_fn, nn.CrossEntropyLoss) else F.one_hot(y, 3).float()
    optimizer = Vprop(model.parameters(), num_data=10, sampled_fisher=True)
    with pytest.raises(ValueError, match="does not say from which distribution"):
        optimizer.step(Objective(model, loss_fn, x, labels))


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("loss_fn", "likelihood", "option"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), "categorical", r"cross_entropy with weight=\.\.\."),
        (lambda f, y: F.cross_entropy(f, y, WEIGHTS), "categorical", r"cross_entropy with weight=\.\.\."),
        (partial(F.cross_entropy, reduction="sum"), "categorical", "cross_entropy with reduction='sum'"),
        (partial(F.cross_entropy, label_smoothing=0.1), "categorical", r"cross_entropy with label_smoothing=0\.1"),
        (partial(F.cross_entropy, ignore_index=1), "categorical", "cross_entropy with ignore_index=1"),
        (partial(F.mse_loss, reduction="sum"), "gaussian", "mse_loss with reduction='sum'"),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), "bernoulli", r"binary_cross_entropy_with_logits with pos_weight=\."),
    ],
)
def test_nor_where_it_is_said_to_be_one(loss_fn, likelihood, option):
    model, (x, y) = make_model(), make_batch()
    labels = y if likelihood == "categorical" else F.one_hot(y, 3).float()
    optimizer = Vprop(model.parameters(), num_data=10, sampled_fisher=True)
    with pytest.raises(ValueError, match=rf"Invalid loss_fn: {option}.*must be a mean.*sampled_fisher=False"):
        optimizer.step(Objective(model, loss_fn, x, labels, likelihood=likelihood))


@pytest.mark.parametrize("constructor", [VONG, Vprop])
def test_the_global_random_state_is_not_touched(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=10, mc_samples=2, sampled_fisher=True)
    before = torch.get_rng_state()
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_log_likelihood_to_maximize():
    """The same run from the loss to minimize and from its negative to maximize."""
    runs = []
    for maximize in (False, True):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(2, 3) / 6)
            model.bias.zero_()
        optimizer = Vprop(model.parameters(), num_data=40, sampled_fisher=True, maximize=maximize)
        x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
        sign = -1 if maximize else 1
        for _ in range(3):
            loss_fn = lambda f, y, sign=sign: sign * F.cross_entropy(f, y)  # noqa: E731
            optimizer.step(Objective(model, loss_fn, x, y, likelihood="categorical"))
        runs.append((model.weight.detach(), optimizer.state[model.weight]["hess"]))
    for first, second in zip(*runs, strict=True):
        torch.testing.assert_close(first, second)

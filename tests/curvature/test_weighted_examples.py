"""VOGN's curvature where examples do not count alike, and where a loss is no mean of its examples' losses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.curvature.test_per_example_fast import (
    VECTOR,
    WAYS,
    assert_equal,
    chain,
    loop_over_examples,
    observe,
    only_by,
    randint,
    randn,
    seeded,
)
from vprop import VOGN, Objective
from vprop.curvature import HessianDiagonal
from vprop.noise import Draw, Stream

EXAMPLES = 7
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
WEIGHT = torch.tensor([1.0, 3.0, 0.25]).double()
NETWORK = chain(VECTOR, nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))[0]


def log_softmax_first(output, y):
    return F.nll_loss(output.log_softmax(1), y, WEIGHT)


WEIGHTED = {
    "module": nn.CrossEntropyLoss(weight=WEIGHT),
    "partial": partial(F.cross_entropy, weight=WEIGHT),
    "lambda": lambda output, y: F.cross_entropy(output, y, weight=WEIGHT),
    "nll": log_softmax_first,
    "with smoothing": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_classes(name, way, monkeypatch):
    """A batch of one has no trace of its weight, Σᵢ wᵢ(∇ℓᵢ)²/Σᵢ wᵢ has."""
    only_by(way, monkeypatch)
    objective = Objective(seeded(NETWORK), WEIGHTED[name], VECTOR(), LABELS)
    expected = loop_over_examples(objective, shares=WEIGHT[LABELS])
    assert_equal(observe(objective), expected)
    labels = LABELS.clone()
    labels[[1, 4]] = -100
    assert_equal(
        observe(Objective(objective.model, WEIGHTED[name], VECTOR(), labels)),
        loop_over_examples(objective, shares=WEIGHT[LABELS] * (labels >= 0)),
    )


def test_a_weight_is_a_number_of_copies():
    copies = torch.tensor([1, 3, 2])
    weighted = Objective(seeded(NETWORK), nn.CrossEntropyLoss(copies.double()), VECTOR(), LABELS)
    rows = torch.arange(EXAMPLES).repeat_interleave(copies[LABELS])
    copied = Objective(weighted.model, F.cross_entropy, VECTOR()[rows], LABELS[rows])
    torch.testing.assert_close(weighted(), copied(), rtol=1e-12, atol=0)
    assert_equal(observe(weighted), observe(copied))


def test_weighted_curvature_is_that_of_the_weighted_loss():
    """Two classes at equal odds have (p−y)² = ¼ = p(1−p): squared gradients are the Hessian, weighted or not."""
    model = nn.Linear(4, 2).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    objective = Objective(model, nn.CrossEntropyLoss(torch.tensor([0.1, 2.0]).double()), VECTOR(), LABELS % 2)
    draw = Draw(3, 0, 0, stream=Stream.LABELS)
    exact = HessianDiagonal().observe(objective, dict(model.named_parameters()), draw)
    assert_equal(observe(objective), [value.detach() for value in exact])


def step(objective, mc_samples=0):
    optimizer = VOGN(objective.model.parameters(), num_data=50, mc_samples=mc_samples, betas=(0.0, 0.0))
    optimizer.step(objective)
    return [optimizer.state[p]["hess"] for p in objective.model.parameters()]


def test_a_step_takes_the_weights():
    objective = Objective(seeded(NETWORK), WEIGHTED["module"], VECTOR(), LABELS)
    expected = loop_over_examples(objective, shares=WEIGHT[LABELS])
    assert_equal(step(objective), expected)


NO_MEANS = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum of squares": lambda output, y: F.mse_loss(output, F.one_hot(y, 3).double(), reduction="sum"),
    "own sum": lambda output, y: -output.log_softmax(1).gather(1, y[:, None]).sum(),
    "own weights": lambda output, y: (WEIGHT[y] * F.cross_entropy(output, y, reduction="none")).sum() / WEIGHT[y].sum(),
    "root": lambda output, y: F.mse_loss(output, F.one_hot(y, 3).double()).sqrt(),
    "contrast": lambda output, y: F.cross_entropy(output @ output.T, torch.arange(len(y))),
}


@pytest.mark.parametrize("mc_samples", [0, 2])
@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_of_its_examples_losses_is_refused(name, mc_samples):
    objective = Objective(seeded(NETWORK), NO_MEANS[name], VECTOR(), LABELS)
    with pytest.raises(ValueError, match=r"Invalid loss_fn: the loss of a batch is .* must be that mean.*reduction="):
        step(objective, mc_samples)


def test_a_batch_of_one_has_no_other_mean():
    step(Objective(seeded(NETWORK), NO_MEANS["sum"], VECTOR()[:1], LABELS[:1]))


class OwnNoise(nn.Module):
    """Drops units by a generator of its own, which nobody else sees."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * (torch.rand(1, x.shape[-1], generator=self.generator) < 0.5)


MODELS = {
    "network": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.5),
    "noise of its own": OwnNoise,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 5)),
    "frozen statistics": lambda: nn.BatchNorm1d(5).eval(),
}
LOSSES = {
    "classes": F.cross_entropy,
    "weights": WEIGHTED["module"],
    "all options": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, ignore_index=2),
    "probabilities": lambda output, y: F.cross_entropy(output, F.one_hot(y, 3).double(), weight=WEIGHT),
    "own mean": lambda output, y: -output.log_softmax(1).gather(1, y[:, None]).mean(),
    "near zero": lambda output, y: F.cross_entropy(output, y) - 1.0,
    "with a penalty": lambda output, y: F.cross_entropy(output, y, weight=WEIGHT) + 0.3,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_no_false_alarms(name, loss):
    """Random models and ones whose buffers change have another loss a moment later, but no wrong one."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), MODELS[name](), nn.Linear(5, 3)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert all(value.isfinite().all() for value in step(Objective(model, LOSSES[loss], VECTOR(), LABELS), 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_false_alarms_of_rounding(dtype, autocast):
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    x, y = randn(200, 4).to(dtype), randint(3, 200)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        step(Objective(model, F.cross_entropy, x, y), 1)


def test_a_batch_in_which_nothing_counts():
    objective = Objective(seeded(NETWORK), F.cross_entropy, VECTOR(), torch.full((EXAMPLES,), -100))
    assert all((value == 0).all() for value in step(objective))


def test_the_check_costs_no_forward():
    """One for the gradient, one for all examples; one more where they differ because the model has changed a buffer."""
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    model = seeded(lambda: nn.Sequential(Counted(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    for mode, loss_fn in [(False, F.cross_entropy), (True, F.cross_entropy), (False, WEIGHTED["module"])]:
        calls.clear()
        step(Objective(model.train(mode), loss_fn, VECTOR(), LABELS))
        assert len(calls) == 2

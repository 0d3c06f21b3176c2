"""The ELBO of data is the same however they are cut into batches: as one batch, unequal ones, some without a label."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vprop import Objective, Vprop
from vprop.likelihood import GaussianLikelihood

ROWS, POSITIONS, CLASSES = 12, 5, 3
WEIGHT = torch.tensor([0.2, 1.0, 5.0]).double()
IGNORED = [0, 1, 4, 7, 8, 9]
"""Rows without a label; of the cuts below, the first and the third batch have no other."""
CUTS = (2, 5, 3, 2)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape, ignored=-100):
    y = torch.randint(0, CLASSES, (ROWS, *shape), generator=torch.Generator().manual_seed(1))
    y[IGNORED] = ignored
    if shape:
        y[2:, 0], y[3, 1:] = ignored, ignored
    return y


def log_softmax_first(loss_fn):
    return lambda output, y: loss_fn(output.log_softmax(1), y)


def with_penalty(output, y):
    return 0.5 * F.cross_entropy(output, y) + 0.1


class Own(nn.Module):
    """A loss that somebody wrote, with the classes last."""

    def forward(self, output, y):
        scores = output.movedim(1, -1)
        return F.cross_entropy(scores.reshape(-1, CLASSES), y.reshape(-1), ignore_index=-1)


FLAT, SEQUENCE = (lambda: nn.Linear(4, CLASSES)), (lambda: nn.Conv1d(4, CLASSES, 1))
CLASS_NUMBERS = {
    "function": (F.cross_entropy, labels()),
    "module": (nn.CrossEntropyLoss(ignore_index=-1), labels(ignored=-1)),
    "a class is ignored": (nn.CrossEntropyLoss(ignore_index=0), labels(ignored=0)),
    "partial": (partial(F.cross_entropy, ignore_index=-7), labels(ignored=-7)),
    "lambda": (lambda output, y: F.cross_entropy(output, y), labels()),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), labels()),
    "all that there is": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, ignore_index=-1), labels(ignored=-1)),
    "nll": (log_softmax_first(partial(F.nll_loss, weight=WEIGHT)), labels()),
    "nll module": (log_softmax_first(nn.NLLLoss()), labels()),
    "more than a mean": (with_penalty, labels()),
    "in the way of old": (partial(F.cross_entropy, size_average=True), labels()),
}
CASES = {
    **{name: (FLAT, randn(ROWS, 4), *case) for name, case in CLASS_NUMBERS.items()},
    "positions": (SEQUENCE, randn(ROWS, 4, POSITIONS), F.cross_entropy, labels(POSITIONS)),
    "weights at positions": (SEQUENCE, randn(ROWS, 4, POSITIONS), nn.CrossEntropyLoss(WEIGHT), labels(POSITIONS)),
    "own": (SEQUENCE, randn(ROWS, 4, POSITIONS), Own(), labels(POSITIONS, ignored=-1)),
    "probabilities": (FLAT, randn(ROWS, 4), nn.CrossEntropyLoss(weight=WEIGHT), randn(ROWS, CLASSES).softmax(1)),
    "squares": (FLAT, randn(ROWS, 4), F.mse_loss, randn(ROWS, CLASSES)),
    "noise that is learned": (FLAT, randn(ROWS, 4), GaussianLikelihood(0.3).double(), randn(ROWS, CLASSES)),
}  # fmt: skip
LEGACY = pytest.mark.filterwarnings("ignore:size_average and reduce")


def posterior_of(make, num_data=9):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    return Vprop(model.parameters(), num_data=num_data, hess_init=0.3).posterior(model)


@LEGACY
@pytest.mark.parametrize("name", CASES)
def test_the_elbo_does_not_depend_on_the_cut(name):
    make, x, loss_fn, y = CASES[name]
    posterior = posterior_of(make)
    whole = posterior.elbo_estimate(Objective(posterior.model, loss_fn, x, y), num_samples=4)
    assert math.isfinite(whole.value)
    for sizes in (CUTS, [1] * ROWS, CUTS[::-1]):
        batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
        estimate = posterior.elbo_estimate(batches, num_samples=4, loss_fn=loss_fn)
        assert estimate == pytest.approx(whole, rel=1e-12)


@LEGACY
@pytest.mark.parametrize("name", CASES)
def test_it_is_ess_times_the_loss_of_all_the_data(name):
    """… at each of the weights that ``predict`` draws, too."""
    make, x, loss_fn, y = CASES[name]
    posterior = posterior_of(make)
    outputs = posterior.predict(x, num_samples=4).samples
    with torch.no_grad():
        expected = -posterior.ess * sum(float(loss_fn(output, y)) for output in outputs) / 4
    batches = list(zip(x.split(CUTS), y.split(CUTS), strict=True))
    found = posterior.elbo_estimate(batches, num_samples=4, loss_fn=loss_fn).expected_log_likelihood
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_sum_is_an_error_and_so_are_the_terms():
    """A sum would count every example ess times."""
    posterior = posterior_of(FLAT)
    with pytest.raises(
        ValueError, match=r'elbo\(\): the loss is a sum over the batch \(reduction="sum"\), must be a mean'
    ):
        posterior.elbo([(randn(ROWS, 4), labels())], loss_fn=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match=rf"elbo\(\): the loss has shape \({ROWS},\), must be one number"):
        posterior.elbo([(randn(ROWS, 4), labels())], loss_fn=nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("loss_fn", [F.mse_loss, lambda output, y: F.binary_cross_entropy_with_logits(output, y)])
def test_sequences_of_different_lengths(loss_fn):
    """A mean over elements, of which a batch of long sequences has more."""
    posterior = posterior_of(SEQUENCE)
    x, y = randn(4, 4, POSITIONS), randn(4, CLASSES, POSITIONS).sigmoid()
    whole = posterior.elbo([(x, y)], num_samples=4, loss_fn=loss_fn)
    cut = [(x[..., :1], y[..., :1]), (x[:1, :, 1:], y[:1, :, 1:]), (x[1:, :, 1:], y[1:, :, 1:])]
    torch.testing.assert_close(posterior.elbo(cut, num_samples=4, loss_fn=loss_fn), whole)


def test_a_loss_inside_the_model():
    """As in Hugging Face's models, which return a mean over the labels that are not ignored."""

    class WithLoss(nn.Linear):
        def forward(self, x, y):
            return F.cross_entropy(super().forward(x), y)

    posterior = posterior_of(lambda: WithLoss(4, CLASSES))
    x, y = randn(ROWS, 4), labels()
    whole = posterior.elbo([((x, y), y)], num_samples=4, loss_fn=lambda output, y: output)
    cut = [((a, b), b) for a, b in zip(x.split(CUTS), y.split(CUTS), strict=True)]
    torch.testing.assert_close(posterior.elbo(cut, num_samples=4, loss_fn=lambda output, y: output), whole)


def test_a_compiled_model():
    posterior = posterior_of(lambda: nn.Sequential(torch.compile(nn.Linear(4, CLASSES), backend="eager")))
    x, y = randn(ROWS, 4), labels()
    whole = posterior.elbo([(x, y)], num_samples=4, loss_fn=F.cross_entropy)
    cut = list(zip(x.split(CUTS), y.split(CUTS), strict=True))
    torch.testing.assert_close(posterior.elbo(cut, num_samples=4, loss_fn=F.cross_entropy), whole)


def test_data_without_any_label():
    posterior = posterior_of(FLAT)
    with pytest.raises(ValueError, match=r"the objective has no examples.*counts"):
        posterior.elbo([(randn(2, 4), torch.tensor([-100, -100]))], loss_fn=F.cross_entropy)


def test_a_loss_that_is_not_finite_is_not_hidden():
    """Only what does not count is left out."""
    posterior = posterior_of(FLAT)
    batches = [(randn(2, 4), torch.tensor([0, -100])), (torch.full((2, 4), math.nan).double(), torch.tensor([0, 1]))]
    assert posterior.elbo(batches, num_samples=2, loss_fn=F.cross_entropy).isnan()


@pytest.mark.parametrize("arguments", [(randn(ROWS, 4), labels()), (randn(ROWS, 4).numpy(),), ({"x": 1},), (3,)])
def test_inputs_are_no_objective(arguments):
    """Not even where the targets stand in the place of the number of samples, as `elbo(x, y)` has them."""
    model = nn.Linear(4, 3)
    posterior = Vprop(model.parameters(), num_data=20).posterior(model)
    kind = type(arguments[0]).__name__
    with pytest.raises(TypeError, match=rf"elbo\(objective\): got {kind}, must be a vprop.Objective or a loader"):
        posterior.elbo(*arguments)

"""Split conformal prediction: the quantile, the scores by brute force, and coverage on data that no one trained on."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom, kstest
from torch import nn

import vprop
from vprop.calibration import ConformalIntervals, ConformalSets, conformal_intervals, conformal_sets
from vprop.calibration._conformal import conformal_quantile, needed_examples
from vprop.calibration.sets import _shares

REPETITIONS, NEW = 400, 50


# -- the quantile --------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.sampled_from([0.1, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99]))
def test_the_quantile_is_the_smallest_that_covers(n, level):
    """Of scores 1…n, threshold t covers a new one with probability t/(n+1): the least t with t/(n+1) ≥ level."""
    enough = [t for t in range(1, n + 1) if t / (n + 1) >= level - 1e-12]
    scores = torch.arange(1.0, n + 1).flip(0)
    if not enough:
        assert n < needed_examples(level)
        with pytest.raises(ValueError, match=f"has {n} example.*must have at least {needed_examples(level)} for level"):
            conformal_quantile(scores, level, "here")
    else:
        assert n >= needed_examples(level)
        assert float(conformal_quantile(scores, level, "here")) == enough[0]


@pytest.mark.parametrize("level", [0, 1, 1.5, "0.9", math.nan, True])
def test_a_level_that_is_none(level):
    with pytest.raises(ValueError, match=r"Invalid level=.*: must be a number in \(0, 1\)"):
        ConformalSets.fit(torch.full((20, 2), 0.5), torch.zeros(20).long(), level)


# -- scores --------------------------------------------------------------------------------------------------


def members_by_definition(probs, threshold, share=None):
    result = []
    for row in probs.tolist():
        scores = [sum(p for p in row if p > own) + (0 if share is None else share * own) for own in row]
        result.append([score <= threshold for score in scores])
    return result


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6))
def test_sets_are_those_of_the_definition(counts):
    """Small whole numbers: many ties. Thresholds are between the sixteenths and twelfths that scores can be."""
    probs = torch.tensor(counts, dtype=torch.float64) + torch.tensor([0.0, 0.0, 1.0])
    probs = probs / probs.sum(-1, keepdim=True)
    for threshold in (0.0 + 1e-9, 0.31, 0.57, 0.93):
        found = ConformalSets(0.9, threshold, 100).of(probs)
        assert found.tolist() == members_by_definition(probs, threshold)


def test_a_set_is_never_empty_and_grows_with_the_level():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(300, 6, generator=generator).softmax(-1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    sizes = [ConformalSets.fit(probs, labels, level).of(probs).sum(-1) for level in (0.1, 0.5, 0.9, 0.99)]
    assert int(sizes[0].min()) == 1
    for smaller, larger in pairwise(sizes):
        assert bool((smaller <= larger).all())


def test_sets_are_large_where_the_model_is_unsure():
    sure, unsure = torch.tensor([0.96, 0.02, 0.02]), torch.tensor([0.4, 0.35, 0.25])
    sets = ConformalSets(0.9, 0.8, 100)
    assert sets.of(torch.stack([sure, unsure])).sum(-1).tolist() == [1, 3]


def test_sets_know_the_random_shares():
    """The definition, with a share that is found by asking for sets with other thresholds."""
    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)

    def members(threshold):
        return ConformalSets(0.9, threshold, 100, randomized=True).of(probs, seed=7)

    low, high = 0.0, 0.5  # class 0 is in a set from u·0.5 on
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if bool(members(middle)[0, 0]) else (middle, high)
    share = high / 0.5
    assert 0 < share < 1
    for threshold in (0.1, 0.3, 0.6, 0.75, 0.9):
        assert members(threshold).tolist() == members_by_definition(probs, threshold, share)


def test_random_shares_are_uniform_and_another_seed_has_others():
    probs = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    shares = _shares(probs, True, 3)
    assert kstest(shares.numpy(), "uniform").pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([shares, _shares(probs, True, 4)]))[0, 1])) < 4 / math.sqrt(2000)
    assert abs(float(torch.corrcoef(torch.stack([shares, probs[:, 0]]))[0, 1])) < 4 / math.sqrt(2000)


def test_how_the_data_are_cut_changes_no_set():
    probs, labels = classification(300, torch.Generator().manual_seed(0))
    sets = ConformalSets.fit(probs, labels, 0.8, randomized=True, seed=2**64 - 1)
    whole = sets.of(probs)
    assert torch.equal(torch.cat([sets.of(row) for row in probs.split(1)]), whole)
    assert torch.equal(sets.of(probs.flip(0)).flip(0), whole)
    assert torch.equal(sets.of(probs.view(10, 30, 5)).view(300, 5), whole)


# -- coverage: exchangeable data, a model that is wrong about them -------------------------------------------------


def classification(n, generator):
    """A model that is too sure, and has one class confused: calibration is all that makes its sets hold."""
    logits = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return (3 * logits + torch.tensor([1.0, 0, 0, 0, -1])).softmax(-1), labels


def coverage_bounds(level, n, slack=0.0):
    """Where the mean coverage over all repetitions is to be, between level and level + 1/(n+1), ± 4 standard errors.

    The coverage of one calibration set has the variance level·(1−level)/(n+2) (it has a Beta distribution), and that of
    its NEW test examples adds level·(1−level)/NEW. False alarm: 6e-5.
    """
    error = math.sqrt(level * (1 - level) * (1 / (n + 2) + 1 / NEW) / REPETITIONS)
    return level - 4 * error, level + 1 / (n + 1) + 4 * error + slack


@pytest.mark.parametrize(("level", "n"), [(0.8, 4), (0.8, 50), (0.9, 9), (0.9, 100), (0.95, 37)])
def test_marginal_coverage_of_randomized_sets_is_exact(level, n):
    """At least the level, and less than 1/(n+1) above it, also for the smallest calibration set."""
    generator, covered = torch.Generator().manual_seed(n), 0.0
    for repetition in range(REPETITIONS):
        probs, labels = classification(n + NEW, generator)
        sets = ConformalSets.fit(probs[:n], labels[:n], level, randomized=True, seed=2 * repetition)
        covered += float(sets.of(probs[n:]).gather(1, labels[n:, None]).double().mean()) / REPETITIONS
    low, high = coverage_bounds(level, n)
    assert low <= covered <= high


def test_coverage_of_inputs_that_come_one_by_one():
    """Binomial bounds around the level and level + 1/(n+1), for a threshold of so many examples that it is certain.

    The threshold's own spread is that of its Beta distribution: 4 standard deviations. False alarm: 1e-4.
    """
    n, new, level = 20_000, 1500, 0.9
    probs, labels = classification(n + new, torch.Generator().manual_seed(5))
    spread = 4 * math.sqrt(level * (1 - level) / (n + 2))
    for seed in range(3):
        sets = ConformalSets.fit(probs[:n], labels[:n], level, randomized=True, seed=seed)
        one_by_one = torch.cat([sets.of(row) for row in probs[n:].split(1)])
        hits = int(one_by_one.gather(1, labels[n:, None]).sum())
        assert binom.ppf(1e-5, new, level - spread) <= hits <= binom.ppf(1 - 1e-5, new, level + 1 / (n + 1) + spread)


def test_coverage_where_all_inputs_have_the_same_probabilities():
    """Nothing but ties: the coverage may be more than the level then, and never less."""
    generator, level = torch.Generator().manual_seed(0), 0.8
    probs = torch.tensor([[0.5, 0.3, 0.2]]).double().expand(4000, 3)
    for seed in range(20):
        labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
        sets = ConformalSets.fit(probs[:2000], labels[:2000], level, randomized=True, seed=seed)
        hits = int(sets.of(probs[2000:]).gather(1, labels[2000:, None]).sum())
        assert hits >= binom.ppf(1e-5, 2000, level - 4 * math.sqrt(level * (1 - level) / 2002))


@pytest.mark.parametrize(("level", "n"), [(0.8, 4), (0.9, 100), (0.95, 37)])
def test_marginal_coverage_of_sets_is_at_least_the_level(level, n):
    """Ties, of most probable classes, can only add."""
    generator, covered, plain = torch.Generator().manual_seed(n), 0.0, 0.0
    for _ in range(REPETITIONS):
        probs, labels = classification(n + NEW, generator)
        sets = ConformalSets.fit(probs[:n], labels[:n], level).of(probs[n:])
        covered += float(sets.gather(1, labels[n:, None]).double().mean()) / REPETITIONS
        asked = ConformalSets(level, level, n).of(probs[n:])  # the model's own probabilities, taken at their word
        plain += float(asked.gather(1, labels[n:, None]).double().mean()) / REPETITIONS
    assert covered >= coverage_bounds(level, n)[0]
    assert covered <= level + 1 / (n + 1) + 0.03
    assert plain < level - 0.03  # what would happen without calibration


@pytest.mark.parametrize(("level", "n"), [(0.5, 1), (0.9, 9), (0.9, 100), (0.95, 37)])
def test_marginal_coverage_of_intervals_is_exact(level, n):
    """Heavy tails, and error bars that are three times too small."""
    generator, covered = torch.Generator().manual_seed(n), 0.0
    for _ in range(REPETITIONS):
        scale = torch.rand(n + NEW, generator=generator, dtype=torch.float64) + 0.1
        tails = torch.randn(n + NEW, generator=generator, dtype=torch.float64).pow(3)
        mean, y = torch.zeros_like(scale), scale * tails
        low, high = ConformalIntervals.fit(mean[:n], scale[:n] / 3, y[:n], level).of(mean[n:], scale[n:] / 3)
        covered += float(((low <= y[n:]) & (y[n:] <= high)).double().mean()) / REPETITIONS
    bounds = coverage_bounds(level, n)
    assert bounds[0] <= covered <= bounds[1]


def test_several_outputs_each_have_their_threshold():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(200, 2, generator=generator) * torch.tensor([1.0, 5.0])
    intervals = ConformalIntervals.fit(torch.zeros(200, 2), torch.ones(200, 2), y, 0.9)
    columns = [ConformalIntervals.fit(torch.zeros(200), torch.ones(200), y[:, i], 0.9).threshold for i in range(2)]
    torch.testing.assert_close(intervals.threshold, torch.stack(columns))
    low, high = intervals.of(torch.zeros(1, 2), torch.ones(1, 2))
    torch.testing.assert_close(high - low, 2 * intervals.threshold[None].float())


def test_what_would_be_broadcast_is_refused():
    intervals = ConformalIntervals(0.9, torch.tensor(1.0), 10)
    assert intervals.of(torch.zeros(3), torch.tensor(1.0))[0].shape == (3,)
    for mean, std in ((torch.zeros(3, 1), torch.ones(3)), ([0.0], [1.0])):
        with pytest.raises(ValueError, match="the same for mean, std and y"):
            intervals.of(mean, std)
    with pytest.raises(ValueError, match=r"must be \(n, 2\) as in the calibration"):
        ConformalIntervals(0.9, torch.ones(2), 10).of(torch.zeros(2), torch.ones(2))


def test_intervals_of_one_example_of_grids_and_of_a_std_for_all():
    one = ConformalIntervals(0.9, torch.tensor(2.0), 10)
    low, high = one.of(torch.tensor(1.0), torch.tensor(0.5))  # a model that squeezes its output, asked for one input
    assert (float(low), float(high)) == (pytest.approx(0.0, abs=1e-5), pytest.approx(2.0, abs=1e-5))
    two = ConformalIntervals(0.9, torch.tensor([1.0, 2.0]), 10)
    for std in (torch.ones(4, 5, 2), torch.ones(4, 5, 1), torch.ones(1, 1, 2), torch.tensor(1.0)):
        low, high = two.of(torch.zeros(4, 5, 2), std)
        torch.testing.assert_close(high, torch.tensor([1.0, 2.0]).expand(4, 5, 2))
        torch.testing.assert_close(low, -high)
    with pytest.raises(ValueError, match=r"mean is \(2, 2\) and std \(2,\), must be"):  # of rows, or of outputs?
        two.of(torch.zeros(2, 2), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_intervals_in_half_precision_are_wider_by_their_last_rounding_alone(dtype):
    low, high = ConformalIntervals(0.9, torch.tensor(1.0), 10).of(
        torch.tensor([64.0]).to(dtype), torch.ones(1).to(dtype)
    )
    step = 64 * torch.finfo(dtype).eps
    assert 63 - 2 * step <= float(low) <= 63
    assert 65 <= float(high) <= 65 + 2 * step


def test_sets_of_no_inputs_and_of_lists():
    sets = ConformalSets(0.9, 0.5, 10)
    assert sets.of(torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="is a list, must be"):
        sets.of([[0.5, 0.5]])


# -- ties with the threshold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1e-7, 0.0, 1e-7])
def test_sets_hold_a_tied_class_when_rounding_is_otherwise(change):
    """One input, as of features that are classes: 40 % of the labels are tied with the threshold."""
    probs = torch.tensor([0.6, 0.3, 0.1])
    sets = ConformalSets.fit(probs.expand(50, 3), (torch.arange(50) % 5 < 2).long(), level=0.9)
    moved = probs + change * torch.tensor([1.0, -1.0, 0.0])
    assert sets.of(moved[None]).tolist() == [[True, True, False]]


@pytest.mark.parametrize("change", [-1e-7, 0.0, 1e-7])
def test_intervals_hold_a_tied_target_when_rounding_is_otherwise(change):
    mean, std = torch.tensor([-2.6768715]), torch.tensor([0.38977575])
    y = torch.tensor([2.0, -5.0])[torch.arange(99) % 2]
    intervals = ConformalIntervals.fit(mean.expand(99), std.expand(99), y, level=0.9)
    low, high = intervals.of(mean * (1 - change), std * (1 + change))
    assert float(low) <= y.min()
    assert y.max() <= float(high)


# -- trained posteriors ------------------------------------------------------------------------------------------


def trained(n=150, outputs=3, loss=nn.functional.cross_entropy, **arguments):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, outputs, generator=generator)
    x = torch.randn(n + 3000, 4, generator=generator)
    noise = torch.randn(n + 3000, outputs, generator=generator)
    y = (x @ weights + 2 * noise).argmax(-1) if outputs == 3 else (x @ weights).tanh() + 0.5 * noise
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, outputs))
    optimizer = vprop.Vario(model.parameters(), lr=0.02, num_data=n, batch_size=n)
    for _ in range(150):
        optimizer.step(vprop.Objective(model, loss, x[:n], y[:n]))
    return optimizer.posterior(model, **arguments), x[n:], y[n:]


def within_beta(hits, count, n, level):
    """The coverage of one calibration set is Beta(k, n+1−k), k = ⌈(n+1)·level⌉; false alarm below 4e-4."""
    k = math.ceil((n + 1) * level)
    low, high = beta.ppf([1e-4, 1 - 1e-4], k, n + 1 - k)
    return binom.ppf(1e-4, count, low) <= hits <= binom.ppf(1 - 1e-4, count, high)


def test_sets_of_a_trained_posterior_on_new_data():
    posterior, x, y = trained(likelihood="categorical")
    sets = conformal_sets(posterior, x[:500], y[:500], level=0.9)
    assert sets.examples == 500
    members = sets.predict(x[500:])
    hits = int(members.gather(1, y[500:, None]).sum())
    assert within_beta(hits, 2500, 500, 0.9)
    assert 1 < members.sum(-1).double().mean() < 3
    torch.testing.assert_close(members, sets.of(posterior.predict(x[500:], 32, 0).probs))
    loader = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 500, 100)]
    assert conformal_sets(posterior, loader, level=0.9).threshold == pytest.approx(sets.threshold, rel=1e-5)


def test_intervals_of_a_trained_posterior_on_new_data():
    posterior, x, y = trained(
        outputs=1, loss=vprop.GaussianLikelihood(0.25, learnable=False), likelihood="gaussian", noise_variance=0.05
    )
    intervals = conformal_intervals(posterior, x[:500], y[:500], level=0.9)
    assert float(intervals.threshold) > 2.5  # error bars are √5 times too small
    low, high = intervals.predict(x[500:])
    assert within_beta(int(((low <= y[500:]) & (y[500:] <= high)).sum()), 2500, 500, 0.9)


def test_a_binary_label_has_the_classes_0_and_1():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    posterior = vprop.Vprop(model.parameters(), num_data=10**9).posterior(model, likelihood="bernoulli")
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(300, 1, generator=generator)
    y = (torch.rand(300, 1, generator=generator) < x.sigmoid()).float()
    sets = conformal_sets(posterior, x[:200], y[:200], level=0.9)
    members = sets.predict(x[200:])
    assert members.shape == (100, 2)
    assert members[(x[200:, 0] > 4)].tolist() == [[False, True]] * int((x[200:] > 4).sum())
    several = vprop.Vprop([*(m := nn.Linear(1, 2)).parameters()], num_data=9).posterior(m, likelihood="bernoulli")
    with pytest.raises(ValueError, match="the posterior predicts several labels"):
        conformal_sets(several, x, torch.ones(300, 2))


# -- bad input -----------------------------------------------------------------------------------------------------


def test_sets_without_a_posterior():
    sets = ConformalSets.fit(torch.full((20, 2), 0.5), torch.zeros(20).long())
    with pytest.raises(ValueError, match=r"These sets were made of probabilities, and know no posterior. Use sets.of"):
        sets.predict(torch.ones(1, 2))
    intervals = ConformalIntervals.fit(torch.zeros(20), torch.ones(20), torch.ones(20))
    with pytest.raises(ValueError, match=r"and know no posterior. Use intervals.of\(mean, std\)"):
        intervals.predict(torch.ones(1, 2))


def test_probabilities_and_numbers_that_are_none():
    nan = torch.full((20, 2), torch.nan)
    with pytest.raises(ValueError, match="Invalid probs: has values from nan to nan"):
        ConformalSets.fit(nan, torch.zeros(20).long())
    with pytest.raises(ValueError, match="Invalid labels: has values from 5 to 5"):
        ConformalSets.fit(torch.full((20, 2), 0.5), torch.full((20,), 5))
    with pytest.raises(ValueError, match="Invalid probs: has values from nan to nan"):
        ConformalSets(0.9, 0.5, 10).of(nan)
    with pytest.raises(ValueError, match="std has values that are not positive, must be > 0"):
        ConformalIntervals.fit(torch.zeros(20), torch.zeros(20), torch.ones(20))
    with pytest.raises(ValueError, match=re.escape("std is (3,), must be a tensor of shape (n,) or (n, outputs)")):
        ConformalIntervals.fit(torch.zeros(20), torch.ones(3), torch.ones(20))
    with pytest.raises(ValueError, match="conformal_intervals: there are NaN among the scores"):
        ConformalIntervals.fit(torch.zeros(20), torch.ones(20), torch.full((20,), torch.nan))

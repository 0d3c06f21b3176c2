"""Several examples at once: brute force on small problems, frequencies of what is drawn."""

from __future__ import annotations

import itertools
import math
import re
import sys

import pytest
import torch

from vprop import Prediction
from vprop.acquisition import batch_bald, mutual_information, power_sample, top


def prediction(samples=5, examples=6, classes=3, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(samples, examples, classes, generator=generator, dtype=torch.float64)
    return Prediction(logits, "categorical")


def information(prediction, batch):
    """I(y_B; θ) by the sum over all labels of the batch, without the chain rule."""
    probs = prediction.samples.softmax(-1)
    joint_entropy = 0.0
    for labels in itertools.product(range(probs.shape[-1]), repeat=len(batch)):
        each = torch.stack([probs[:, i, c] for i, c in zip(batch, labels, strict=True)]).prod(0)
        joint = float(each.mean())
        joint_entropy -= joint * math.log(joint) if joint > 0 else 0.0
    expected = sum(float(torch.special.entr(probs[:, i]).sum(-1).mean()) for i in batch)
    return joint_entropy - expected


# -- BatchBALD -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_choice_is_that_of_brute_force(seed):
    pool, chosen = prediction(seed=seed), []
    batch = batch_bald(pool, 4)
    for index, gain in zip(batch.indices.tolist(), batch.gains.tolist(), strict=True):
        rest = [i for i in range(6) if i not in chosen]
        gains = {i: information(pool, [*chosen, i]) - (information(pool, chosen) if chosen else 0.0) for i in rest}
        assert gain == pytest.approx(max(gains.values()), rel=1e-9, abs=1e-12)
        assert gains[index] == pytest.approx(max(gains.values()), rel=1e-9, abs=1e-12)
        chosen.append(index)
    assert batch.mutual_information == pytest.approx(information(pool, chosen), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_close_to_the_best_batch_of_all(seed):
    pool = prediction(seed=seed)
    best = max(information(pool, subset) for subset in itertools.combinations(range(6), 3))
    found = batch_bald(pool, 3).mutual_information
    assert (1 - 1 / math.e) * best <= found <= best + 1e-12


def test_the_first_is_the_best_by_itself():
    pool = prediction(samples=20, examples=50)
    scores = mutual_information(pool)
    batch = batch_bald(pool, 1)
    assert int(batch.indices[0]) == int(scores.argmax())
    assert batch.mutual_information == pytest.approx(float(scores.max()))


def test_of_examples_that_are_alike_one_is_chosen():
    """Ten copies of the most informative example: top takes copies, together they tell little more than one."""
    pool = prediction(samples=12, examples=8, seed=3, spread=1.0)
    best = int(mutual_information(pool).argmax())
    samples = torch.cat([pool.samples, pool.samples[:, best : best + 1].expand(-1, 10, -1) * 1.2], dim=1)
    with_copies = Prediction(samples, "categorical")
    copies = {best, *range(8, 18)}
    assert copies.issuperset(top(mutual_information(with_copies), 4).tolist())
    chosen = batch_bald(with_copies, 4)
    assert len(copies & set(chosen.indices.tolist())) < 4
    by_score = top(mutual_information(with_copies), 4).tolist()
    assert chosen.mutual_information > information(with_copies, by_score)


def test_drawn_labels_estimate_the_same():
    """From the third example on labels are drawn, 26 of them: entropies in [0, log 3], so an error of log 3/(2√26).

    The mean over the seeds that make the same choices is within 4 standard errors, false alarm 6e-5.
    """
    pool = prediction(samples=8, examples=6)
    exact = batch_bald(pool, 4, configurations=3**3)
    torch.testing.assert_close(exact.gains, batch_bald(pool, 4, configurations=10**6).gains)  # none is drawn in either
    drawn = [batch_bald(pool, 4, configurations=26, seed=seed) for seed in range(40)]
    same = torch.stack([batch.gains for batch in drawn if batch.indices.tolist() == exact.indices.tolist()])
    assert len(same) >= 10
    assert float(same[:, 3].std()) > 0
    error = math.log(3) / 2 / math.sqrt(26 * len(same))
    torch.testing.assert_close(same.mean(0), exact.gains, atol=4 * error, rtol=0)
    torch.testing.assert_close(same[:, :3], exact.gains[:3].expand(len(same), 3))  # nine labellings of two examples


def test_certain_labels_and_large_batches_do_not_divide_by_zero():
    logits = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0], [1000.0, -1000.0]], dtype=torch.float64)
    pool = Prediction(logits[:, None].expand(3, 40, 2), "categorical")
    batch = batch_bald(pool, 40, configurations=8)
    assert torch.isfinite(batch.gains).all()
    assert batch.mutual_information == pytest.approx(math.log(3) - 2 / 3 * math.log(2))  # which of two groups
    many = batch_bald(prediction(samples=4, examples=300, classes=10), 60, configurations=20)
    assert torch.isfinite(many.gains).all()
    assert len(many.indices.unique()) == 60


def test_a_pool_in_blocks_is_the_same(monkeypatch):
    pool = prediction(examples=40)
    whole = batch_bald(pool, 3)
    monkeypatch.setattr(sys.modules[batch_bald.__module__], "BLOCK", 7)
    parts = batch_bald(pool, 3)
    assert whole.indices.tolist() == parts.indices.tolist()
    torch.testing.assert_close(whole.gains, parts.gains)


def test_binary_labels():
    logits = prediction(classes=1).samples
    pair = torch.cat([torch.zeros_like(logits), logits], -1)
    one, two = batch_bald(Prediction(logits, "bernoulli"), 3), batch_bald(Prediction(pair, "categorical"), 3)
    assert one.indices.tolist() == two.indices.tolist()


# -- the best, and by chance -----------------------------------------------------------------------------------------


def test_top_is_in_order_and_ties_are_broken_by_chance():
    scores = torch.tensor([0.5, 0.1, 0.5, 0.9, 0.5])
    assert top(scores, 5, seed=3)[0] == 3
    assert top(scores, 5, seed=3)[-1] == 1
    firsts = {int(top(scores, 2, seed=seed)[1]) for seed in range(40)}
    assert firsts == {0, 2, 4}
    assert top(scores, 4, seed=7).tolist() == top(scores, 4, seed=7).tolist()


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_power_samples_are_drawn_by_their_powers(power):
    """First and second of 4000 draws, against scores to the power; 4 standard errors, false alarm 1e-3 in all."""
    scores, draws = torch.tensor([1.0, 2.0, 3.0, 0.5]), 4000
    chosen = torch.stack([power_sample(scores, 2, power=power, seed=seed) for seed in range(draws)])
    weights = scores.double() ** power
    first = weights / weights.sum()
    second = torch.zeros(4, dtype=torch.float64)
    for i, j in itertools.permutations(range(4), 2):
        second[j] += first[i] * weights[j] / (weights.sum() - weights[i])
    for column, expected in ((chosen[:, 0], first), (chosen[:, 1], second)):
        shares = torch.bincount(column, minlength=4).double() / draws
        assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all()
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_powers_at_the_ends():
    scores = torch.tensor([0.0, 0.2, 0.0, 0.9])
    assert power_sample(scores, 2, power=1e4).tolist() == [3, 1]
    lasts = {int(power_sample(scores, 4, seed=seed)[-1]) for seed in range(20)}
    assert lasts == {0, 2}
    assert sorted(power_sample(scores, 4).tolist()) == [0, 1, 2, 3]


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", [top, power_sample])
def test_bad_scores(choose):
    with pytest.raises(ValueError, match=re.escape("Invalid scores=(2, 2): must be a tensor of shape (n,), n >= 1.")):
        choose(torch.ones(2, 2), 1)
    with pytest.raises(ValueError, match=r"Invalid scores='NaN': must be numbers"):
        choose(torch.tensor([1.0, math.nan]), 1)
    with pytest.raises(ValueError, match=r"Invalid count=3: must be an integer from 1 to the size of the pool, 2."):
        choose(torch.ones(2), 3)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Invalid count=0: must be an integer from 1 to the size of the pool, 6."):
        batch_bald(prediction(), 0)
    with pytest.raises(ValueError, match=r"Invalid configurations=0: must be an integer >= 1."):
        batch_bald(prediction(), 1, configurations=0)
    with pytest.raises(ValueError, match=r"Invalid seed=-1"):
        batch_bald(prediction(), 1, seed=-1)
    with pytest.raises(ValueError, match=r"Invalid scores=-1.0: must be >= 0. Use mutual information"):
        power_sample(torch.tensor([1.0, -1.0]), 1)
    with pytest.raises(ValueError, match=r"Invalid power=-1: must be a number >= 0."):
        power_sample(torch.ones(2), 1, power=-1)

"""Predictions over draws in one pass, what is kept of them, and their scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import vprop
from vprop import metrics
from vprop.lab.deep import draws, groups, predictions
from vprop.lab.deep.predictions import Averaged, averaged
from vprop.lab.deep.run import judgement
from vprop.lab.deep.scores import diagram, false_positives, score_labels, score_outliers


def data(count=30, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(0, classes, (count,), generator=generator)


def posterior():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return vprop.Vprop(model.parameters(), num_data=20).posterior(model, likelihood="categorical")


def test_one_pass_gives_what_the_posterior_gives():
    x, y = data()
    ours = posterior()
    found = averaged(ours.sampled_models(12), {"test": x, "other": x[:5]}, {"test": y}, rows=7)
    expected = ours.predict(x, 12)
    test = found["test"]
    torch.testing.assert_close(test.probs.float(), expected.probs, rtol=1e-5, atol=1e-6)
    information = torch.special.entr(test.probs).sum(-1) - test.expected_entropy
    torch.testing.assert_close(information.float(), expected.mutual_information, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["other"].probs, test.probs[:5])
    assert list(test.nll_by_draws) == [1, 2, 4, 8, 12]
    for count, loss in test.nll_by_draws.items():
        probs = ours.predict(x, 12).samples[:count].softmax(-1).mean(0)
        assert loss == pytest.approx(metrics.nll(probs, y), rel=1e-5)


def test_each_draw_is_made_once_however_many_batches_there_are():
    x, y = data()
    made = []

    def counted():
        for i, forward in enumerate(posterior().sampled_models(4)):
            made.append(i)
            yield forward

    averaged(counted(), {"test": x}, {"test": y}, rows=1)
    assert made == [0, 1, 2, 3]


def test_texts_are_flat():
    logits = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(1))
    found = averaged([lambda part: logits[: len(part)]], {"test": torch.zeros(5)}, {"test": y}, rows=5)["test"]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert found.probs.shape == (15, 7)
    assert found.nll_by_draws[1] == pytest.approx(float(expected), rel=1e-6)
    assert score_labels(found.probs, y)["nll"] == pytest.approx(float(expected), rel=1e-6)


def test_dropout_draws_masks_and_leaves_the_model_in_evaluation():
    model = nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 4))
    x, _ = data()
    outputs = [forward(x) for forward in draws.dropout(model, 3)]
    assert not torch.equal(outputs[0], outputs[1])
    assert not model.training
    assert torch.equal(model[1].running_mean, torch.zeros(50))
    assert torch.equal(model(x), model(x))


def test_a_draw_is_used_with_both_statistics_of_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = vprop.Vprop(model.parameters(), num_data=20)
    ours, (x, y) = optimizer.posterior(model), data()
    statistics = draws.Statistics(lambda: x[:20].split(10))
    made = []

    def drawn():
        for forward in ours.sampled_models(3):
            made.append(forward)
            yield forward

    found = predictions.averaged_by_kind(draws.of_all_kinds(drawn(), statistics), {"test": x}, {"test": y}, rows=7)
    assert len(made) == 3
    for kind, how in (("running", {}), ("averaged", {"batch_norm": iter(x[:20].split(10))})):
        expected = ours.predict(x, 3, **how).samples.double().softmax(-1).mean(0)
        torch.testing.assert_close(found[kind]["test"].probs, expected, rtol=1e-5, atol=1e-6)
    assert (found["running"]["test"].probs - found["averaged"]["test"].probs).abs().max() > 0.01
    # a package that writes draws into the model, whose own statistics come back
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kinds = [kind for kind, _ in draws.of_all_kinds(draws.peer(optimizer, model, 2), statistics)]
    assert kinds == ["running", "averaged"] * 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert [kind for kind, _ in draws.of_all_kinds(posterior().sampled_models(2), statistics)] == ["averaged"] * 2


def test_a_draw_is_used_with_masks_and_without():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    ours, (x, y) = vprop.Vprop(model.parameters(), num_data=20).posterior(model), data()
    batches = x[:20].split(10)
    drawn = draws.of_all_kinds(ours.sampled_models(3), draws.Statistics(lambda: batches), dropout=True)
    found = predictions.averaged_by_kind(drawn, {"test": x}, {"test": y}, rows=7)
    parts = x.split(7)  # masks differ from batch to batch
    for kind, how in (
        ("unmasked", {"batch_norm": iter(batches)}),
        ("running", {"dropout": True}),
        ("averaged", {"batch_norm": iter(batches), "dropout": True}),
    ):
        expected = ours.predict(iter(parts), 3, **how).samples.double().softmax(-1).mean(0)
        torch.testing.assert_close(found[kind]["test"].probs, expected, rtol=1e-5, atol=1e-6)
    assert (found["unmasked"]["test"].probs - found["averaged"]["test"].probs).abs().max() > 0.01


def averages(seed, count=40):
    generator = torch.Generator().manual_seed(seed)
    samples = (3 * torch.randn(5, count, 4, generator=generator, dtype=torch.float64)).softmax(-1)
    return Averaged(samples.mean(0), torch.special.entr(samples).sum(-1).mean(0), 5)


def test_what_is_kept_is_what_was_predicted_to_half_a_thousandth(tmp_path):
    at_mean, drawn = {"test": averages(0)}, {"test": averages(1), "other": averages(2)}
    y = torch.arange(40) % 4
    predictions.save_images(tmp_path / "a" / "kept.npz", {"mean": at_mean, "averaged": drawn}, y)
    sets, labels = predictions.load(tmp_path / "a" / "kept.npz", "averaged")
    assert torch.equal(labels, y)
    assert set(sets) == {"test", "other"}
    for name, one in sets.items():
        torch.testing.assert_close(one.probs, drawn[name].probs, rtol=6e-3, atol=1e-6)
        torch.testing.assert_close(one.probs.sum(-1), torch.ones(40, dtype=torch.float64))
        torch.testing.assert_close(one.expected_entropy, drawn[name].expected_entropy, rtol=1e-3, atol=1e-3)
    loss = predictions.log_loss(sets["test"].probs, y)
    assert loss == pytest.approx(predictions.log_loss(drawn["test"].probs, y), abs=5e-4)
    assert set(predictions.load(tmp_path / "a" / "kept.npz", "mean")[0]) == {"test"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept.npz"]


def test_a_group_is_the_mean_of_its_members(tmp_path):
    y = torch.arange(40) % 4
    members = [{"test": averages(i), "other": averages(10 + i)} for i in range(3)]
    paths = [tmp_path / f"{i}.npz" for i in range(3)]
    for path, member in zip(paths, members, strict=True):
        predictions.save_images(path, {"mean": {"test": averages(99)}, "running": member}, y)
    found = groups.of_images(paths, "running")
    probs = torch.stack([member["test"].probs for member in members]).mean(0)
    assert found["scores"]["nll"] == pytest.approx(metrics.nll(probs, y), abs=5e-4)
    assert found["scores"]["accuracy"] == metrics.accuracy(probs, y)
    # of the means alone, all members are the same, and a group of them is one of them
    same = groups.of_images(paths, "mean")
    assert same["scores"]["nll"] == pytest.approx(metrics.nll(averages(99).probs, y), abs=5e-4)
    predictions.save_images(paths[0], {"running": members[0]}, (y + 1) % 4)
    with pytest.raises(ValueError, match="not of one test set"):
        groups.of_images(paths, "running")


def test_a_group_of_texts_averages_probabilities(tmp_path):
    y, members, paths = torch.arange(40) % 4, [averages(i) for i in range(2)], [tmp_path / f"{i}.npz" for i in range(2)]
    for path, member in zip(paths, members, strict=True):
        predictions.save_text(path, {"mean": {"test": averages(7)}, "averaged": {"test": member}}, y)
    probs = (members[0].probs + members[1].probs) / 2
    assert groups.of_text(paths, "averaged")["scores"]["nll"] == pytest.approx(metrics.nll(probs, y), rel=1e-6)


def test_outliers_are_told_by_two_uncertainties():
    """Known: sure and agreed upon. Unknown: two draws that contradict each other, or one that is unsure."""
    sure = torch.tensor([0.98, 0.02], dtype=torch.float64)
    entropy = torch.special.entr(sure).sum()
    known = Averaged(sure.expand(20, 2), entropy.expand(20), 2)
    torn = Averaged(torch.full((20, 2), 0.5, dtype=torch.float64), entropy.expand(20), 2)
    unsure = Averaged(
        torch.full((20, 2), 0.5, dtype=torch.float64), torch.full((20,), math.log(2), dtype=torch.float64), 2
    )
    assert score_outliers(known, torn) == {
        "auroc_entropy": 1.0, "fpr95_entropy": 0.0, "auroc_information": 1.0, "fpr95_information": 0.0,
    }  # fmt: skip
    scores = score_outliers(known, unsure)
    assert scores["auroc_entropy"] == 1.0
    assert scores["auroc_information"] == 0.5  # no information about the weights in either
    assert "auroc_information" not in score_outliers(Averaged(known.probs, known.expected_entropy, 1), torn)


@pytest.mark.parametrize(("share", "expected"), [(0.95, 0.5), (0.5, 0.25), (1.0, 0.75)])
def test_the_bound_is_passed_by_that_share_of_the_known(share, expected):
    known = torch.arange(100.0)
    unknown = torch.tensor([10.0, 94.0, 95.0, 200.0])
    assert false_positives(known, unknown, share) == expected


def test_a_network_that_diverged_has_no_scores():
    bad = Averaged(torch.full((4, 2), math.nan), torch.full((4,), math.nan), 2)
    y = torch.zeros(4, dtype=torch.long)
    assert set(score_labels(bad.probs, y).values()) == {None}
    assert diagram(bad.probs, y) is None
    assert set(score_outliers(bad, bad).values()) == {None}
    found = judgement({"test": bad}, {"averaged": {"test": bad}}, y)
    assert found["scores"]["averaged"]["nll"] is None

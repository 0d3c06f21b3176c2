"""Ranks with different seeds: an error where they train together, and nothing where they do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import vprop
from tests.distributed.runs import gathered, go_on, start
from tests.harness import make_model


def train_with_seed_of_rank(strategy: str | None, loop: str, noise: str = "shared", mc_samples: int = 1) -> dict:
    arguments = {"seed": 3 + dist.get_rank(), "noise": noise, "mc_samples": mc_samples}
    model, optimizer = start(strategy, "Vprop", arguments)
    go_on(model, optimizer, strategy, loop, steps=2)
    return gathered(model, optimizer)


@pytest.mark.parametrize("loop", ["closure", "context", "attached"])
@pytest.mark.parametrize(("strategy", "count"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("tensor parallel", 2)])
def test_every_rank_says_that_the_seeds_differ(ranks, strategy, count, loop) -> None:
    for error in ranks(count).errors(train_with_seed_of_rank, strategy, loop):
        assert error is not None
        assert error[0] == "RuntimeError"
        assert "Ranks train the same weights with different seeds (rank" in error[1]
        assert 'Pass the same seed on all ranks; for other samples on every rank pass noise="per_rank"' in error[1]


def test_ranks_that_train_models_of_their_own_may_have_seeds_of_their_own(ranks) -> None:
    """An ensemble: the same start, and nobody averages anything."""
    first, second = ranks(2)(train_with_seed_of_rank, None, "closure")
    assert not torch.equal(first["0.weight"], second["0.weight"])


def test_without_samples_a_seed_does_not_matter(ranks) -> None:
    ranks(2)(train_with_seed_of_rank, "ddp", "closure", "shared", 0)


def several_optimizers() -> None:
    """Members of an ensemble, one after the other on all ranks: equal weights, seeds that differ by member."""
    for seed in range(3):
        model, optimizer = start("ddp", "Vprop", {"seed": seed})
        go_on(model, optimizer, "ddp", "closure", steps=1)


def test_several_optimizers_are_not_mistaken_for_each_other(ranks) -> None:
    ranks(2)(several_optimizers)


def one_stranger(seeds: list[int], halves: bool) -> None:
    """Ranks with these seeds; of four, two and two average among themselves."""
    rank, group = dist.get_rank(), None
    if halves:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[rank // 2]
    model = torch.nn.parallel.DistributedDataParallel(make_model(torch.float64), process_group=group)
    optimizer = vprop.Vprop(model.parameters(), num_data=100, seed=seeds[rank])
    go_on(model, optimizer, "ddp", "closure", steps=1)


@pytest.mark.parametrize("seeds", [[0, 1, 0, 0], [0, 0, 0, 1], [5, 6, 7, 8]])
def test_one_stranger_is_noticed_by_all(ranks, seeds) -> None:
    for error in ranks(4).errors(one_stranger, seeds, False):
        assert error is not None
        assert "different seeds" in error[1]


def test_groups_of_ranks_are_looked_at_one_by_one(ranks) -> None:
    assert ranks(4).errors(one_stranger, [0, 0, 5, 5], True) == [None] * 4
    errors = ranks(4).errors(one_stranger, [0, 0, 5, 6], True)
    assert errors[:2] == [None] * 2
    assert all(error is not None and "different seeds" in error[1] for error in errors[2:])

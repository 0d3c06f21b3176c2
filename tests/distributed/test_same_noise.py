"""Ranks that draw the same noise make the run of one process: data parallel, sharded, tensor parallel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import vprop
from tests.distributed.runs import assert_differs, assert_equal, go_on, run, start
from tests.harness import make_model

ROUNDING = {"rtol": 1e-9, "atol": 1e-12}
"""float64 over four steps: sums over ranks are taken in another order, and nothing else differs."""

OPTIMIZERS = {
    "Vprop": {},
    "Vprop-0": {"mc_samples": 0},
    "Vprop centred": {"mc_samples": 2, "antithetic": True, "centered": True},
    "Vprop with momentum": {"betas": (0.9, 0.99)},
    "IVON": {},
    "Vadam": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("fsdp", 4),
        ("tensor parallel", 2),
        ("tensor parallel", 4),
        ("fsdp and tensor parallel", 4),
    ],
)
def test_the_run_is_that_of_one_process(ranks, strategy, count, name) -> None:
    optimizer, arguments = name.split()[0].split("-")[0], OPTIMIZERS[name]
    alone = run(None, optimizer, arguments)
    for together in ranks(count)(run, strategy, optimizer, arguments):
        assert_equal(together, alone, **ROUNDING)


@pytest.mark.parametrize("loop", ["context", "attached"])
@pytest.mark.parametrize(("strategy", "count"), [("ddp", 2), ("fsdp", 2), ("tensor parallel", 2)])
def test_every_loop_does_it(ranks, strategy, count, loop) -> None:
    alone = run(None, "Vprop", {}, loop)
    for together in ranks(count)(run, strategy, "Vprop", {}, loop):
        assert_equal(together, alone, **ROUNDING)


@pytest.mark.parametrize("loop", ["closure", "context", "attached"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_micro_batches_on_every_rank_are_one_batch(ranks, strategy, loop) -> None:
    alone = run(None, "IVON", {}, "closure")
    for together in ranks(2)(run, strategy, "IVON", {}, loop, torch.float64, 3):
        assert_equal(together, alone, **ROUNDING)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_never_diverge(ranks, strategy, dtype) -> None:
    """In the precision of practice sums are rounded, but what the ranks hold of it is the same."""
    first, *others = ranks(2)(run, strategy, "Vprop", {"betas": (0.9, 0.999)}, "closure", dtype)
    for other in others:
        assert_equal(other, first)


def prior() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = [p.shape for p in make_model().parameters()]
    return {
        "prior_mean": [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes],
        "prior_precision": [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5 for shape in shapes],
    }


@pytest.mark.parametrize("strategy", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("optimizer", ["Vprop", "IVON", "Vadam"])
def test_a_prior_for_every_weight_is_spread_as_the_weights_are(ranks, strategy, optimizer) -> None:
    alone = run(None, optimizer, prior())
    for together in ranks(4)(run, strategy, optimizer, prior()):
        assert_equal(together, alone, **ROUNDING)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor parallel"])
def test_an_automatic_prior_looks_at_all_weights(ranks, strategy) -> None:
    arguments = {"prior_precision": vprop.AutoPrior(warmup=1, every=1)}
    alone = run(None, "Vprop", arguments)
    assert_differs(alone, run(None, "Vprop", {}))
    for together in ranks(2)(run, strategy, "Vprop", arguments):
        assert_equal(together, alone, **ROUNDING)


def packed_names(strategy: str, arguments: dict) -> list[str]:
    """The parameters that kernels handle."""
    model, optimizer = start(strategy, "IVON", arguments, torch.float32)
    go_on(model, optimizer, strategy, "closure", steps=1)
    packed = {id(p) for pack in optimizer._structure._packs.packs for p in pack.owners}
    return [name for name, p in model.named_parameters() if id(p) in packed]


def test_kernels_take_parts_that_are_a_run_of_whole_quads(ranks) -> None:
    first, second = ranks(2)(packed_names, "fsdp", {})
    assert first == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert second == ["0.weight", "0.bias", "2.weight"]  # of three biases the third lies there: inside a quad
    assert ranks(2)(packed_names, "tensor parallel", {})[1] == ["0.weight", "0.bias", "2.bias"]  # columns are no run
    assert ranks(2)(packed_names, "fsdp", {"fused": False}) == [[], []]


@pytest.mark.parametrize(("strategy", "count"), [("fsdp", 2), ("fsdp", 4), ("tensor parallel", 2)])
@pytest.mark.parametrize("optimizer", ["Vprop", "IVON", "Vadam"])
def test_kernels_do_the_same(ranks, strategy, count, optimizer) -> None:
    """float32: three steps, each of which rounds every number a few times."""
    arguments = {"betas": (0.9, 0.99), "clip_radius": 5.0}
    alone = run(None, optimizer, arguments, "closure", torch.float32)
    for together in ranks(count)(run, strategy, optimizer, arguments, "closure", torch.float32):
        assert_equal(together, alone, rtol=2e-5, atol=2e-6)


def test_centred_kernels_do_the_same(ranks) -> None:
    arguments = {"mc_samples": 2, "antithetic": True, "centered": True}
    alone = run(None, "Vprop", arguments, "closure", torch.float32)
    for together in ranks(2)(run, "fsdp", "Vprop", arguments, "closure", torch.float32):
        assert_equal(together, alone, rtol=2e-5, atol=2e-6)


def sizes_of_a_spread_model(mc_samples: int) -> list[tuple[float, float]]:
    """What a noise limit takes for the size of each parameter, and what it is."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 3)))
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, float(i + 1))
    optimizer = vprop.Vario(model.parameters(), lr=0.0, num_data=100, batch_size=8, mc_samples=mc_samples)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [(float(optimizer.state[p]["size"]), float(i + 1)) for i, p in enumerate(model.parameters())]


@pytest.mark.parametrize("mc_samples", [0, 1])
def test_sizes_are_not_mixed_up_where_a_kernel_takes_a_part_on_one_rank_only(ranks, mc_samples) -> None:
    """Of six biases three lie on the second rank, inside a quad, which kernels leave to the portable path."""
    for sizes in ranks(2)(sizes_of_a_spread_model, mc_samples):
        for size, expected in sizes:
            assert size == pytest.approx(expected, rel=1e-5)


def objective_on_a_spread_model() -> None:
    model = fully_shard(nn.Linear(4, 3))
    optimizer = vprop.Vario(model.parameters(), num_data=100, batch_size="objective")
    optimizer.step(vprop.Objective(model, F.cross_entropy, torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)))


def test_an_objective_does_not_guess_over_how_many_ranks_fsdp_averages(ranks) -> None:
    for error in ranks(2).errors(objective_on_a_spread_model):
        assert error is not None
        assert "give batch_size as a number" in error[1]

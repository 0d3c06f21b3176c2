"""On a GPU: kernels on shards, and gradients that a GPU averages. One GPU is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import vprop
from tests.distributed.ranks import Ranks
from tests.distributed.runs import assert_equal, gathered
from tests.harness import make_batch, split

pytestmark = pytest.mark.cuda

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Vprop": {},
    "Vprop centred": {"mc_samples": 2, "antithetic": True, "centered": True},
    "IVON": {},
    "Vadam": {"clip_radius": 1.0},
}


@pytest.fixture(scope="module")
def nccl_ranks():
    """A rank for each GPU, of which NCCL wants one each: two if there are two, else one."""
    pool = Ranks(min(2, torch.cuda.device_count()), backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def gloo_ranks():
    """Two ranks that share a GPU if they must. gloo cannot gather tensors there, which FSDP needs."""
    pool = Ranks(2, backend="gloo")
    yield pool
    pool.stop()


def run(strategy: str | None, name: str, dtype: torch.dtype, noise: str = "shared") -> tuple[dict[str, Tensor], int]:
    """Weights and state after some steps, on the CPU, and how many tensors kernels handled."""
    part, parts = 0, 1
    if strategy is not None:
        part, parts = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.cuda.set_device(part % torch.cuda.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).to("cuda", dtype)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh("cuda", (parts,)))
    arguments = {"lr": 0.1, "num_data": 100, "noise": noise} | CONFIGURATIONS[name]
    optimizer = getattr(vprop, name.split()[0])(model.parameters(), **arguments)
    for step in range(4):
        x, y = (tensor.cuda() for tensor in split(make_batch(24, dtype, seed=step), parts)[part])

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    packed = sum(len(pack.owners) for pack in optimizer._structure._packs.packs)
    return {key: value.cpu() for key, value in gathered(model, optimizer).items()}, packed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_run_is_that_of_one_process(nccl_ranks, gloo_ranks, name, strategy) -> None:
    alone, _ = run(None, name, torch.float32)
    first, *others = (gloo_ranks if strategy == "ddp" else nccl_ranks)(run, strategy, name, torch.float32)
    assert first[1] == 4  # all four tensors: on the first rank every shard begins with its tensor
    assert_equal(first[0], alone, rtol=1e-4, atol=1e-5)
    for other, _ in others:
        assert_equal(other, first[0])


@pytest.mark.parametrize("noise", ["shared", "per_rank"])
def test_ranks_never_diverge(gloo_ranks, noise) -> None:
    first, second = (tensors for tensors, _ in gloo_ranks(run, "ddp", "IVON", torch.bfloat16, noise))
    assert_equal(second, first)

"""noise="per_rank": every rank draws its own sample, and curvature is averaged after the products."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import vprop
from tests.distributed.runs import assert_differs, assert_equal, run, start
from tests.harness import LOOPS, make_batch, split


def run_on_whole_batches(
    strategy: str | None, optimizer: str, arguments: dict[str, Any], loop: str = "closure", micro_batches: int = 1
) -> dict[str, Tensor]:
    """Every rank sees the whole batch, so that R ranks are one process with R times as many samples."""
    model, optim = start(strategy, optimizer, arguments)
    handle = optim.attach(model) if loop == "attached" else None
    for step in range(4):
        LOOPS[loop](optim, model, split(make_batch(12, torch.float64, seed=step), micro_batches))
    if handle is not None:
        handle.remove()
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    tensors = {}
    for name, p in zip(names, model.parameters(), strict=True):
        tensors |= {name: p.detach().clone()} | {f"{name}.{k}": v.clone() for k, v in optim.state[p].items()}
    return tensors


MORE_SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Vprop": ({"mc_samples": 2}, {"mc_samples": 1}),
    "Vprop with momentum": ({"mc_samples": 2, "betas": (0.9, 0.99)}, {"betas": (0.9, 0.99)}),
    "IVON": ({"mc_samples": 2}, {"mc_samples": 1}),
    "Vadam": ({"mc_samples": 6}, {"mc_samples": 3}),
    "IVON in pairs": ({"mc_samples": 4, "antithetic": True}, {"mc_samples": 2, "antithetic": True}),
    "Vprop centred": (
        {"mc_samples": 4, "antithetic": True, "centered": True},
        {"mc_samples": 2, "antithetic": True, "centered": True},
    ),
    "VOGN": ({"mc_samples": 2}, {"mc_samples": 1}),
    "CVI": ({"mc_samples": 2}, {"mc_samples": 1}),
    "VONG": ({"mc_samples": 2}, {"mc_samples": 1}),
    "VON": ({"mc_samples": 2}, {"mc_samples": 1}),
    # Two ranks of 12 rows are a batch of 24.
    "Vprop on mini-batches": ({"mc_samples": 2, "batch_size": 12}, {"mc_samples": 1, "batch_size": 24}),
    "VONG on mini-batches": ({"mc_samples": 2, "batch_size": 12}, {"mc_samples": 1, "batch_size": 24}),
}


@pytest.mark.parametrize("name", MORE_SAMPLES)
def test_two_ranks_are_one_process_with_twice_the_samples(ranks, name) -> None:
    optimizer, (alone, each) = name.split()[0], MORE_SAMPLES[name]
    expected = run_on_whole_batches(None, optimizer, alone)
    for together in ranks(2)(run_on_whole_batches, "ddp", optimizer, each | {"noise": "per_rank"}):
        assert_equal(together, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("loop", "micro_batches"), [("context", 1), ("attached", 1), ("closure", 3), ("attached", 3)])
def test_every_loop_and_micro_batches_do_it(ranks, loop, micro_batches) -> None:
    expected = run_on_whole_batches(None, "IVON", {"mc_samples": 2})
    for together in ranks(2)(run_on_whole_batches, "ddp", "IVON", {"noise": "per_rank"}, loop, micro_batches):
        assert_equal(together, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_never_diverge(ranks, dtype) -> None:
    """With kernels, and a float32 mean beside coarse weights."""
    first, *others = ranks(2)(run, "ddp", "IVON", {"noise": "per_rank"}, "closure", dtype)
    for other in others:
        assert_equal(other, first)


def test_ranks_draw_different_samples(ranks) -> None:
    shared, apart = (ranks(2)(run, "ddp", "Vprop", {"noise": noise})[0] for noise in ("shared", "per_rank"))
    assert_differs(shared, apart)


def test_alone_it_changes_nothing() -> None:
    assert_equal(run(None, "Vprop", {"noise": "per_rank"}), run(None, "Vprop", {}))


class Quadratic(nn.Module):
    """A loss with Hessian 4 for each of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2000))

    def forward(self, target: Tensor) -> Tensor:
        return 2 * (self.weight - target).square().sum()


def curvature_of_quadratic(optimizer: str, noise: str) -> tuple[float, float]:
    model = DistributedDataParallel(Quadratic())
    arguments = {"IVON": {"betas": (0.0, 0.99)}, "Vprop": {"betas": (0.0, 0.99), "prior_precision": 1e-3}}[optimizer]
    optim = getattr(vprop, optimizer)(model.parameters(), lr=0.05, num_data=100, noise=noise, **arguments)

    def closure() -> Tensor:
        optim.zero_grad()
        loss = model(torch.zeros(()))
        loss.backward()
        return loss

    averages = []
    for step in range(1500):
        optim.step(closure)
        if step >= 700:
            averages.append(optim.state[model.module.weight]["hess"].mean())
    mean = torch.stack(averages)
    assert dist.get_world_size() == 2
    return float(mean.mean()), float(mean.std())


@pytest.mark.parametrize("noise", ["shared", "per_rank"])
@pytest.mark.parametrize("optimizer", ["IVON", "Vprop"])
def test_the_curvature_of_a_quadratic_is_its_hessian(ranks, optimizer, noise) -> None:
    """Products of averages in place of averages of products would make it 2 on two ranks.

    Vprop's fixed point s(s+λ) = H² lies at 4 for a mean loss whose gradient at the mean is nearly zero; the steps
    that the mean still makes add its square, which the tolerance has to hold.
    """
    for mean, _ in ranks(2)(curvature_of_quadratic, optimizer, noise):
        assert mean == pytest.approx(4.0, rel=0.03 if optimizer == "IVON" else 0.06)


def step_without_ddp() -> None:
    model, optim = start(None, "Vprop", {"noise": "per_rank"})
    LOOPS["closure"](optim, model, [make_batch(12, torch.float64)])


def step_with_scaler() -> None:
    model, optim = start("ddp", "Vprop", {"noise": "per_rank"}, torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    x, y = make_batch()
    with optim.sampled_params():
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    scaler.step(optim)


def start_sharded() -> None:
    start("fsdp", "Vprop", {"noise": "per_rank"})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (step_without_ddp, "Wrap the model in torch.nn.parallel.DistributedDataParallel"),
        (step_with_scaler, "Use bfloat16 autocast"),
        (start_sharded, "Use DistributedDataParallel for per_rank"),
    ],
)
def test_what_cannot_work_says_what_to_do(ranks, function, message) -> None:
    for error in ranks(2).errors(function):
        assert error is not None
        assert message in error[1]


def run_with_a_look_at_gradients(look: bool) -> list[Tensor]:
    """torch.autograd.grad, for a log say, between the backwards of two micro-batches."""
    model, optim = start("ddp", "IVON", {"noise": "per_rank"})
    for step in range(3):
        optim.zero_grad()
        for batch in split(make_batch(12, torch.float64, seed=step), 2):
            with optim.sampled_params():
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) / 2
                if look:
                    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                loss.backward()
        optim.step()
    return [state["hess"] for state in optim.state.values()]


def test_a_look_at_gradients_is_no_backward(ranks) -> None:
    looked, usual = (ranks(2)(run_with_a_look_at_gradients, look)[0] for look in (True, False))
    torch.testing.assert_close(looked, usual, rtol=0, atol=0)


def step_without_ddp_and_nan_on_one_rank() -> None:
    model, optim = start(None, "Vprop", {"noise": "per_rank"})
    x, y = make_batch(12, torch.float64)
    LOOPS["closure"](optim, model, [(x * (float("nan") if dist.get_rank() == 0 else 1.0), y)])


def test_all_ranks_raise_if_one_has_nan(ranks) -> None:
    for error in ranks(2).errors(step_without_ddp_and_nan_on_one_rank):
        assert error is not None
        assert "Wrap the model in torch.nn.parallel.DistributedDataParallel" in error[1]


def hooks_left_behind() -> int:
    model, _ = start("ddp", "Vprop", {})
    for _ in range(3):
        optim = vprop.Vprop(model.parameters(), num_data=100, noise="per_rank")
        LOOPS["closure"](optim, model, [make_batch(12, torch.float64)])
        del optim
        gc.collect()
    return len(next(model.parameters())._backward_hooks or {})


def test_hooks_go_with_their_optimizer(ranks) -> None:
    assert ranks(2)(hooks_left_behind) == [0, 0]

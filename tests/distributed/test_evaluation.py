"""What an FSDP model shows: samples and means, though FSDP keeps whole copies of some parameters between forwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.runs import LOOPS, SPREAD, data_part, make_batch, split, start
from vprop.parallel.sharding import full_tensor


def output(model: nn.Module, x: Tensor) -> Tensor:
    """A copy, which waits for ranks that are still adding up: what a tensor-parallel model returns does not."""
    return model(x).detach().clone()


def outputs(strategy: str | None, attached: bool) -> dict[str, Tensor]:
    """Outputs of a model that goes back and forth between evaluation and training."""
    model, optimizer = start(strategy, "Vprop", {"hess_init": 0.01})
    x, _ = make_batch(8, dtype=torch.float64)
    if attached:
        optimizer.attach(model)
    seen: dict[str, Tensor] = {}
    for round_ in range(2):
        model.eval()
        with torch.no_grad():
            seen[f"mean {round_}"] = output(model, x)
            for draw in range(2):
                with optimizer.sampled_params(train=False):
                    seen[f"draw {draw} {round_}"] = output(model, x)
            seen[f"mean after draws {round_}"] = output(model, x)
        model.train()
        if attached:
            seen[f"sample {round_}"] = output(model, x)
            model.eval()
            with torch.no_grad():
                seen[f"mean after a sample {round_}"] = output(model, x)
            model.train()
            seen[f"sample again {round_}"] = output(model, x)
        else:
            with optimizer.sampled_params():
                seen[f"sample {round_}"] = output(model, x)
        optimizer.discard_samples()
        part, parts = data_part(strategy)
        batch = split(make_batch(24, dtype=torch.float64, seed=round_), parts)[part]
        LOOPS["attached" if attached else "closure"](optimizer, model, [batch])
    return seen


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(("strategy", "count"), [(name, 4 if " and " in name else 2) for name in SPREAD])
def test_outputs_are_those_of_one_process(ranks, strategy, count, attached) -> None:
    alone = outputs(None, attached)
    assert not torch.allclose(alone["draw 0 0"], alone["draw 1 0"])
    assert not torch.allclose(alone["mean 0"], alone["sample 0"])
    for together in ranks(count)(outputs, strategy, attached):
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


def gradients_with_an_early_gathering(ahead: bool) -> list[Tensor]:
    """FSDP can be asked to bring parameters together while data are loaded: before the sample is written."""
    model, optimizer = start("fsdp", "Vprop", {"hess_init": 0.01})
    x, y = make_batch(8, dtype=torch.float64)
    if ahead:
        model.unshard(async_op=True)
    with optimizer.sampled_params():
        F.cross_entropy(model(x), y).backward()
    return [full_tensor(p.grad) for p in model.parameters()]


def test_parameters_gathered_before_the_sample_are_gathered_again(ranks) -> None:
    for usual, early in zip(
        ranks(2)(gradients_with_an_early_gathering, False),
        ranks(2)(gradients_with_an_early_gathering, True),
        strict=True,
    ):
        torch.testing.assert_close(early, usual, rtol=0, atol=0)


def attached_after_a_forward() -> None:
    model, optimizer = start("fsdp", "Vprop", {})
    with torch.no_grad():
        model.eval()(make_batch(4, torch.float64)[0])
    optimizer.attach(model).remove()


def test_a_model_that_was_evaluated_can_be_attached(ranks) -> None:
    ranks(2)(attached_after_a_forward)


def evaluation_around_a_step(arguments: dict) -> Tensor:
    model, optimizer = start("fsdp", "Vprop", arguments, torch.float32)
    x, y = make_batch(8)
    with optimizer.sampled_params():
        F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        before = model.eval()(x)
        optimizer.step()
        return model(x) - before


@pytest.mark.parametrize("arguments", [{}, {"foreach": True}])
def test_after_a_step_the_new_weights_are_seen(ranks, arguments) -> None:
    for change in ranks(2)(evaluation_around_a_step, arguments):
        assert float(change.abs().min()) > 0


def what_a_rank_saves() -> tuple[Tensor, Tensor]:
    """Of a model that is left with a sample in its weights, through the model inside the wrapper."""
    model, optimizer = start("ddp", "Vprop", {"hess_init": 0.01}, torch.float32)
    optimizer.attach(model)
    x, y = make_batch(8)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model(x)
    saved = model.module.state_dict()["0.weight"].clone()
    optimizer.discard_samples()
    return saved, model.module[0].weight.detach().clone()


def test_the_model_inside_a_wrapper_saves_the_mean(ranks) -> None:
    for saved, mean in ranks(2)(what_a_rank_saves):
        torch.testing.assert_close(saved, mean, rtol=0, atol=0)

"""What an FSDP model shows: samples and means, though FSDP keeps whole copies of some parameters between forwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.runs import LOOPS, SPREAD, data_part, make_batch, split, start


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
            seen[f"mean {round_}"] = model(x)
            for draw in range(2):
                with optimizer.sampled_params(train=False):
                    seen[f"draw {draw} {round_}"] = model(x)
            seen[f"mean after draws {round_}"] = model(x)
        model.train()
        if attached:
            seen[f"sample {round_}"] = model(x).detach()
            model.eval()
            with torch.no_grad():
                seen[f"mean after a sample {round_}"] = model(x)
            model.train()
            seen[f"sample again {round_}"] = model(x).detach()
        else:
            with optimizer.sampled_params():
                seen[f"sample {round_}"] = model(x).detach()
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

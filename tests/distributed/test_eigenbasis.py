"""Bases on several ranks: made from averaged gradients, and so the same everywhere, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.runs import assert_equal, run, start

BASIS = {"structure": "eigenbasis", "basis_every": 2, "basis_beta": 0.9}


@pytest.mark.parametrize("name", ["Vprop", "IVON"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ranks_are_equal_bit_for_bit(ranks, name, dtype) -> None:
    first, second = ranks(2)(run, "ddp", name, BASIS, "closure", dtype)
    assert any(key.endswith("left_basis") for key in first)
    assert_equal(first, second)
    if dtype == torch.float64:  # sums in another order, which eigenvectors amplify
        assert_equal(first, run(None, name, BASIS), rtol=1e-6, atol=1e-9)


def _refusal(strategy: str) -> str:
    try:
        start(strategy, "Vprop", BASIS, torch.float64)
    except ValueError as error:
        return str(error)
    return ""


def test_parameters_that_are_spread_over_ranks_are_refused(ranks) -> None:
    for message in ranks(2)(_refusal, "fsdp"):
        assert "Vprop needs whole parameters, but these are spread over ranks" in message

"""Ranks that draw the same noise make the run of one process: data parallel, sharded, tensor parallel."""

from __future__ import annotations

import pytest

from tests.distributed.runs import assert_equal, run

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

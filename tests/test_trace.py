"""The way of a step stays short: a reader has to follow it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import vprop
from vprop.kernels import cpu

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "trace_step.py"


@pytest.mark.skipif(not cpu.available(), reason="vprop was built without its compiled CPU kernels")
@pytest.mark.parametrize("loop", ["closure", "context", "attach"])
def test_a_fused_step_is_short(loop):
    spec = importlib.util.spec_from_file_location("trace_step", SCRIPT)
    trace_step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trace_step)
    counts, _ = trace_step.row("Vprop", loop, lambda m: vprop.Vprop(m.parameters(), num_data=100), "vprop/")
    assert counts["files"] <= 12
    assert counts["functions"] <= 60
    assert counts["calls"] <= 150

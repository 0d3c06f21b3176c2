"""The README: short, its figures those of committed runs, both sides of its diff programs, its links not dead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import vprop
from tests.figures import measured_on_deep_networks, measured_on_networks, shown_of_networks
from tests.pages import blocks_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_can_be_read_in_a_few_minutes():
    prose = re.sub(r"^```.*?^```", "", README, flags=re.S | re.M)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    assert len(prose.split()) <= 900


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_the_diff_run(side):
    """With what a diff takes for granted: a model, data, a loader, imports."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 5, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    train_set = torch.utils.data.TensorDataset(x, y)
    names = {
        "torch": torch,
        "vprop": vprop,
        "F": nn.functional,
        "model": nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "train_set": train_set,
        "loader": torch.utils.data.DataLoader(train_set, batch_size=16),
        "x_test": x[:7],
    }
    (diff,) = (block.text for block in blocks_of(README) if block.language == "diff")
    exec("\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", side)), names)
    if side == "+":
        assert names["probs"].shape == (7, 3)


def test_the_figures_of_networks_are_those_of_the_committed_runs():
    shown = shown_of_networks(README)
    assert len(shown) >= 8
    assert set(shown) <= measured_on_networks() | measured_on_deep_networks()

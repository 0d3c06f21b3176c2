"""Every Python block of the README runs, in order, and so do both sides of its diff."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


@pytest.fixture
def names():
    """What the README takes for granted: a model, data, a loader."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 5, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    train_set = torch.utils.data.TensorDataset(x, y)
    return {
        "torch": torch,
        "F": nn.functional,
        "model": nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "train_set": train_set,
        "loader": torch.utils.data.DataLoader(train_set, batch_size=16),
        "x_test": x[:7],
    }


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_the_diff_run(names, side):
    (diff,) = blocks("diff")
    program = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", side))
    exec(program, names)
    if side == "+":
        assert names["probs"].shape == (7, 3)


def test_python_blocks_run_in_order(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = blocks("python")
    assert len(programs) >= 5
    for program in programs:
        exec(program, names)


def test_every_file_the_readme_names_exists():
    for target in re.findall(r"\]\(([^)#]+?)\)", README):
        if not target.startswith("http"):
            assert (Path(__file__).parents[1] / target).exists(), target


def test_the_figures_in_the_readme_are_those_of_the_committed_run():
    import json

    methods = json.loads((Path(__file__).parents[1] / "docs/demo/demo.json").read_text())["digits"]["methods"]
    for row, key in [
        ("accuracy", "accuracy"),
        ("log-loss", "log_loss"),
        ("calibration error", "expected_calibration_error"),
        ("confidence on pure noise", "mean_confidence_on_noise"),
    ]:
        values = re.search(rf"^\| {row} \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.M)
        assert values is not None, row
        assert values.groups() == tuple(f"{methods[name][key]:.3f}" for name in ("Adam", "Vario")), row


NETWORKS = ("fashion", "fashion-h200", "resnet20", "resnet20-vario", "resnet20-long")


def test_the_figures_of_networks_are_those_of_the_committed_runs():
    import json

    rows = [
        row
        for file in NETWORKS
        for row in json.loads((Path(__file__).parents[1] / f"benchmarks/results/networks-{file}.json").read_text())[
            "rows"
        ]
    ]
    measured = {
        tuple(f"{row[f'{kind}_{score}'][0]:.4f}" for score in ("accuracy", "nll", "ece"))
        for row in rows
        for kind in ("mean", "posterior")
        if f"{kind}_nll" in row
    }
    shown = re.findall(r"^\| .* \| (0\.\d{4}) \| (0\.\d{4}) \| (0\.\d{4}) \|$", README, flags=re.M)
    assert len(shown) == 13
    assert set(shown) <= measured

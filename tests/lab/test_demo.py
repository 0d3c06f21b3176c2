"""The command line and the demo, in a short run."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import vprop
from vprop.lab import metrics
from vprop.lab.cli import app


def test_demo_writes_what_it_says(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0, result.output
    assert "log-loss" in result.output
    folder = tmp_path / "new" / "folder"
    written = json.loads((folder / "demo.json").read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert set(written["digits"]["methods"]) == {"Adam", "Vprop"}
    for picture in ("regression.png", "calibration.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "file" / "below")])
    assert result.exit_code != 0
    assert "cannot write to" in result.output
    assert "--out" in result.output


def test_version():
    assert CliRunner().invoke(app, ["version"]).output.strip() == vprop.__version__


def test_log_loss_and_accuracy_are_those_of_scikit_learn():
    from sklearn.metrics import accuracy_score, log_loss

    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, 4, generator=generator).softmax(-1)
    labels = torch.randint(0, 4, (50,), generator=generator)
    assert metrics.log_loss(probs, labels) == pytest.approx(log_loss(labels.numpy(), probs.numpy()), rel=1e-5)
    assert metrics.accuracy(probs, labels) == accuracy_score(labels.numpy(), probs.argmax(1).numpy())


def test_calibration_error_from_its_definition():
    """Two bins: 3 examples at 0.9 of which 2 right, 1 example at 0.65 that is wrong."""
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.65, 0.35]], dtype=torch.float64)
    diagram = metrics.reliability(probs, torch.tensor([0, 1, 1, 1]))
    assert diagram.expected_calibration_error == pytest.approx(0.75 * (0.9 - 2 / 3) + 0.25 * 0.65)

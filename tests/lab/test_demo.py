"""The command line and the demo, in a short run."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import vprop
from vprop.lab import entry
from vprop.lab.cli import app


def test_demo_writes_what_it_says(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--short", "--out", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0, result.output
    assert "log-loss" in result.output
    assert "What the posterior gained:" in result.output
    folder = tmp_path / "new" / "folder"
    written = json.loads((folder / "demo.json").read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert set(written["digits"]["methods"]) == {"Adam", "Vario"}
    for picture in ("regression.png", "calibration.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--short", "--out", str(tmp_path / "file" / "below")])
    assert result.exit_code != 0
    assert "cannot write to" in result.output
    assert "--out" in result.output


def test_version():
    assert CliRunner().invoke(app, ["version"]).output.strip() == vprop.__version__
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"vprop {vprop.__version__}"


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vprop.lab.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["vprop", "demo"])
    with pytest.raises(SystemExit, match=r'needs typer, which is not installed.*pip install "vprop\[lab\]"'):
        entry.main()
    monkeypatch.setattr(sys, "argv", ["vprop", "--version"])
    entry.main()
    assert capsys.readouterr().out == f"vprop {vprop.__version__}\n"

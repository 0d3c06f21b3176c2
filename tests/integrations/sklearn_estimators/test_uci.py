"""The benchmark on UCI's sets runs, uses the test rows for nothing but scores, and says what it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import uci


@pytest.fixture
def folder(tmp_path):
    """One small set in the published format, with two splits."""
    random = np.random.RandomState(0)
    X = random.randn(60, 3)
    order = [random.permutation(60) for _ in range(2)]
    content = {"train_idx": np.stack([o[:50] for o in order]), "test_idx": np.stack([o[50:] for o in order])}
    (tmp_path / "yacht").mkdir()
    np.savez(tmp_path / "yacht" / "yacht.npz", X=X, y=X[:, 0] + 0.1 * random.randn(60), **content)
    return tmp_path


def test_it_runs_and_writes_what_it_found(folder, monkeypatch, capsys):
    out = folder / "uci.json"
    command = f"uci.py --data {folder} --sets yacht --members 1 2 --steps 40 --grid 2 --out {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    uci.main()
    results = json.loads(out.read_text())
    assert [(row["members"], row["split"]) for row in results["rows"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(row["setting"] in uci.GRID[:2] for row in results["rows"])
    assert [entry["splits"] for entry in results["table"]] == [2, 2]
    one = results["table"][0]
    assert one["log_likelihood"] == pytest.approx(np.mean([row["log_likelihood"] for row in results["rows"][:2]]))
    assert one["better"] == (one["log_likelihood"] > one["published_log_likelihood"])
    printed = capsys.readouterr().out
    assert "| yacht | 2 | 2 |" in printed
    assert "1 members: better in" in printed
    assert str(folder) not in json.dumps(results["options"])


def test_targets_of_the_test_rows_change_nothing_but_the_scores(folder):
    file = folder / "yacht" / "yacht.npz"
    task = {"file": str(file), "set": "yacht", "split": 0, "members": 1, "steps": 40, "settings": uci.GRID[:2]}
    task["shared"] = {}
    plain = uci.fit_and_score(task)
    content = dict(np.load(file))
    content["y"][content["test_idx"][0]] += 100.0
    np.savez(file, **content)
    moved = uci.fit_and_score(task)
    assert moved["log_likelihood"] < plain["log_likelihood"]
    for key in ("held_out_log_density", "noise_std", "setting"):
        assert moved[key] == plain[key]


@pytest.mark.parametrize(("rows", "steps"), [(277, 10_000), (7373, 10_000), (41_157, 10_000)])
def test_passes_make_the_steps_that_were_asked_for(rows, steps):
    batch = min(max(64, rows // 64), 512)
    assert abs(uci.passes(steps, rows) * -(-rows // batch) - steps) <= -(-rows // batch)


def test_the_figures_in_the_docs_are_those_of_the_committed_runs():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "training.md").read_text()
    tables = []
    for name in ("uci", "uci-normal"):
        result = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
        tables.append({row["set"]: row for row in result["table"]})
    assert len(tables[0]) == 9
    for name, row in tables[0].items():
        figures = [
            row["log_likelihood"],
            tables[1][name]["log_likelihood"],
            row["published_log_likelihood"],
            row["cover"],
        ]
        assert f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |" in page

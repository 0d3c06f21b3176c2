"""Every figure about speed in docs is one of a committed result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vprop.lab.bench.errors import BenchError
from vprop.lab.bench.tables import filled

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", ["docs/speed.md", "docs/predictions.md"])
def test_tables_are_those_of_the_results(page):
    text = (ROOT / page).read_text()
    assert "<!-- bench " in text
    assert filled(text, RESULTS) == text, "run: vprop bench page docs/speed.md docs/predictions.md"


def test_every_result_names_its_command_and_its_machine():
    files = list(RESULTS.glob("*.json"))
    assert len(files) >= 6
    commands = (ROOT / "benchmarks" / "README.md").read_text()
    for file in files:
        result = json.loads(file.read_text())
        assert result["command"].startswith(("vprop bench ", "python benchmarks/"))
        assert result["environment"]["torch"]
        assert result["command"] in commands, file.name


@pytest.mark.parametrize(
    ("marker", "message"),
    [("none.json", "asks for none.json, which is not in"), ("h200-memory.json: SGD default, Nobody", "for Nobody")],
)
def test_what_is_not_there_is_said(marker, message):
    with pytest.raises(BenchError, match=message):
        filled(f"<!-- bench {marker} -->\n<!-- end -->", RESULTS)


def test_a_table_is_replaced_and_the_rest_stays():
    text = "before\n<!-- bench h200-memory.json: SGD default -->\nold\n<!-- end -->\nafter\n"
    new = filled(text, RESULTS)
    assert new.startswith("before\n<!-- bench h200-memory.json: SGD default -->\n| ")
    assert new.endswith("|\n<!-- end -->\nafter\n")
    assert "| SGD default | 0.00 | 0.00 |" in new
    assert "old" not in new

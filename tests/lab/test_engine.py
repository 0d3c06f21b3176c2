"""What all experiments stand on: keys that hold the code behind a job, and errors that become messages."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import vprop.lab
from vprop.lab.command import messages
from vprop.lab.comparison import cost, references, training
from vprop.lab.data import DataError
from vprop.lab.engine import sources
from vprop.lab.engine.job import Job
from vprop.lab.errors import Interrupted, UsageError
from vprop.lab.experiments import explore, filter, run

LAB = Path(vprop.lab.__file__).parent


def test_no_two_classes_of_the_lab_share_a_name():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in LAB.rglob("*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


class TestTheCodeBehindAJob:
    def names(self, job):
        return {module.__name__.removeprefix("vprop.lab.") for module in sources.behind(job.__module__)}

    @pytest.mark.parametrize(
        ("job", "some"),
        [
            (run.CurveRun, {"experiments.run", "engine.run", "engine.binary", "engine.problem", "engine.method"}),
            (filter.Pass, {"experiments.filter", "experiments.run", "engine.binary"}),
            (explore.Walk, {"experiments.explore", "engine.job"}),
            (training.ScoredRun, {f"comparison.{name}" for name in ("training", "tasks", "scores", "laplace")}),
            (cost.Cost, {"comparison.cost", "comparison.methods", "comparison.tasks"}),
            (references.Exact, {"comparison.references", "comparison.scores", "comparison.tasks"}),
        ],
    )
    def test_is_all_that_it_imports(self, job, some):
        assert some <= self.names(job)

    def test_is_not_what_only_others_import(self):
        """So that a new row of a table, or a change of a page, does not run everything again."""
        assert not {"experiments.methods", "experiments.curves", "experiments.claims"} & self.names(run.CurveRun)
        assert not {"comparison.table", "comparison.page", "comparison.methods"} & self.names(training.ScoredRun)
        assert not any(name.startswith("data") for name in self.names(training.ScoredRun))

    def test_decides_the_key(self, monkeypatch):
        walk = explore.Walk("Newton", 0)
        before, original = walk.key, sources.source
        changed = sources.behind("vprop.lab.engine.job")[0]
        monkeypatch.setattr(sources, "source", lambda module: original(module) + "# changed" * (module is changed))
        assert walk.key != before


@dataclass(frozen=True)
class Sum(Job):
    """Just a sum."""

    numbers: tuple[int, ...]

    def compute(self):
        return {"sum": sum(self.numbers)}


def test_a_result_says_what_it_is_the_result_of():
    result = Sum((1, 2)).execute()
    assert result["job"] == {"job": "Sum", "numbers": [1, 2]}
    assert result["sum"] == 3
    assert result["seconds"] >= 0
    assert result["environment"]["torch"]


class TestMessages:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (UsageError("Wrong."), "Error: Wrong.\n"),
            (DataError("No data."), "Error: No data.\n"),
            (NotADirectoryError(20, "Not a directory", "x/y"), "Error: Cannot use x/y: Not a directory."),
            (OSError(12, "Cannot allocate memory"), "Error: The system refused: Cannot allocate memory.\n"),
        ],
    )
    def test_errors_are_a_line_and_status_1(self, error, text, capsys):
        with pytest.raises(typer.Exit) as caught, messages():
            raise error
        assert caught.value.exit_code == 1
        assert capsys.readouterr().err.startswith(text)

    def test_an_interrupt_is_status_130(self, capsys):
        with pytest.raises(SystemExit) as caught, messages():
            raise Interrupted("Kept.")
        assert caught.value.code == 130
        assert capsys.readouterr().err == "Kept.\n"

    def test_a_mistake_of_ours_stays_one(self):
        with pytest.raises(ZeroDivisionError), messages():
            raise ZeroDivisionError

"""`vprop reproduce` as a user meets it: a small run, what can go wrong, and an interrupt."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vprop.lab.cli import app

ROOT = Path(__file__).parents[2]
SMALL = ["--short", "--gradients", "20", "--seeds", "1", "--workers", "1"]


def vprop(*arguments, environment=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


@pytest.fixture
def nowhere(tmp_path):
    """An environment without any data: empty folders, and a proxy that answers nothing."""
    empty = tmp_path / "empty"
    empty.mkdir()
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return {"VPROP_DATA": str(empty), "XDG_CACHE_HOME": str(empty), "no_proxy": "", "NO_PROXY": "", **proxies}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished small run, shared by the tests that only look at it."""
    out = tmp_path_factory.mktemp("finished")
    result = vprop("reproduce", "logreg", "--out", out, *SMALL, "--method", "vprop-1", "--method", "rmsprop")
    assert result.exit_code == 0, result.output
    return out, result.output


def test_a_run_leaves_results_figures_and_a_report(finished):
    out, output = finished
    assert "The paper's claims" in output
    assert f"{out / 'report' / 'index.html'}" in output.replace("\n", "")
    result = json.loads((out / "results" / "logreg.json").read_text())
    assert result["environment"]["torch"]
    (panel,) = result["panels"]
    assert [method["name"] for method in panel["methods"]] == ["vprop-1", "rmsprop"]
    for method in panel["methods"]:
        assert len(method["grid"]) == 8
        assert method["chosen"] in [{k: v for k, v in entry.items() if k != "score"} for entry in method["grid"]]
    exact = [line for line in panel["lines"] if line["metric"] == "elbo"]
    assert all(line["gradient_norm"] <= 1e-6 for line in exact)
    assert (out / "report" / "figures" / f"{panel['id']}.png").stat().st_size > 5000
    assert (out / "report" / "figures" / f"{panel['id']}.pdf").stat().st_size > 5000


def test_drawing_again_does_not_train(finished, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    shutil.rmtree(out / "runs")
    shutil.rmtree(out / "report")
    shutil.copy(ROOT / "docs" / "demo" / "demo.json", out)  # as if the demo had been run into the folder
    (tmp_path / "page.md").write_text(
        "<!-- claims: all -->\nold\n<!-- end -->\n![figure](logreg-breast_cancer-full.png)\n"
    )
    result = vprop("reproduce", "report", "--out", out, "--page", tmp_path / "page.md")
    assert result.exit_code == 0, result.output
    assert 'id="demo"' in (out / "report" / "index.html").read_text()
    assert not (out / "runs").exists()
    page = (tmp_path / "page.md").read_text()
    assert "yesterday" not in page
    assert "| RMSprop does well in log-loss on logistic regression. | " in page
    assert (tmp_path / "logreg-breast_cancer-full.png").exists()


def test_a_page_that_is_not_there(finished, tmp_path):
    result = vprop("reproduce", "report", "--out", finished[0], "--page", tmp_path / "none.md")
    assert result.exit_code == 1
    assert "Cannot read the page" in result.output


def test_what_needs_no_data_looks_for_none(tmp_path, nowhere):
    result = vprop("reproduce", "memory", "--out", tmp_path / "out", "--data-dir", tmp_path, environment=nowhere)
    assert result.exit_code == 0, result.output
    assert "were not found" not in result.output


def test_the_same_data_twice_are_one(tmp_path):
    twice = ["--data", "breast_cancer", "--data", "breast_cancer", "--method", "rmsprop"]
    result = vprop("reproduce", "logreg", "--out", tmp_path, *SMALL, *twice)
    assert result.exit_code == 0, result.output


def test_a_second_run_takes_the_first_one_up(finished):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    result = vprop("reproduce", "logreg", "--out", out, *SMALL, "--method", "vprop-1", "--method", "rmsprop")
    assert "16 of 16 runs were done before" in result.output
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")} == before


class TestWhatCanGoWrong:
    def fails(self, result, *words):
        assert result.exit_code == 1, result.output
        message = " ".join(result.output.split())
        assert message.startswith("Error: ")
        for word in words:
            assert word in message
        assert "Traceback" not in message

    def test_an_unknown_method(self, tmp_path):
        result = vprop("reproduce", "logreg", "--out", tmp_path, "--method", "vprop-3", *SMALL)
        self.fails(result, "Unknown method 'vprop-3'", "vprop-2")

    def test_an_unknown_data_set(self, tmp_path):
        result = vprop("reproduce", "logreg", "--out", tmp_path, "--data", "a2a", *SMALL)
        self.fails(result, "a2a", "a1a", "australian")

    def test_a_data_set_of_another_kind(self, tmp_path):
        result = vprop("reproduce", "logreg", "--out", tmp_path, "--data", "fashion_mnist", *SMALL)
        self.fails(result, "two classes", "breast_cancer")

    def test_an_unknown_experiment(self):
        assert vprop("reproduce", "everything").exit_code == 2

    @pytest.mark.parametrize(
        ("option", "value", "least"), [("--seeds", 0, 1), ("--gradients", 5, 10), ("--workers", -1, 0)]
    )
    def test_a_number_that_makes_no_sense(self, tmp_path, option, value, least):
        result = vprop("reproduce", "logreg", "--out", tmp_path, "--short", option, value)
        self.fails(result, f"Invalid {option} {value}: must be at least {least}")

    def test_a_method_that_takes_no_part(self, tmp_path):
        result = vprop("reproduce", "logreg", "--out", tmp_path, "--method", "mc-dropout", *SMALL)
        self.fails(result, "mc-dropout is for networks", "vprop reproduce mlp")

    @pytest.mark.parametrize(
        ("text", "words"), [("{", "no JSON file"), ('{"panels": [{}]}', "is not one of this version"), ("[]", "logreg")]
    )
    def test_a_result_that_is_none(self, tmp_path, text, words):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "logreg.json").write_text(text)
        self.fails(vprop("reproduce", "report", "--out", tmp_path), words)

    def test_a_report_that_cannot_be_written(self, finished, tmp_path):
        shutil.copytree(finished[0] / "results", tmp_path / "results")
        (tmp_path / "report").write_text("")
        self.fails(vprop("reproduce", "report", "--out", tmp_path), "Cannot use", "--out")

    def test_missing_data_that_were_asked_for(self, tmp_path, nowhere):
        result = vprop("reproduce", "logreg", "--out", tmp_path / "out", "--data", "a1a", environment=nowhere)
        self.fails(result, "a1a", nowhere["VPROP_DATA"], nowhere["XDG_CACHE_HOME"])

    def test_missing_data_by_default_fall_back_and_say_so(self, tmp_path, nowhere):
        arguments = ["--gradients", "8", "--seeds", "1", "--method", "rmsprop", "--workers", "1"]
        result = vprop("reproduce", "logreg", "--out", tmp_path / "out", *arguments, environment=nowhere)
        assert result.exit_code == 0, result.output
        assert "breast cancer data that scikit-learn ships" in " ".join(result.output.split())
        stored = json.loads((tmp_path / "out" / "results" / "logreg.json").read_text())
        assert {panel["data"] for panel in stored["panels"]} == {"breast_cancer"}
        assert "were not found" in stored["notes"][0]

    @pytest.mark.parametrize(
        ("text", "words"),
        [("+1 1:1 nonsense\n", ("checksum",)), ("", ("checksum",))],
    )
    def test_a_file_with_other_contents(self, tmp_path, nowhere, text, words):
        for name in ("a1a", "a1a.t"):
            (tmp_path / name).write_text(text)
        arguments = ["--data", "a1a", "--data-dir", tmp_path]
        result = vprop("reproduce", "logreg", "--out", tmp_path / "out", *arguments, environment=nowhere)
        self.fails(result, "a1a", *words)

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        result = vprop("reproduce", "logreg", "--out", tmp_path / "file" / "out", *SMALL)
        self.fails(result, "Cannot write to", "--out")

    def test_a_report_without_results(self, tmp_path):
        self.fails(vprop("reproduce", "report", "--out", tmp_path), "no results", "vprop reproduce logreg")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT, which only POSIX systems have")
def test_an_interrupt_keeps_what_is_finished(tmp_path):
    """Ctrl-C half-way: exit 130, a message, finished runs on disk, no worker left, and the next run goes on."""
    arguments = ["reproduce", "logreg", "--out", str(tmp_path), "--short", "--gradients", "150", "--seeds", "1"]
    command = [sys.executable, "-c", "from vprop.lab.cli import main; main()", *arguments, "--workers", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    runs = Path(tmp_path) / "runs"
    deadline = time.monotonic() + 120
    while len(list(runs.glob("*.json")) if runs.exists() else []) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=60)
    kept = len(list(runs.glob("*.json")))
    assert process.returncode == 130, errors
    assert "Interrupted." in errors
    assert "the same command goes on from there" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert kept >= 3
    assert not list(runs.glob("*.part"))
    assert _gone(process.pid), "a worker is still alive"


def _gone(group: int) -> bool:
    """Whether all processes of the group have ended, which may take a moment."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False

"""`vprop data`."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.lab.data.few_rows import files, write
from vprop.lab.cli import app, main


def _run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def _row(result, name):
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_list_shows_where_each_is_without_downloading(server, tmp_path, cache):
    result = _run("list")
    assert result.exit_code == 0
    assert _row(result, "a1a") == ["a1a", "2 + 1", "123", "tests", "not found"]
    assert _row(result, "breast_cancer")[-1] == "ships with scikit-learn"
    assert _row(result, "fashion_mnist")[1:3] == ["60000 + 10000", "28×28"]
    assert server.requested == []
    folder = write(tmp_path / "given [1]" / "libsvm")  # brackets: rich would take them for markup
    assert _row(_run("list", "--data-dir", folder.parent), "a1a")[-1] == f"{folder} (file)"
    write(cache)
    assert _row(_run("list"), "a1a")[-1] == f"{cache} (cache)"


def test_list_shows_a_wrong_checksum_and_fails(tiny, tmp_path):
    folder = write(tmp_path / "given", train=b"")
    result = _run("list", "--data-dir", folder)
    assert result.exit_code == 1
    assert _row(result, "a1a")[-1] == f"wrong checksum: {folder / 'a1a'}"
    assert _row(result, "fashion_mnist")[-1] == "not found"
    assert result.stderr.startswith(f"Error: {folder / 'a1a'} has the wrong checksum: expected sha256")
    assert result.stderr.count("\n") == 1


def test_fetch_downloads_and_says_where(server, cache):
    result = _run("fetch", "a1a", "breast_cancer", "a1a")
    assert result.exit_code == 0
    assert result.stdout == f"a1a: {cache / 'libsvm'} (downloaded)\nbreast_cancer: ships with scikit-learn\n"
    assert result.stderr.startswith(f"Downloading http://127.0.0.1:{server.server_port}/a1a\n")
    assert _run("fetch", "a1a").stdout == f"a1a: {cache / 'libsvm'} (cache)\n"


def test_fetch_all_says_what_is_missing_after_trying_everything(server, cache):
    result = _run("fetch")
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["a1a", "breast_cancer"]
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 2
    assert errors[0].startswith("Error: Data set 'australian' not found: no file australian_scale. Looked in: --data-")
    assert errors[1].startswith("Error: Data set 'fashion_mnist' not found: no file train-images-idx3-ubyte.gz. ")
    assert files(cache) == [cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t"]


def test_fetch_of_an_unknown_name_downloads_nothing(server):
    result = _run("fetch", "a1a", "spam")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: Unknown data set 'spam'. Must be one of: a1a, australian, breast_cancer, fashion_mnist.\n"
    )
    assert server.requested == []


@pytest.mark.parametrize("command", ["list", "fetch"])
def test_a_wrong_data_dir_is_one_line(command, tmp_path):
    result = _run(command, "--data-dir", tmp_path / "missing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"Error: data_dir={str(tmp_path / 'missing')!r} does not exist. "
        "Give --data-dir an existing folder, or leave it out.\n"
    )


def test_a_terminal_without_the_signs_gets_question_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr("sys.argv", ["vprop", "data", "list"])
    with pytest.raises(SystemExit):
        main()
    assert b"28?28" in written.getvalue()


def test_the_command_line_starts_without_the_heavy_packages():
    check = "import sys, vprop.lab.cli; print({'sklearn', 'matplotlib', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr

"""Every Python block of the README and of every page of the documentation runs, each page from a clean start."""

from __future__ import annotations

import random
import re
import sys
import textwrap

import numpy as np
import pytest
import torch

from tests.pages import PAGES, ROOT, blocks_of, commands_of, run_page, run_process


@pytest.fixture
def clean_start(tmp_path, monkeypatch):
    """An empty folder; and what a page changes for the whole process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    states, dtype = (random.getstate(), np.random.get_state()), torch.get_default_dtype()
    with torch.random.fork_rng():
        yield tmp_path
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_default_dtype(dtype)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize("path", PAGES[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(path, clean_start):
    run_page(path.read_text(), path, clean_start)


def test_the_snippet_of_the_readme_prints_what_stands_below_it(clean_start, capsys):
    """But for roundings, which differ from machine to machine."""
    readme, number = PAGES[0].read_text(), re.compile(r"-?\d+\.\d+")
    run_page(readme, PAGES[0], clean_start)
    printed = capsys.readouterr().out
    (shown,) = (block.text for block in blocks_of(readme) if block.language == "text")
    assert number.sub("", printed).split() == number.sub("", shown).split()
    values = [[float(value) for value in number.findall(text)] for text in (printed, shown)]
    assert values[0] == pytest.approx(values[1], abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_run_under_torchrun_itself(path, tmp_path):
    """The commands of a page word by word, but for a port of its own."""
    files: set[str] = set()
    for block in blocks_of(path.read_text()):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
            files.add(block.file)
        for program, *arguments in commands_of(block, files):
            if program == "torchrun":
                start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                run_process([*start, *(word for word in arguments if word != "--standalone")], tmp_path)


def test_pages_are_found():
    """Those with most to run; and the number of their blocks, which must not become nothing by a slip of a fence."""
    counts = {
        str(path.relative_to(ROOT)): sum(b.language == "python" for b in blocks_of(path.read_text())) for path in PAGES
    }
    assert counts["README.md"] == 1
    least = {
        "start": 5,
        "guide": 8,
        "training": 8,
        "predictions": 6,
        "sensitivity": 6,
        "calibration": 4,
        "decisions": 2,
    }
    for name, count in least.items():
        assert counts[f"docs/{name}.md"] >= count, name


def fenced(*blocks):
    return "\n\n".join(f"```{language}\n{text}\n```" for language, text in blocks)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (fenced(("python", "x = 1"), ("python", "assert x == 2, 'second'")), "second"),
        (fenced(("python", "# train.py\nx = 1")), "line 2: no command after it runs train.py"),
        (
            fenced(("bash", "python train.py"), ("python", "# train.py\nx = 1")),
            "no command after it runs train.py",
        ),
        (fenced(("python", "# train.py\nassert 1 == 2"), ("bash", "python train.py")), "AssertionError"),
        (
            fenced(("python", "# train.py\nassert 1 == 2"), ("bash", "torchrun --nproc-per-node 2 train.py")),
            "assert 1 == 2",
        ),
        (
            fenced(("python", "# train.py\nx = 1"), ("bash", "torchrun train.py")),
            "a page has torchrun --nproc-per-node",
        ),
        (fenced(("py", "x = 1")), "what is a block in 'py'"),
        (fenced(("", "import vprop")), "looks like Python"),
    ],
)
def test_what_is_wrong_is_found(page, message, clean_start):
    with pytest.raises(AssertionError, match=message):
        run_page(page, ROOT / "page.md", clean_start)


def test_names_are_not_given(clean_start):
    with pytest.raises(NameError, match="torch"):
        run_page(fenced(("python", "torch.ones(2)")), ROOT / "page.md", clean_start)


def test_blocks_inside_of_lists_and_files_that_are_imported(clean_start):
    listed = fenced(("python", "# part.py\nx = 1"), ("python", "import os\nassert os.listdir() == ['part.py']"))
    program = "# whole.py\nfrom part import x\nopen('done', 'w').close()"
    page = "- a list\n\n" + textwrap.indent(listed, "  ") + "\n\n"
    page += fenced(("python", program), ("bash", "python whole.py"))
    run_page(page, ROOT / "page.md", clean_start)
    assert (clean_start / "done").exists()

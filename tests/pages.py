"""The code of a Markdown page, run as a reader would run it: from a clean start.

A page is one program. Its ```python blocks run in order, in one namespace that begins with no names, in an empty
folder.

A ```python block whose first line is a comment with the name of a file, ``# train.py``, is that file: it is written
into the folder, and runs by a command further down the page, in ```bash or after a ``$`` in ```console or ```text,
``torchrun --nproc-per-node 2 train.py`` or ``python train.py``, in processes of its own (torchrun itself is left to
`make test-slow`; here its processes start as `programs.py` says). Files may import each other. A
file that no command runs and nothing imports is an error, and so is a block in a language that is not known to be no
Python: nothing is left out in silence. Only on pages ``from-*.md``, code of the library that one comes from, which
need not be installed, is a ```py block: compiled, not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.programs import run_program

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LIMIT = 120
"""Seconds that a program of a page may take."""

NOT_RUN = {"", "bash", "bibtex", "console", "diff", "ini", "json", "text", "toml", "yaml"}
"""Languages of blocks that are read, not run; but commands that name a file of the page are (``commands_of``)."""

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
LOOKS_LIKE_PYTHON = re.compile(r"^(import \w|from [\w.]+ import )", re.M)


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    text: str
    line: int
    """Of the page, of the first line inside."""

    @property
    def file(self) -> str | None:
        """The name in the first line, if that is all there is in it."""
        name = re.match(r"# ([\w-]+\.py)\n", self.text)
        return name[1] if name and self.language == "python" else None


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(page):
        language = (match["info"].split() or [""])[0]
        line = page.count("\n", 0, match.start("body")) + 1
        found.append(Block(language, textwrap.dedent(match["body"]), line))
    return found


def refuse_unknown(blocks: list[Block], path: Path) -> None:
    """Refuse what might be Python and would not be run."""
    for block in blocks:
        if block.language == "python":
            continue
        if block.language == "py" and path.name.startswith("from-"):  # of another library, which need not be there
            compile(block.text, str(path), "exec")
            continue
        assert block.language in NOT_RUN, (
            f"line {block.line}: what is a block in {block.language!r}? Python that runs is ```python."
        )
        hidden = block.language != "diff" and LOOKS_LIKE_PYTHON.search(block.text)
        assert not hidden, f"line {block.line}: this looks like Python; call the block ```python, so that it is run."


def commands_of(block: Block, files: set[str]) -> list[list[str]]:
    """The commands of a ```bash block, or after a ``$`` in ```console and ```text, that run a file of the page."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language in ("console", "text"):  # with what they print
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    elif block.language != "bash":
        return []
    commands = [shlex.split(line, comments=True) for line in lines]
    return [
        words
        for words in commands
        if words and words[0] in ("python", "torchrun") and files & set(words) and "--nnodes" not in words
    ]


def run_page(page: str, path: Path, folder: Path) -> None:
    """Run all blocks in ``folder``, which is empty and the current one. Tracebacks name ``path`` and its lines."""
    blocks = blocks_of(page)
    refuse_unknown(blocks, path)
    names: dict[str, object] = {"__name__": "__main__"}
    waiting: dict[str, int] = {}
    files: set[str] = set()
    for block in blocks:
        if block.file is not None:
            (folder / block.file).write_text(block.text)
            files.add(block.file)
            waiting[block.file] = block.line
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), names)
        for command in commands_of(block, files):
            run_command(command, folder)
            waiting = {file: line for file, line in waiting.items() if file not in command}
    texts = [block.text for block in blocks]
    for file, line in waiting.items():
        imported = re.compile(rf"^(from|import) {re.escape(file[:-3])}\b", re.M)
        assert any(map(imported.search, texts)), f"line {line}: no command after it runs {file}."


def run_command(command: list[str], folder: Path) -> None:
    """Run ``python …`` or ``torchrun …`` in the folder."""
    program, *arguments = command
    if program == "torchrun":
        ranks, file = torchrun_arguments(arguments)
        run_program(folder / file, cwd=folder, logs=folder, ranks=ranks)
    else:
        run_process([sys.executable, *arguments], folder)


def run_process(command: list[str], folder: Path) -> None:
    """Run a command in the folder and show what it said if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"


def torchrun_arguments(arguments: list[str]) -> tuple[int, str]:
    """How many processes, and the file."""
    match arguments:
        case ["--standalone", *rest]:
            return torchrun_arguments(rest)
        case ["--nproc-per-node" | "--nproc_per_node", number, file]:
            return int(number), file
    raise AssertionError(f"torchrun {shlex.join(arguments)}: a page has torchrun --nproc-per-node 2 train.py")

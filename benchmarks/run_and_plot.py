"""The command of benchmarks that run over seeds, keep what they found in a file, and draw a picture of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vprop.lab.environment import environment
from vprop.plots import style


def run_and_plot(
    words: str | None,
    command: str,
    run: Callable[[range, bool], Any],
    plot: Callable[[Any, Path], None],
    *,
    seeds: int,
) -> None:
    """Run with the seeds that are asked for, or read an earlier run for its picture; write what is asked for.

    ``command`` is written into the file: it is the one that makes the committed result.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture; with --json of a run that is there, of that run")
    arguments = parser.parse_args()
    if arguments.plot and arguments.json and arguments.json.exists():
        found = json.loads(arguments.json.read_text())["results"]
    else:
        found = run(range(arguments.first_seed, arguments.first_seed + arguments.seeds), arguments.short)
        if arguments.json:
            content = {"command": command, "environment": environment(), "results": found}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.plot:
        with style.pictures():
            plot(found, arguments.plot)

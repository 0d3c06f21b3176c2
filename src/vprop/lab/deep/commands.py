"""The command `vprop compare deep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vprop.lab.command import DataDirOption, messages
from vprop.lab.errors import UsageError


def deep(
    what: Annotated[
        str,
        typer.Argument(
            help="A task (cifar10, cifar10-40, fashion, gpt, lora, …), several with commas, or all. collect: write "
            "results from kept runs; table: draw tables and plots from results."
        ),
    ] = "all",
    only: Annotated[str, typer.Option(help="Contenders, with commas between them; all by default.")] = "",
    seeds: Annotated[str, typer.Option(help="With commas between them.")] = "0,1,2",
    tuning: Annotated[bool, typer.Option("--tuning", help="Choose settings, and no more.")] = False,
    usual: Annotated[
        bool, typer.Option("--usual", help="Do not try settings: take what was chosen before, else the usual one.")
    ] = False,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Leave out the contenders whose figures the results have, with these seeds."),
    ] = False,
    cost: Annotated[bool, typer.Option("--cost", help="Measure times and memory, and no more.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = 1,
    minutes: Annotated[float, typer.Option(help="Stop after so many, with what is finished; 0 for no limit.")] = 0.0,
    fast: Annotated[
        list[str] | None,
        typer.Option(
            help="For GPUs: channels-last, compile, cudnn-benchmark, without-graphs. CPUs: channels-last, bfloat16. "
            "May be repeated."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and predictions.")] = Path("out/deep"),
    results: Annotated[Path | None, typer.Option(help="Folder for figures; OUT/results by default.")] = None,
    page: Annotated[Path | None, typer.Option(help="With table: the page that is made or drawn anew.")] = None,
    data_dir: DataDirOption = None,
    short: Annotated[bool, typer.Option("--short", help="Small networks and no files, for a look.")] = False,
) -> None:
    """Networks of the usual sizes: what people use and this library, under one protocol, with resumable runs."""
    from rich.console import Console

    from vprop.lab.deep import compare
    from vprop.lab.deep.workloads import How

    with messages():
        if jobs < 1:
            raise UsageError(f"Invalid --jobs {jobs}: must be at least 1.")
        how = How(out, device, compare.check_fast(fast or []), compare.deadline(minutes))
        names = "all" if what in ("table", "collect") else what
        chosen = compare.tasks_named(names, short), compare.contenders_named(only), compare.numbers(seeds)
        stages = compare.stages_for(tuning, usual, cost)
        if missing and "seeds" not in stages:
            raise UsageError(f"--missing is about seeds, which {'--tuning' if tuning else '--cost'} does not run.")
        request = compare.DeepRequest(*chosen, stages, how, data_dir, jobs, results, page, missing)
        console = Console()
        if what == "table":
            compare.draw(request, console)
        elif what == "collect":
            compare.collect_all(request, console)
        else:
            compare.run(request, console)

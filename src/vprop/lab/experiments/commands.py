"""The command `vprop reproduce`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vprop.lab.command import DataDirOption, WorkersOption, messages


class Experiment(str, Enum):
    """What to reproduce."""

    LOGREG = "logreg"
    MLP = "mlp"
    LONG = "long"
    FILTER = "filter"
    EXPLORE = "explore"
    MEMORY = "memory"
    ALL = "all"
    REPORT = "report"


def reproduce(
    what: Annotated[
        Experiment,
        typer.Argument(
            help="logreg and mlp: the paper's figures. long: where methods end up. filter: VONG and the Kalman filter. "
            "explore: local minima. memory: bytes per weight. report: draw the report again, without training."
        ),
    ] = Experiment.ALL,
    out: Annotated[Path, typer.Option(help="Folder for runs, results and the report.")] = Path("out"),
    data: Annotated[list[str] | None, typer.Option(help="Data set; may be repeated. See `vprop data list`.")] = None,
    data_dir: DataDirOption = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method, e.g. vprop-2; may be repeated. For logreg, mlp and long.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per method; long has one.")] = None,
    gradients: Annotated[
        int | None, typer.Option(help="Gradients of a batch that every run may evaluate; full batches: passes.")
    ] = None,
    workers: WorkersOption = 0,
    page: Annotated[
        Path | None,
        typer.Option(help="Markdown page whose table of claims and figures are drawn anew, e.g. docs/paper.md."),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Shipped data and short runs, for a look.")] = False,
) -> None:
    """The paper's experiments, as a report with figures and a table of its claims."""
    from rich.console import Console

    from vprop.lab.experiments.reproduce import EXPERIMENTS, PaperRequest, update_page
    from vprop.lab.experiments.reproduce import report as draw
    from vprop.lab.experiments.reproduce import reproduce as run

    console = Console()
    request = PaperRequest(
        out=out,
        data=tuple(data or ()),
        data_dir=data_dir,
        methods=tuple(method or ()),
        seeds=seeds,
        gradients=gradients,
        workers=workers,
        short=short,
    )
    with messages():
        if what is Experiment.REPORT:
            draw(out, console)
        else:
            run(tuple(EXPERIMENTS) if what is Experiment.ALL else (what.value,), request, console)
        if page is not None:
            update_page(page, out)

"""The command `vprop reproduce`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class What(str, Enum):
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
        What,
        typer.Argument(
            help="logreg and mlp: the paper's figures. long: where methods end up. filter: VONG and the Kalman filter. "
            "explore: local minima. memory: bytes per weight. report: draw the report again, without training."
        ),
    ] = What.ALL,
    out: Annotated[Path, typer.Option(help="Folder for runs, results and the report.")] = Path("out"),
    data: Annotated[list[str] | None, typer.Option(help="Data set; may be repeated. See `vprop data list`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data files.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method, e.g. vprop-2; may be repeated. For logreg, mlp and long.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per method; long has one.")] = None,
    gradients: Annotated[
        int | None, typer.Option(help="Gradients of a batch that every run may evaluate; full batches: passes.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0 for one per core.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Shipped data and short runs, for a look.")] = False,
) -> None:
    """The paper's experiments, as a report with figures and a table of its claims."""
    from rich.console import Console

    from vprop.lab.data import DataError
    from vprop.lab.experiments.pool import Interrupted
    from vprop.lab.experiments.reproduce import EXPERIMENTS, Request, UsageError
    from vprop.lab.experiments.reproduce import report as draw
    from vprop.lab.experiments.reproduce import reproduce as run
    from vprop.lab.report import ReportError

    console = Console()
    request = Request(
        out=out,
        data=tuple(data or ()),
        data_dir=data_dir,
        methods=tuple(method or ()),
        seeds=seeds,
        gradients=gradients,
        workers=workers,
        short=short,
    )
    try:
        if what is What.REPORT:
            draw(out, console)
        else:
            run(tuple(EXPERIMENTS) if what is What.ALL else (what.value,), request, console)
    except (DataError, UsageError, ReportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"Error: Cannot use {error.filename}: {error.strerror}. Choose another folder with --out.", err=True)
        raise typer.Exit(1) from error
    except Interrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        sys.exit(130)

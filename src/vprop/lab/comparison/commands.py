"""The command `vprop compare`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class What(str, Enum):
    """What to compare on."""

    LOGREG = "logreg"
    MLP = "mlp"
    CNN = "cnn"
    NUTS = "nuts"
    TABLE = "table"
    ALL = "all"


def compare(
    what: Annotated[
        What,
        typer.Argument(
            help="logreg, mlp, cnn: train every method on these tasks. nuts: sample the posteriors of logreg, which "
            "its tables are held against (run it first). table: draw the tables again, without training."
        ),
    ] = What.ALL,
    out: Annotated[Path, typer.Option(help="Folder for runs, results and tables.")] = Path("out/methods"),
    page: Annotated[
        Path | None, typer.Option(help="Page whose marked tables are redrawn; without it, OUT/tables.md is written.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data files.")] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0 for one per core.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Shipped data and a few steps, for a look.")] = False,
) -> None:
    """All methods of the library side by side: predictions, variances and costs, as tables."""
    from rich.console import Console

    from vprop.lab.comparison.compare import Request, run
    from vprop.lab.data import DataError
    from vprop.lab.experiments.pool import Interrupted
    from vprop.lab.experiments.reproduce import UsageError

    try:
        run(what.value, Request(out, page, data_dir, workers, short), Console())
    except (DataError, UsageError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"Error: Cannot use {error.filename}: {error.strerror}. Choose another with --out.", err=True)
        raise typer.Exit(1) from error
    except Interrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        sys.exit(130)

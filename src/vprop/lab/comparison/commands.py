"""The command `vprop compare`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vprop.lab.command import DataDirOption, WorkersOption, messages
from vprop.lab.deep.commands import deep

METHODS = "methods"
"""The command that is meant where none is named."""


class _MethodsUnlessNamed(TyperGroup):
    """`vprop compare logreg` is `vprop compare methods logreg`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [METHODS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_MethodsUnlessNamed, help="Methods side by side, on small tasks (the default) or deep networks.")


class Table(str, Enum):
    """What to compare on."""

    LOGREG = "logreg"
    MLP = "mlp"
    CNN = "cnn"
    NUTS = "nuts"
    TABLE = "table"
    ALL = "all"


@app.command(METHODS)
def compare(
    what: Annotated[
        Table,
        typer.Argument(
            help="logreg, mlp, cnn: train every method on these tasks. nuts: sample the posteriors of logreg, which "
            "its tables are held against (run it first). table: draw the tables again, without training."
        ),
    ] = Table.ALL,
    out: Annotated[Path, typer.Option(help="Folder for runs, results and tables.")] = Path("out/methods"),
    page: Annotated[
        Path | None, typer.Option(help="Page whose marked tables are redrawn; without it, OUT/tables.md is written.")
    ] = None,
    data_dir: DataDirOption = None,
    workers: WorkersOption = 0,
    short: Annotated[bool, typer.Option("--short", help="Shipped data and a few steps, for a look.")] = False,
) -> None:
    """All methods of the library side by side: predictions, variances and costs, as tables."""
    from rich.console import Console

    from vprop.lab.comparison.compare import ComparisonRequest, run

    with messages():
        run(what.value, ComparisonRequest(out, data_dir, workers, short, page), Console())


app.command()(deep)

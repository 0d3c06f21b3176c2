"""``vprop data``: which data sets there are, and where they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vprop.lab.command import fail

if TYPE_CHECKING:
    from vprop.lab.data.find import Located

app = typer.Typer(no_args_is_help=True, help="The data sets and where they are.")

DataDir = Annotated[Path | None, typer.Option(help="Folder to look in first, before $VPROP_DATA and the cache.")]


@app.command("list")
def list_(data_dir: DataDir = None) -> None:
    """Show every data set and where it was found. Downloads nothing."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from vprop.lab.data import DATASETS, DataError, DataNotFound, WrongChecksum, fetch

    table = Table()
    for heading in ("name", "rows", "features", "what for"):
        table.add_column(heading)
    table.add_column("where", overflow="fold")  # a path is of no use when it is cut
    errors: list[str] = []
    for spec in DATASETS.values():
        try:
            where = _where(fetch(spec.name, data_dir, download=False))
        except DataNotFound:
            where = "not found"
        except WrongChecksum as error:
            where = f"wrong checksum: {error.path}"
            errors.append(str(error))
        except DataError as error:
            fail(str(error))
        features = "×".join(str(size) for size in spec.shape)
        table.add_row(spec.name, f"{spec.train_rows} + {spec.test_rows}", features, spec.purpose, escape(where))
    Console().print(table)
    if errors:
        fail(*errors)


@app.command("fetch")
def fetch_(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all of them if none is named.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Find data sets, downloading those that are missing into the cache, and say where each is."""
    from vprop.lab.data import DATASETS, DataError, fetch, spec

    errors: list[str] = []
    try:
        specs = [spec(name) for name in dict.fromkeys(names or DATASETS)]
    except DataError as error:
        fail(str(error))
    for entry in specs:
        try:
            located = fetch(
                entry.name, data_dir, on_download=lambda file: typer.echo(f"Downloading {file.url}", err=True)
            )
            typer.echo(f"{entry.name}: {_where(located)}")
        except DataError as error:
            if str(error) not in errors:  # a wrong --data-dir is wrong for every data set
                errors.append(str(error))
    if errors:
        fail(*errors)


def _where(located: Located) -> str:
    if not located.paths:
        return "ships with scikit-learn"
    folders = dict.fromkeys(str(path.parent) for path in located.paths)
    return f"{', '.join(folders)} ({located.source})"

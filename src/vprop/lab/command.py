"""What commands share: options, and how they tell what went wrong, in a line and an exit status, without a traceback.

Every command that can fail for a reason of the user's runs inside of ``messages``: status 1 is an error, 130 an
interrupt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vprop.lab.errors import Interrupted, LabError

DataDirOption = Annotated[Path | None, typer.Option(help="Folder with the data files.")]
WorkersOption = Annotated[int, typer.Option(help="Processes; 0 for one per core.")]


def fail(*texts: str) -> NoReturn:
    """Show errors, a line for each, and end."""
    for text in texts:
        typer.echo(f"Error: {text}", err=True)
    raise typer.Exit(1)


@contextmanager
def messages(remedy: str = " Choose another place with --out.") -> Iterator[None]:
    """Turn what goes wrong inside into messages; ``remedy`` is for a file or folder that cannot be used."""
    try:
        yield
    except LabError as error:
        fail(str(error))
    except OSError as error:
        if error.filename is None:  # no file is to blame: there is no memory left, or no handle
            fail(f"The system refused: {error.strerror or error}.")
        fail(f"Cannot use {error.filename}: {error.strerror}.{remedy}")
    except Interrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        sys.exit(130)

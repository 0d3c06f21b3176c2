"""The ``vprop`` command."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

import vprop
from vprop.lab.bench import commands as bench_commands
from vprop.lab.comparison import commands as comparison_commands
from vprop.lab.data import commands as data_commands
from vprop.lab.experiments.commands import reproduce

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.add_typer(data_commands.app, name="data")
app.add_typer(bench_commands.app, name="bench")
app.command()(reproduce)
app.add_typer(comparison_commands.app, name="compare")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vprop {vprop.__version__}")
        raise typer.Exit


@app.callback()
def _describe(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and end.")
    ] = False,
) -> None:
    """PyTorch optimizers that perform Gaussian variational inference."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plots and demo.json.")] = Path("out"),
    short: Annotated[bool, typer.Option("--short", help="A few steps only, to see that it runs.")] = False,
) -> None:
    """What a posterior adds: a regression with error bars, and a digit classifier that knows what it does not know."""
    from vprop.lab.demo import run

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write to {out}: {error.strerror}. Choose another folder with --out."
        ) from error
    run(out, short=short)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(vprop.__version__)


def main() -> None:
    """Entry point."""
    if isinstance(sys.stdout, TextIOWrapper):  # a question mark where the encoding has no sign, rather than an end
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)

"""Where the ``vprop`` command starts. What can be said without the packages of the ``lab`` extra is said here."""

from __future__ import annotations

import sys

from vprop._version import __version__


def main() -> None:
    """Run the command line, or say what it needs."""
    if sys.argv[1:] == ["--version"]:  # what a bug report begins with must work in every installation
        print(f"vprop {__version__}")
        return
    try:
        from vprop.lab.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "vprop":
            raise
        sys.exit(
            f"The vprop command needs {error.name}, which is not installed. The lab extra has all that it needs: "
            'pip install "vprop[lab]" (in a clone of the repository: pip install ".[lab]"). The library itself works '
            "without it: import vprop."
        )
    run()

"""`python -m vprop.lab.bench`: the command `vprop bench` alone, where the other commands' libraries are missing."""

from __future__ import annotations

import sys

try:
    from vprop.lab.bench.commands import app
except ModuleNotFoundError as error:
    sys.exit(f"The benchmark needs {error.name}: pip install torch typer rich")

if __name__ == "__main__":
    app(prog_name="python -m vprop.lab.bench")

"""What every command that runs experiments is asked: where to write, where the data are, how many processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vprop.lab.engine.pool import Pool
from vprop.lab.engine.store import Store, require_writable
from vprop.lab.errors import UsageError


@dataclass
class Request:
    """What the user asked for."""

    out: Path
    data_dir: Path | None = None
    workers: int = 0
    short: bool = False
    """Shipped data, shorter runs: to see what it is like."""

    @property
    def results(self) -> Path:
        """Where results are written to, and what is shown is drawn from."""
        return self.out / "results"

    def pool(self, console: Console) -> Pool:
        """Workers that keep their runs in the folder of the request."""
        return Pool(Store(self.out / "runs"), console, self.workers)

    def check(self) -> None:
        """Refuse what cannot work before anything is run."""
        if self.workers < 0:
            raise UsageError(f"Invalid --workers {self.workers}: must be at least 0. 0 is one process per core.")
        require_writable(self.out / "runs", self.out)

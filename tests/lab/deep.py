"""Where tests of `vprop compare deep` have their runs."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from vprop.lab.deep.pool import TimedPool
from vprop.lab.deep.protocol import Bench
from vprop.lab.deep.tasks import SHORT
from vprop.lab.deep.workloads import How
from vprop.lab.engine.store import Store

IMAGES = SHORT[0]


def bench(out):
    return Bench(How(out))


def pool(folder, workers=1, stop_at=None):
    return TimedPool(Store(folder), Console(file=StringIO(), width=200), workers, stop_at)

"""A bar for predictions that take long, where there is a terminal to draw it in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

DELAY = 2.0
"""Seconds before a bar that nobody asked for is shown."""


@contextmanager
def bar(total: int | None, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives what is to be called with the number of forwards that were made.

    ``wanted`` is ``None`` for a bar in terminals alone, once the work has taken two seconds. It is drawn by tqdm, or
    by rich; without both there is none.
    """
    if wanted is None and not sys.stderr.isatty():
        wanted = False
    if wanted is not False and find_spec("tqdm") is not None:
        tqdm: Any = import_module("tqdm").tqdm
        with tqdm(total=total, desc="predict", unit="forward", delay=0 if wanted else DELAY, leave=False) as drawn:
            yield drawn.update
    elif wanted is not False and find_spec("rich") is not None:
        rich: Any = import_module("rich.progress")
        console = import_module("rich.console").Console(stderr=True)
        with rich.Progress(console=console, transient=True) as drawn:
            task = drawn.add_task("predict", total=total)
            yield lambda forwards: drawn.update(task, advance=forwards)
    else:
        yield lambda forwards: None

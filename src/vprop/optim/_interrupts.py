"""Work that Ctrl-C must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let an interrupt come through at the end of the block, so that what was done and what is noted of it agree.

    Only the main thread is ever interrupted, and only it may say so.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pending: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: pending.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending:
        before(*pending[0])

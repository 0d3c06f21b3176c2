"""Ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2)`` and ``ranks(4)``: started when first asked for, and kept."""
    started: dict[int, Ranks] = {}

    def of(count: int) -> Ranks:
        return started.setdefault(count, Ranks(count))

    yield of
    for pool in started.values():
        pool.stop()

"""A job: a piece of work that is done once, in a worker process, and whose result is kept.

Its fields are everything that decides the outcome; with the code behind it they make the key that its result is stored
under. A new kind of work is a frozen dataclass with a ``compute``.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from vprop.lab.engine import sources
from vprop.lab.engine.store import key_of
from vprop.lab.environment import environment


@dataclass(frozen=True)
class Job(ABC):
    """Everything that decides an outcome, and where the data are, which does not."""

    data_dir: Path | None = field(default=None, kw_only=True)
    uses_library: ClassVar[bool] = True
    """Whether the outcome depends on the library as a whole."""

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """The outcome, as JSON can hold it."""

    @property
    def effort(self) -> float:
        """A guess of the time it takes, in arbitrary units."""
        return 1.0

    @property
    def identity(self) -> dict[str, Any]:
        """The fields, as JSON can hold them."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "data_dir"}
        plain = json.loads(json.dumps(values, default=_plain))
        return {"job": type(self).__name__} | plain

    def code(self) -> tuple[ModuleType, ...]:
        """The modules that compute it, beside the library."""
        return sources.behind(type(self).__module__)

    @property
    def key(self) -> str:
        """A name for the outcome."""
        return key_of(self.identity, *self.code(), library=self.uses_library)

    def execute(self) -> dict[str, Any]:
        """The outcome, with what it was the outcome of, where, and how long it took; in one thread."""
        torch.set_num_threads(1)
        started = time.perf_counter()
        outcome = self.compute()
        seconds = time.perf_counter() - started
        return {"job": self.identity, "environment": environment()} | outcome | {"seconds": seconds}


def _plain(value: Any) -> Any:
    """What JSON does not know: things with an identity of their own, records, and classes, by name."""
    if hasattr(value, "identity"):
        return value.identity
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

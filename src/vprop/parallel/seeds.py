"""Ranks that average their gradients but draw different noise: found without a word between them that could hang.

A collective operation would wait for ever for a rank that makes no step (one that trains another model, say). The
key-value store that every process group has does not wait: each rank leaves a note of its seed when it draws its first
sample, and reads the others' notes when it makes its first step. By then a backward has gone through, in which all
ranks that average gradients have met, so their notes are there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vprop.parallel.ranks import rank_and_count
from vprop.parallel.sharding import is_sharded, local_grad, to_local

PATIENCE = 10.0
"""Seconds to wait for the second note of a rank whose first one is suspicious."""
LOOKED_AT = 64
"""Elements of each tensor that go into a note."""


@dataclass
class SeedCheck:
    """One look per optimizer at whether the ranks' seeds agree."""

    _name: str = ""
    """Of the weights, and of which of the optimizers that hold such; empty before the first note."""
    _seeds: str = ""
    _done: bool = False

    @torch.compiler.disable
    def leave_note(self, groups: Sequence[dict[str, Any]]) -> None:
        """Say with which seeds samples of which weights are drawn here. Before the first sample."""
        groups = _with_shared_noise(groups)
        if not groups or self._done or self._name or rank_and_count()[1] == 1:
            return
        params = [p for group in groups for p in group["params"]]
        weights = _digest([to_local(p) for p in params if not is_sharded(p)], [_layout(p) for p in params])
        self._seeds = ",".join(str(group["seed"]) for group in groups)
        rank, store = rank_and_count()[0], _store()
        if store is None:
            self._done = True
            return
        # Several optimizers may hold alike weights: the first of each rank is compared with the first of the others.
        number = store.add(f"vprop/{weights}/{rank}", 1)
        self._name = f"vprop/{weights}/{number}"
        self._count(store, "noted")

    @torch.compiler.disable
    def compare(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise if another rank draws other samples of the same weights and averages gradients with this one.

        Ranks are counted, all of them and those with our seeds: everybody sees a difference, with two messages each.
        """
        if self._done or not self._name:
            return
        self._done, store = True, _store()
        params = [p for group in _with_shared_noise(groups) for p in group["params"]]
        if any(is_sharded(p) for p in params):
            differ = self._differ(store, "noted")
        else:
            grads = [grad for p in params if (grad := local_grad(p)) is not None]
            # Equal gradients at different samples can only be an average. Said in any case: others may wait for it.
            same_gradients = f"gradients/{_digest(grads, [])}"
            self._count(store, same_gradients)
            self._count(store, "stepped")  # last: who sees it finds the other count complete
            differ = self._differ(store, "noted") and self._all_have_stepped(store)
            differ = differ and self._differ(store, same_gradients)
        if differ:
            raise RuntimeError(
                f"Ranks train the same weights with different seeds (rank {rank_and_count()[0]} with "
                f"{self._seeds}): they draw different samples, and the average of their gradients belongs to "
                'none of them. Pass the same seed on all ranks; for other samples on every rank pass noise="per_rank".'
            )

    def _count(self, store: Any, what: str, by: int = 1) -> tuple[int, int]:
        """Count this rank (``by=0``: only look): among all that did so, and among those with the same seeds."""
        name = f"{self._name}/{what}"
        return store.add(name, by), store.add(f"{name}/{self._seeds}", by)

    def _differ(self, store: Any, what: str) -> bool:
        everybody, alike = self._count(store, what, by=0)
        return everybody != alike

    def _all_have_stepped(self, store: Any) -> bool:
        until = time.monotonic() + PATIENCE
        while self._count(store, "stepped", by=0)[0] < self._count(store, "noted", by=0)[0]:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True


def _with_shared_noise(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group.get("noise", "shared") == "shared"]


def _store() -> Any:
    """The key-value store of the default process group; ``None`` if there is none that can be asked."""
    store = dist.distributed_c10d._get_default_store()
    try:
        store.add("vprop", 0)
    except (AttributeError, RuntimeError):  # no store (MPI), or one that does not work (torch's fake process group)
        return None
    return store


def _layout(p: Tensor) -> str:
    if not is_sharded(p):
        return f"{tuple(p.shape)}"
    return f"{tuple(p.shape)} {p.device_mesh.mesh.tolist()} {p.placements}"  # type: ignore[attr-defined]


def _digest(tensors: Sequence[Tensor], words: Sequence[str]) -> str:
    """A short name of what is in the tensors."""
    digest = hashlib.sha256("|".join(words).encode())
    for tensor in tensors:
        values = tensor.detach().flatten()[:LOOKED_AT].to("cpu", torch.float64)
        digest.update(repr(values.tolist()).encode())
    return digest.hexdigest()[:32]

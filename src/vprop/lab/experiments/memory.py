"""How many bytes an optimizer keeps per weight, weights included: counted on the living tensors, not on paper."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vprop import CVI, VOGN, Objective, Vprop
from vprop.baselines import BBVI
from vprop.lab.environment import environment

WEIGHTS = 1_000_000

Build = Callable[[list[Tensor]], torch.optim.Optimizer]


def _entries() -> list[tuple[str, str, str, Build]]:
    """(label, group, what is kept, constructor)"""
    n: dict[str, Any] = {"num_data": 1000}
    rows: list[tuple[str, str, str, Build]] = [
        ("RMSprop", "paper", "weights, mean square", lambda p: torch.optim.RMSprop(p)),
        ("Vprop", "paper", "mean, curvature", lambda p: Vprop(p, **n)),
        ("BBVI", "paper", "mean, σ", lambda p: BBVI(p, **n)),
        ("BBVI with RMSprop", "paper", "mean, σ, two mean squares", lambda p: BBVI(p, method="rmsprop", **n)),
        ("BBVI with Adam", "paper", "mean, σ, two means and two mean squares", lambda p: BBVI(p, method="adam", **n)),
        ("Adam", "extra", "weights, mean, mean square", lambda p: torch.optim.Adam(p)),
        ("Vprop with momentum", "extra", "mean, curvature, momentum", lambda p: Vprop(p, betas=(0.9, 0.999), **n)),
        ("VOGN", "extra", "mean, curvature", lambda p: VOGN(p, chunk_size=1, **n)),
        ("CVI", "extra", "mean, curvature", lambda p: CVI(p, **n)),
    ]
    if importlib.util.find_spec("ivon") is not None:
        import ivon  # type: ignore[import-not-found, import-untyped, unused-ignore]

        rows.append(("ivon-opt", "extra", "as its package keeps it", lambda p: ivon.IVON(p, lr=0.1, ess=1000)))
    return rows


def memory(weights: int = WEIGHTS) -> dict[str, Any]:
    """Bytes per weight of every optimizer after a step."""
    rows = []
    for label, group, kept, build in _entries():
        size = round(bytes_per_weight(build, weights), 2)  # a step count is a few bytes in all
        rows.append({"label": label, "group": group, "tensors": kept, "bytes_per_parameter": size})
    return {
        "experiment": "memory",
        "title": "Memory",
        "description": (
            f"Bytes per weight that stay allocated between two steps, for {weights:,} float32 weights: the weights or "
            "the mean, the other variational parameters, and the optimizer's averages; gradients are not counted. "
            "Counted over all living tensors after a step."
        ),
        "environment": environment(),
        "settings": {"weights": weights},
        "notes": [] if any(row["label"] == "ivon-opt" for row in rows) else ["The peer ivon-opt is not installed."],
        "rows": rows,
    }


def bytes_per_weight(build: Build, weights: int = WEIGHTS) -> float:
    """What is alive after a step and was not before, per weight."""
    gc.collect()
    before = _living_storages()
    # A matrix that the loss meets through one linear layer, so that per-example gradients and Hessians are cheap.
    model = nn.Linear(weights, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = build(list(model.parameters()))
    x, y = torch.full((1, weights), 1e-3), torch.ones(1, 1)
    _step(optimizer, model, x, y)
    model.weight.grad = None
    del x, y
    gc.collect()
    grown = {address: size for address, size in _living_storages().items() if address not in before}
    return sum(grown.values()) / weights


def _step(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    if hasattr(optimizer, "sampled_params") and not hasattr(optimizer, "posterior"):  # a peer with its own context
        with optimizer.sampled_params(train=True):
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    else:
        optimizer.step(Objective(model, nn.functional.mse_loss, x, y))  # type: ignore[arg-type]


def _living_storages() -> dict[int, int]:
    """Bytes of every storage that some tensor holds, by address."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # asking the thing itself would wake up lazy modules
            # Sparse tensors have no storage of their own, those of a compiler's trace no address.
            with suppress(RuntimeError, NotImplementedError):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return storages

"""A training that had to stop, on disk: the next one goes on where it stopped, as if nothing had been."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vprop.files import replacing
from vprop.lab.deep.snapshots import Snapshots
from vprop.lab.deep.swag import SWAG


@dataclass(eq=False)
class Unfinished:
    """Everything that a training is made of at the end of an epoch."""

    path: Path
    model: nn.Module
    optimizer: Optimizer
    generator: torch.Generator
    """Of the order of the data."""
    snapshots: Snapshots
    swag: SWAG | None = None

    def save(self, steps: int) -> None:
        """After so many steps."""
        state: dict[str, Any] = {
            "steps": steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "masks": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if self._on_gpu else [])],
            "snapshots": self.snapshots.state_dict(),
            "swag": None if self.swag is None else self.swag.state_dict(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as part:
            torch.save(state, part)

    def load(self) -> int:
        """Put everything back; how many steps were made. 0 if there is nothing to go on from."""
        if not self.path.is_file():
            return 0
        device = next(self.model.parameters()).device
        state = torch.load(self.path, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        on_cpu, *on_gpus = (mask.cpu() for mask in state["masks"])
        torch.set_rng_state(on_cpu)
        if self._on_gpu:
            torch.cuda.set_rng_state_all(on_gpus)
        if "snapshots" in state:  # files of before there were cycles have none
            self.snapshots.load_state_dict(state["snapshots"])
        if self.swag is not None:
            self.swag.load_state_dict(state["swag"])
        return state["steps"]

    def forget(self) -> None:
        """The training is finished."""
        self.path.unlink(missing_ok=True)

    @property
    def _on_gpu(self) -> bool:
        return next(self.model.parameters()).is_cuda

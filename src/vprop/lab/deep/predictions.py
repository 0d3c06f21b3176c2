"""Predictions under many draws of the weights, in one pass: nothing but sums is kept of the single draws.

A draw is made once and used for all batches, so that a draw costs a forward and little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vprop.files import replacing

Forward = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Averaged:
    """Mean probabilities of one set of inputs, over so many draws, flat: (examples or characters, classes)."""

    probs: Tensor
    expected_entropy: Tensor
    """The mean over draws of the entropy: what is not due to the weights."""
    draws: int
    nll_by_draws: dict[int, float] = field(default_factory=dict)
    """The log-loss of the mean over the first 1, 2, 4, … draws, where labels were given."""


class _Sums:
    """Of one set's probabilities over draws."""

    def __init__(self) -> None:
        self.probs: Tensor | float = 0.0
        self.entropy: Tensor | float = 0.0
        self.count = 0
        self.losses: dict[int, float] = {}

    def add(self, probs: Tensor, labels: Tensor | None) -> None:
        """float64: sums of 64 must not round what is left of a probability near 0."""
        self.count += 1
        self.probs = self.probs + probs
        self.entropy = self.entropy + torch.special.entr(probs).sum(-1)
        if self.count & (self.count - 1) == 0:
            self._note_loss(labels)

    def _note_loss(self, labels: Tensor | None) -> None:
        if labels is not None:
            assert isinstance(self.probs, Tensor)
            self.losses[self.count] = log_loss(self.probs / self.count, labels)

    def averaged(self, labels: Tensor | None) -> Averaged:
        """The means."""
        if self.count not in self.losses:
            self._note_loss(labels)
        assert isinstance(self.probs, Tensor)
        assert isinstance(self.entropy, Tensor)
        return Averaged(self.probs / self.count, self.entropy / self.count, self.count, self.losses)


def averaged(
    draws: Iterable[Forward],
    sets: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    rows: int,
    autocast: torch.dtype | None = None,
) -> dict[str, Averaged]:
    """Over all ``draws``; forwards are of ``rows`` inputs each."""
    return averaged_by_kind((("", forward) for forward in draws), sets, labels, rows, autocast).get("", {})


@torch.no_grad()
def averaged_by_kind(
    draws: Iterable[tuple[str, Forward]],
    sets: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    rows: int,
    autocast: torch.dtype | None = None,
) -> dict[str, dict[str, Averaged]]:
    """Over all draws of each kind, by kind and set."""
    sums: dict[str, dict[str, _Sums]] = {}
    for kind, forward in draws:
        own = sums.setdefault(kind, {name: _Sums() for name in sets})
        for name, x in sets.items():
            own[name].add(probabilities(forward, x, rows, autocast), labels.get(name))
    return {
        kind: {name: one.averaged(labels.get(name)) for name, one in by_set.items()} for kind, by_set in sums.items()
    }


def probabilities(forward: Forward, x: Tensor, rows: int, autocast: torch.dtype | None = None) -> Tensor:
    """In float64, with all dimensions but the last one flattened."""
    parts = []
    for part in x.split(rows):
        with torch.autocast(x.device.type, autocast or torch.float16, enabled=autocast is not None):
            logits = forward(part)
        parts.append(logits.double().softmax(-1).flatten(0, -2))
    return torch.cat(parts)


def log_loss(probs: Tensor, labels: Tensor) -> float:
    """The mean of −log p of the labels."""
    return float(-of_labels(probs, labels).log().mean())


def of_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """The probability of each label."""
    return probs.gather(-1, labels.flatten()[:, None])[:, 0]


# -- files, for ensembles --------------------------------------------------------------------------------------------

_IN_FILES = {"averaged": "draws"}
"""Kinds of predictions that files call otherwise, as they did before there were more than two."""


def _in_files(kind: str) -> str:
    return _IN_FILES.get(kind, kind)


def holds(path: Path, kind: str) -> bool:
    """Whether a file that was kept has predictions of this kind."""
    with np.load(path) as file:
        return any(key.startswith(f"{_in_files(kind)}.") for key in file.files)


def save_images(path: Path, by_kind: Mapping[str, Mapping[str, Averaged]], y: Tensor) -> None:
    """By kind and set, log-probabilities in 16 bits, exact to 0.0005 of their size, and expected entropies."""
    arrays = {"labels": y.cpu().numpy().astype(np.uint8)}
    for kind, sets in by_kind.items():
        for name, one in sets.items():
            logs = one.probs.clamp_min(1e-30).log()
            arrays[f"{_in_files(kind)}.{name}.logs"] = logs.cpu().numpy().astype(np.float16)
            arrays[f"{_in_files(kind)}.{name}.expected_entropy"] = one.expected_entropy.cpu().numpy().astype(np.float16)
    _write(path, arrays)


def save_text(path: Path, by_kind: Mapping[str, Mapping[str, Averaged]], y: Tensor) -> None:
    """Of a text the log-probability of the characters that came, and of no others: they would be too many."""
    logs = {kind: of_labels(sets["test"].probs, y).log() for kind, sets in by_kind.items()}
    arrays = {f"{_in_files(kind)}.test.true": one.cpu().numpy().astype(np.float32) for kind, one in logs.items()}
    _write(path, arrays)


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:  # a run may be stopped at any time
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load(path: Path, kind: str) -> tuple[dict[str, Averaged], Tensor]:
    """What :func:`save_images` kept of this kind, and the labels."""
    kind = _in_files(kind)
    with np.load(path) as file:
        names = [key.split(".")[1] for key in file.files if key.startswith(f"{kind}.") and key.endswith(".logs")]
        sets = {}
        for name in names:
            logs = torch.from_numpy(file[f"{kind}.{name}.logs"].astype(np.float64))
            entropy = torch.from_numpy(file[f"{kind}.{name}.expected_entropy"].astype(np.float64))
            sets[name] = Averaged(logs.softmax(-1), entropy, 1)
        return sets, torch.from_numpy(file["labels"].astype(np.int64))


def load_text(path: Path, kind: str) -> Tensor:
    """The probabilities that :func:`save_text` kept."""
    with np.load(path) as file:
        return torch.from_numpy(file[f"{_in_files(kind)}.test.true"].astype(np.float64)).exp()

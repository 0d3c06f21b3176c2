"""Whether the loss of a batch is the mean of its examples' losses, which curvature from single examples rests on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.curvature._second_derivatives import detached_copies
from vprop.objective import Objective

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
"""Relative to the mean size of the examples' losses; the second where something is computed in half precision."""


class MeanCheck:
    """Adds up the losses of single examples, with their weights, and compares with the loss of the batch.

    That one is known from the gradient (an objective that was never called is not judged), so nothing is computed
    twice, unless they differ: then the batch's loss is computed anew, because a buffer may have changed since (that of
    ``spectral_norm``). Models that draw random numbers
    (dropout) have another loss each time, and are not judged.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._device = next(objective.model.parameters()).device
        self._random_before = _random_state(self._device)
        self.weight = torch.zeros((), dtype=torch.float32, device=self._device)
        """Σw so far."""
        self._loss, self._size = self.weight, self.weight

    def take_in(self, losses: Tensor, weights: Tensor) -> None:
        """The losses of some of the examples, and their weights in the mean."""
        wide = torch.promote_types(losses.dtype, torch.float32)
        weights = weights.to(wide)
        counted = torch.where(weights > 0, losses.to(wide), 0)  # a loss of 0/0 counts for nothing
        self.weight = self.weight + weights.sum()
        self._loss = self._loss + (weights * counted).sum()
        self._size = self._size + (weights * counted.abs()).sum()

    @torch.compiler.disable  # it reads numbers
    def require_mean(self, weights: dict[str, Tensor]) -> None:
        """Refuse a loss at ``weights`` that is not the mean of the examples' losses."""
        last = self._objective.last_loss
        if last is None or self._objective.batch_size < 2 or _is_capturing(self._device):
            return
        if not _same_state(self._random_before, _random_state(self._device)):
            return
        weight, loss, size = torch.stack([self.weight, self._loss, self._size]).tolist()
        if not (weight > 0 and math.isfinite(loss)):
            return
        mean, scale = loss / weight, size / weight
        if self._close(mean, float(last), scale):
            return
        # With weights that require gradients, because a model may rely on that, as one with hooks on tensors does.
        anew, again = (float(self._objective.loss_at(detached_copies(weights)).detach()) for _ in range(2))
        if self._close(anew, again, scale) and not self._close(mean, anew, scale):
            raise ValueError(
                f"Invalid loss_fn: the loss of a batch is {anew:.6g} where the mean of its examples' losses is "
                f"{mean:.6g}, must be that mean. Curvature from the gradients of single examples (VOGN) needs a loss "
                'with reduction="mean" over examples that do not meet in it; weights of classes and ignored labels are '
                "known in torch's cross_entropy. Use Vprop or IVON for another loss."
            )

    def _close(self, one: float, other: float, scale: float) -> bool:
        """Whether two losses differ by rounding only; what is not finite is nobody's mistake here."""
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in self._objective.model.parameters())
        tolerance = _HALF_TOLERANCE if half or torch.is_autocast_enabled(self._device.type) else _TOLERANCE
        return not math.isfinite(other) or abs(one - other) <= tolerance * scale + 1e-12


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, in which no number can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a model on ``device`` draws from by default."""
    if torch.compiler.is_compiling() or _is_capturing(device):
        return []
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _same_state(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

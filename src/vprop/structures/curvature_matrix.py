"""A matrix over the weights of several parameters, seen as the part that belongs to some of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class CurvatureMatrix:
    """``stored`` over all weights of ``params``, of which the weights of ``chosen``, in their order, are looked at.

    Leaving rows and columns out of a *precision* conditions on those weights: they stand still at their mean.
    """

    def __init__(self, stored: Tensor, params: list[Tensor], chosen: list[Tensor]) -> None:
        self.stored = stored
        self.whole = len(params) == len(chosen) and all(p is q for p, q in zip(params, chosen, strict=True))
        starts, start = {}, 0
        for p in params:
            starts[id(p)] = start
            start += p.numel()
        pieces = [torch.arange(starts[id(p)], starts[id(p)] + p.numel(), device=stored.device) for p in chosen]
        self.rows = torch.cat(pieces)

    @property
    def sub(self) -> Tensor:
        """The matrix over the chosen weights; the stored one itself if those are all."""
        return self.stored if self.whole else self.stored[self.rows[:, None], self.rows]

    def write_(self, new: Tensor, decay: float) -> None:
        """Put a new matrix over the chosen weights in, where ``decay`` was the weight of the old one.

        The blocks between chosen and other weights shrink by √decay, which keeps the whole positive semi-definite.
        """
        if self.whole:
            self.stored.copy_(new)
            return
        scale = torch.ones(len(self.stored), dtype=self.stored.dtype, device=self.stored.device)
        scale[self.rows] = decay**0.5
        self.stored.mul_(scale[:, None]).mul_(scale)
        self.stored[self.rows[:, None], self.rows] = new


@dataclass
class KeptFactor:
    """A Cholesky factor, and of what, so that it is computed once per step."""

    stored: Tensor
    version: int
    rows: Tensor
    damping: float | Tensor
    factor: Tensor

    @staticmethod
    def of(matrix: CurvatureMatrix, damping: float | Tensor, factor: Tensor) -> KeptFactor:
        """Note the state that the matrix is in now."""
        return KeptFactor(matrix.stored, matrix.stored._version, matrix.rows, damping, factor)

    def fits(self, matrix: CurvatureMatrix, damping: float | Tensor) -> bool:
        """Whether the factor is still that of this matrix with this damping."""
        if matrix.stored is not self.stored or matrix.stored._version != self.version:
            return False
        if isinstance(damping, Tensor) != isinstance(self.damping, Tensor):
            return False
        same = torch.equal(damping, self.damping) if isinstance(damping, Tensor) else damping == self.damping  # type: ignore[arg-type]
        return same and torch.equal(matrix.rows, self.rows)

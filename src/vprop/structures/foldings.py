"""What the samples of a step say of matrices in rotated coordinates, for the eigenbasis structure."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.curvature import Evidence, Folded, SampleSpread
from vprop.curvature._base import folded_before
from vprop.kernels.table import Role
from vprop.precision import in_full_precision
from vprop.structures.companies import Batch, Company
from vprop.structures.members import GroupStep
from vprop.structures.rotated import Scratch, curvature_of_one, kernels_take


class Folding:
    """What the samples of a step say of a company, in rotated coordinates.

    Beside what the curvature's estimator folds it averages products of gradients for the bases: of what the estimator
    makes a curvature of, the gradients themselves, half the difference of a pair, or their deviations from the mean.
    """

    def __init__(self, company: Company, missed_samples: int) -> None:
        self.company = company
        self.by_kernels = kernels_take(company)
        self.direct = curvature_of_one(self.step) if self.by_kernels and not missed_samples else None
        """How a kernel makes ĥ of the only gradient, which is then read when the step is made."""
        self.folded: Folded | None = None
        self._products: dict[tuple[int, str], Tensor] = {}
        """By number of a batch and side: the sums of g̃g̃ᵀ (left) and g̃ᵀg̃ (right)."""
        self._partner: Tensor | None = None
        self._sample = missed_samples
        if missed_samples:  # without a gradient, which counts as zero
            nothing = torch.zeros_like(company.hess)
            self.folded = folded_before(self.step.estimator, nothing, missed_samples)
            self._partner = nothing if missed_samples % 2 else None

    @property
    def step(self) -> GroupStep:
        """The group that all are of."""
        return self.company.step

    def fold(self, noise: Tensor | None) -> None:
        """Take in the gradients at the next sample, whose noise the estimator may ask for."""
        self.company.refuse_sparse_gradients()
        if self.direct is not None:
            return
        grad = self.company.into(self.company.gradients())
        shown = self._shown(grad)
        if shown is not None:
            for number, matrices in enumerate(_usable(self.company, shown)):
                for side in self.company.batches[number].averages:
                    self._add_product(number, side, matrices)
        self.folded = self.step.estimator.fold(self.folded, Evidence(grad, None, noise))
        self._sample += 1

    def take_gradient(self, scratch: Scratch) -> None:
        """Rotate the only gradient of a direct step to where a kernel reads it."""
        grad = self.company.into(self.company.gradients(), out=scratch.of(Role.GRAD, self.company))
        self.folded = Folded(grad, grad)

    def _add_product(self, number: int, side: str, shown: Tensor) -> None:
        kept = self._products.get((number, side))
        if kept is None:
            self._products[number, side] = _product(side, shown)
        else:
            kept += _product(side, shown)

    def _shown(self, grad: Tensor) -> Tensor | None:
        """What the sample shows of the curvature; ``None`` if that needs another sample."""
        estimator = self.step.estimator
        if isinstance(estimator, SampleSpread):
            if self.folded is None:
                return None
            count = self.folded.count
            return (grad - self.folded.grad) * math.sqrt(count / (count + 1))
        if not (self.step.antithetic and (estimator.in_pairs or estimator.needs_noise)):
            return grad
        if self._sample % 2 == 0:
            self._partner = grad
            return None
        assert self._partner is not None
        half_difference = (self._partner - grad) / 2
        self._partner = None
        return half_difference

    def fold_into_averages(self, decay: float) -> None:
        """Take the products of this step into the averages that the bases follow.

        A gradient that is not finite, or whose squares are not, counts as none, and so do samples whose squares add up
        to infinity. The scale of an average does not matter to its eigenvectors, so that nothing is divided by what the
        weights of its terms sum up to.
        """
        if self.direct is not None:
            assert self.folded is not None
            for batch, matrices in zip(self.company.batches, _usable(self.company, self.folded.grad), strict=True):
                _average_products(batch, matrices, decay)
            return
        for (number, side), product in self._products.items():
            # Squares that are finite may have a sum that is not; the largest element is on the diagonal.
            finite = product.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] < math.inf
            product = torch.where(finite, product, 0)
            self.company.batches[number].averages[side].lerp_(product, 1 - decay)


def _usable(company: Company, flat: Tensor) -> list[Tensor]:
    """The matrices of each batch: those whose squares are finite as they are, and zero for the others."""
    norms = torch.stack(torch._foreach_norm(list(flat.split(company.lengths))))
    finite, zero = (norms < math.inf)[:, None, None], norms.new_zeros(())
    return [torch.where(finite[batch.members], batch.of(flat), zero) for batch in company.batches]


@in_full_precision
def _product(side: str, x: Tensor) -> Tensor:
    return x @ x.mT if side == "left" else x.mT @ x


@in_full_precision
def _average(average: Tensor, one: Tensor, two: Tensor, decay: float) -> None:
    average.baddbmm_(one, two, beta=decay, alpha=1 - decay)


def _average_products(batch: Batch, shown: Tensor, decay: float) -> None:
    for side, average in batch.averages.items():
        one, two = (shown, shown.mT) if side == "left" else (shown.mT, shown)
        _average(average, one, two, decay)

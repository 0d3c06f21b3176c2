"""What a kernel is asked to do for the parameters of a pack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from vprop import kernels
from vprop.curvature import CurvatureEstimator
from vprop.curvature.centered import AntitheticSpread, SampleSpread
from vprop.curvature.price import Price
from vprop.curvature.squared_gradient import MeanSquare, SquaredGradient
from vprop.kernels.call import Curvature, Step
from vprop.kernels.table import COMPUTE, Role
from vprop.structures.packs import Pack, PackedSample

_DTYPE = attrgetter("dtype")


def curvature_in_kernel(estimator: CurvatureEstimator, samples: int, ess: float) -> tuple[Curvature, float] | None:
    """How a kernel makes ĥ of the gradients themselves, with its factor; ``None`` if the samples must be folded.

    ``ess`` is N/τ, or M, as for :meth:`CurvatureEstimator.hess`. By exact type: a subclass may fold differently.
    """
    kind = type(estimator)
    if samples <= 1 and kind is SquaredGradient:
        return Curvature.SQUARE, ess
    if samples <= 1 and kind is MeanSquare:
        return Curvature.SQUARE, 1.0
    if samples == 1 and kind is Price:
        return Curvature.PRICE, 1.0
    if samples == 2 and kind is AntitheticSpread:
        return Curvature.PAIR, ess
    if samples == 2 and kind is SampleSpread:
        return Curvature.PAIR, 2 * ess  # the sample variance of two is half the squared difference
    return None


@dataclass
class Job:
    """An update of a pack: what goes in beside the pack's own tensors."""

    pack: Pack
    step: Step
    grads: list[Any]
    """Of all parameters of the pack; ``None`` for one that takes no part."""
    others: list[Any]
    """ĥ, or the first gradient of a pair, likewise; or nothing."""
    sample: PackedSample | None = None
    """The sample that is in the weights, and that the kernel takes out."""

    def run(self, unusable: Tensor, keep: Callable[[Any], None]) -> None:
        """Count the step and launch the kernel. ``keep`` gets what a CUDA graph in capture will read."""
        pack, table = self.pack, self.pack.table
        missing = list(map(is_, self.grads, repeat(None)))
        present, took_part = self.grads, None
        if any(missing):
            present = [grad for grad in self.grads if grad is not None]
            took_part = [not out for out in missing]
        captured = pack.is_captured()
        if captured:
            keep(table)
            table = table.for_capture()
            keep(table)
        grads, dtype = _of_one_kind(self.grads, present, table.dtypes[Role.WEIGHT])
        held = [pack.in_layout(grads, present)]  # copies must live until the kernel is launched
        hosts = [table.point(Role.GRAD, _addresses(held[0], missing), dtype)]
        if self.others:
            present = [t for t, out in zip(self.others, missing, strict=True) if not out]
            held.append(pack.in_layout(self.others, present))
            hosts.append(table.point(Role.OTHER, _addresses(held[1], missing)))
        table.unusable = unusable
        if not math.isinf(self.step.clip_radius):
            table.clipped.zero_()
        before = None if captured else (pack.probe.clone(), pack.counts.clone())
        try:
            hosts.append(pack.count_step(took_part))
            if captured:
                keep(hosts)
            pack.look_at_counts()
            table.first_step = pack.table.first_step
            pack.backend.step(table, self.step)
            if self.sample is not None:
                self.sample.done = False
        except BaseException:
            if before is None:
                pack.count_step(took_part, by=-1)
            elif torch.equal(before[0], pack.probe):
                # Nothing was done, so the sample that is still in the weights must be found again, by its step.
                pack.counts.copy_(before[1])
                pack.look_at_counts()
            elif self.sample is not None:  # an interrupt came through when the kernel had done its work
                self.sample.done = False
            raise
        pack.weights_changed()


def _addresses(tensors: list[Any], missing: list[bool]) -> list[int]:
    if any(missing):
        return [0 if out else tensor.data_ptr() for tensor, out in zip(tensors, missing, strict=True)]
    return list(map(Tensor.data_ptr, tensors))


def _of_one_kind(tensors: list[Any], present: list[Tensor], usual: torch.dtype) -> tuple[list[Any], torch.dtype]:
    """The gradients with their dtype: as they are if a kernel can read them, else in that of the arithmetic."""
    if not present:
        return tensors, usual
    dtypes = set(map(_DTYPE, present))
    if len(dtypes) == 1 and dtypes <= set(kernels.DTYPES) and not any(map(Tensor.is_neg, present)):
        return tensors, dtypes.pop()
    return [None if t is None else t.resolve_neg().to(COMPUTE) for t in tensors], COMPUTE

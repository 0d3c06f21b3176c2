"""Samples and steps on tables of tensors, one pass over memory for each kernel; the formulas are ``triton_update.py``'s.

A program handles a part of a tile, which lies in one row of the table. Tensors are read and written in the dtype that
the table says, and computed with in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vprop.kernels.call import Curvature, Rule
from vprop.kernels.table import TILE, Column, Role
from vprop.kernels.triton_noise import normals
from vprop.kernels.triton_update import (
    averaged_hess,
    clip,
    direction_of,
    estimated,
    over_weight_so_far,
    plus,
    precision_of,
    reconciled,
    usable_elements,
    weight_of_all,
)

_TILE = tl.constexpr(TILE)
_WEIGHT = tl.constexpr(int(Role.WEIGHT))
_HESS = tl.constexpr(int(Role.HESS))
_MOMENTUM = tl.constexpr(int(Role.MOMENTUM))
_MEAN = tl.constexpr(int(Role.MEAN))
_PRIOR_MEAN = tl.constexpr(int(Role.PRIOR_MEAN))
_PRIOR_PRECISION = tl.constexpr(int(Role.PRIOR_PRECISION))
_GRAD = tl.constexpr(int(Role.GRAD))
_OTHER = tl.constexpr(int(Role.OTHER))
_ROLES = tl.constexpr(len(Role))
_SIZE = tl.constexpr(int(Column.SIZE))
_PARAMETER = tl.constexpr(int(Column.PARAMETER))
_FIRST_BLOCK = tl.constexpr(int(Column.FIRST_BLOCK))
_FIRST_TILE = tl.constexpr(int(Column.FIRST_TILE))
_PRICE = tl.constexpr(int(Curvature.PRICE))
_PAIR = tl.constexpr(int(Curvature.PAIR))
_VADAM = tl.constexpr(int(Rule.VADAM))


@triton.jit
def _offsets(geometry, row, role, element, DIMS: tl.constexpr, INDEX: tl.constexpr):
    """Where the elements numbered ``element`` are from the start of a strided tensor.

    INDEX is the type to divide in: a division of 64 bits takes ten times as long.
    """
    rest, offset = element.to(INDEX), tl.zeros_like(element)
    sizes = geometry + row * ((1 + _ROLES) * DIMS)
    strides = sizes + (1 + role) * DIMS
    for i in tl.static_range(DIMS):
        stride = tl.load(strides + (DIMS - 1 - i))
        if i == DIMS - 1:
            offset += rest.to(tl.int64) * stride
        else:
            size = tl.load(sizes + (DIMS - 1 - i)).to(INDEX)
            offset += (rest % size).to(tl.int64) * stride
            rest = rest // size
    return offset


@triton.jit
def _pointers(
    columns, geometry, rows, row, role, dtype: tl.constexpr, element, place,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Pointers to elements of the tensor of a role; ``place`` is where they are if all tensors are laid out alike."""
    base = tl.load(columns + role * rows + row).to(tl.pointer_type(dtype))
    if ALIGNED and DIMS == 0:
        base = tl.multiple_of(base, 16)
    if ALIKE:
        offset = place
    else:
        offset = _offsets(geometry, row, role, element, DIMS, INDEX)
    return base + offset


@triton.jit
def _place(geometry, row, element, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr):
    """Where the elements are in each tensor of the row, if all are laid out alike."""
    if ALIKE and DIMS > 0:
        place = _offsets(geometry, row, _WEIGHT, element, DIMS, INDEX)
    else:
        place = element
    return place


@triton.jit
def _read(pointers, mask, MASKED: tl.constexpr):
    """Values as float32, whatever they are kept in. Without a mask loads can be wide, so only the last part of a tensor has one."""
    values = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    return values.to(tl.float32)


@triton.jit
def _values(
    columns, geometry, rows, row, role, dtype: tl.constexpr, element, place, mask,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Elements of a tensor that is only read."""
    pointers = _pointers(columns, geometry, rows, row, role, dtype, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    return _read(pointers, mask, MASKED)


@triton.jit
def _write(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty))


@triton.jit
def _part_of(columns, tile_rows, rows, BLOCK: tl.constexpr):
    """Where a program works: the row of the table, its first element there, and how many elements the row has."""
    part = tl.program_id(0)
    tile = part // (_TILE // BLOCK)
    row = tl.load(tile_rows + tile).to(tl.int64)
    size = tl.load(columns + _SIZE * rows + row)
    tile_in_row = tile - tl.load(columns + _FIRST_TILE * rows + row)
    return row, tile_in_row * _TILE + (part % (_TILE // BLOCK)) * BLOCK, size


@triton.jit(do_not_specialize=["rows", "first_step", "source", "sign", "key0", "key1", "ess", "damping"])
def perturb_kernel(
    columns, tile_rows, geometry, steps, floors, rows, first_step, key0, key1, source, sign, ess, damping,
    RESTORE: tl.constexpr, DTYPE: tl.constexpr, HESS_DTYPE: tl.constexpr, MEAN_DTYPE: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a sample into the weights, or take it out again."""
    row, start, size = _part_of(columns, tile_rows, rows, BLOCK)
    step = first_step + tl.load(steps + row)
    parameter = tl.load(columns + _PARAMETER * rows + row)
    floor = tl.load(floors + row)
    if start + BLOCK <= size:
        _perturb(
            columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
            RESTORE, DTYPE, HESS_DTYPE, MEAN_DTYPE, HAS_MEAN, HAS_PRIOR_PRECISION,
            ALIGNED, DIMS, ALIKE, INDEX, BLOCK, False,
        )  # fmt: skip
    elif start < size:
        _perturb(
            columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
            RESTORE, DTYPE, HESS_DTYPE, MEAN_DTYPE, HAS_MEAN, HAS_PRIOR_PRECISION,
            ALIGNED, DIMS, ALIKE, INDEX, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _perturb(
    columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
    RESTORE: tl.constexpr, DTYPE: tl.constexpr, HESS_DTYPE: tl.constexpr, MEAN_DTYPE: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr, ALIGNED: tl.constexpr, DIMS: tl.constexpr,
    ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    element = start + tl.arange(0, BLOCK)
    mask = element < size
    place = _place(geometry, row, element, DIMS, ALIKE, INDEX)
    weights = _pointers(columns, geometry, rows, row, _WEIGHT, DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    if HAS_MEAN:
        means = _pointers(columns, geometry, rows, row, _MEAN, MEAN_DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
        mean = _read(means, mask, MASKED)
        if not RESTORE:
            mean = reconciled(mean, _read(weights, mask, MASKED), DTYPE)
            _write(means, mean, mask, MASKED)
    else:
        mean = _read(weights, mask, MASKED)
    if RESTORE and HAS_MEAN:
        _write(weights, mean, mask, MASKED)
    else:
        hess = _values(
            columns, geometry, rows, row, _HESS, HESS_DTYPE, element, place, mask, ALIGNED, DIMS, ALIKE, INDEX, MASKED
        )
        if HAS_PRIOR_PRECISION:
            damping = _values(
                columns, geometry, rows, row, _PRIOR_PRECISION, tl.float32, element, place, mask,
                ALIGNED, DIMS, ALIKE, INDEX, MASKED,
            ) / ess  # fmt: skip
        block = tl.load(columns + _FIRST_BLOCK * rows + row) + start // 4
        noise = normals(block, parameter, step, source, key0, key1, BLOCK // 4)
        offset = noise * tl.rsqrt(precision_of(hess, ess, damping, floor))
        if RESTORE:
            sign = -sign
        _write(weights, plus(mean, sign, offset), mask, MASKED)


@triton.jit(
    do_not_specialize=[
        "rows", "first_step", "source", "sign", "key0", "key1", "ess", "damping", "scale", "lr",
        "weight1", "weight2", "log_beta1", "log_beta2", "clip_radius", "grad_sign", "start_weight",
        "inverse_gradient_scale",
    ]
)  # fmt: skip
def step_kernel(
    columns, tile_rows, geometry, steps, floors, unusable, clipped,
    rows, first_step, key0, key1, source, sign, ess, damping, scale, lr,
    weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
    SAMPLED: tl.constexpr, CURVATURE: tl.constexpr, RULE: tl.constexpr,
    CLIPS: tl.constexpr, FORGETS: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
    DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, HESS_DTYPE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr,
    MEAN_DTYPE: tl.constexpr, STAND_IN: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    HAS_PRIOR_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step: the sample out, mean and curvature updated."""
    row, start, size = _part_of(columns, tile_rows, rows, BLOCK)
    if LR_ON_DEVICE:
        lr = tl.load(lr).to(tl.float32)
    if start + BLOCK <= size:
        _step(
            columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
            first_step, key0, key1, source, sign, ess, damping, scale, lr,
            weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
            SAMPLED, CURVATURE, RULE, CLIPS, FORGETS, DTYPE, GRAD_DTYPE, HESS_DTYPE, MOMENTUM_DTYPE, MEAN_DTYPE,
            STAND_IN, HAS_MEAN, HAS_MOMENTUM, HAS_PRIOR_MEAN, HAS_PRIOR_PRECISION,
            ALIGNED, DIMS, ALIKE, INDEX, BLOCK, False,
        )  # fmt: skip
    elif start < size:
        _step(
            columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
            first_step, key0, key1, source, sign, ess, damping, scale, lr,
            weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
            SAMPLED, CURVATURE, RULE, CLIPS, FORGETS, DTYPE, GRAD_DTYPE, HESS_DTYPE, MOMENTUM_DTYPE, MEAN_DTYPE,
            STAND_IN, HAS_MEAN, HAS_MOMENTUM, HAS_PRIOR_MEAN, HAS_PRIOR_PRECISION,
            ALIGNED, DIMS, ALIKE, INDEX, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _step(
    columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
    first_step, key0, key1, source, sign, ess, damping, scale, lr,
    weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
    SAMPLED: tl.constexpr, CURVATURE: tl.constexpr, RULE: tl.constexpr, CLIPS: tl.constexpr, FORGETS: tl.constexpr,
    DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, HESS_DTYPE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr,
    MEAN_DTYPE: tl.constexpr, STAND_IN: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    HAS_PRIOR_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr, ALIGNED: tl.constexpr, DIMS: tl.constexpr,
    ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    element = start + tl.arange(0, BLOCK)
    mask = element < size
    place = _place(geometry, row, element, DIMS, ALIKE, INDEX)
    count = first_step + tl.load(steps + row)
    parameter = tl.load(columns + _PARAMETER * rows + row)
    block = tl.load(columns + _FIRST_BLOCK * rows + row) + start // 4
    floor = tl.load(floors + row)

    # All reads come first, so that they are under way while the noise is made. A parameter that takes no part has no
    # gradient: what is as wide at least (STAND_IN) is read in place of it, and counts as zero.
    takes_part = tl.load(columns + _GRAD * rows + row) != 0
    present = tl.where(takes_part, 1.0, 0.0)
    weights = _pointers(columns, geometry, rows, row, _WEIGHT, DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    hesses = _pointers(columns, geometry, rows, row, _HESS, HESS_DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    grad = _values(
        columns, geometry, rows, row, tl.where(takes_part, _GRAD, STAND_IN), GRAD_DTYPE, element, place, mask,
        ALIGNED, DIMS, ALIKE, INDEX, MASKED,
    )  # fmt: skip
    grad = tl.where(takes_part, grad, 0.0)
    hess = _read(hesses, mask, MASKED)
    if HAS_MEAN:
        means = _pointers(columns, geometry, rows, row, _MEAN, MEAN_DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
        mean = _read(means, mask, MASKED)
        if not SAMPLED:
            mean = reconciled(mean, _read(weights, mask, MASKED), DTYPE)
    else:
        mean = _read(weights, mask, MASKED)
    if HAS_MOMENTUM:
        momenta = _pointers(
            columns, geometry, rows, row, _MOMENTUM, MOMENTUM_DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX
        )
        momentum = _read(momenta, mask, MASKED)
    other = grad
    if CURVATURE >= _PAIR:
        other = _values(
            columns, geometry, rows, row, tl.where(takes_part, _OTHER, STAND_IN), tl.float32, element, place, mask,
            ALIGNED, DIMS, ALIKE, INDEX, MASKED,
        )  # fmt: skip
        other = tl.where(takes_part, other, 0.0)
    if HAS_PRIOR_PRECISION:
        damping = _values(
            columns, geometry, rows, row, _PRIOR_PRECISION, tl.float32, element, place, mask,
            ALIGNED, DIMS, ALIKE, INDEX, MASKED,
        ) / ess  # fmt: skip

    # The mean. The noise also enters Price's curvature.
    noise, inverse_deviation = grad, grad  # not read, if not made here
    if (SAMPLED and not HAS_MEAN) or CURVATURE == _PRICE:
        sampled_at = tl.where(takes_part, count - 1, count)
        noise = normals(block, parameter, sampled_at, source, key0, key1, BLOCK // 4)
        precision = precision_of(hess, ess, damping, floor)
        deviation = tl.rsqrt(precision)
        if SAMPLED and not HAS_MEAN:
            mean = plus(mean, -sign, noise * deviation)
        inverse_deviation = precision * deviation

    # The averages. ``before`` is h, or nothing where the average forgets its start and is a sum, in which h weighs what
    # is left of it: such a start can be so large that the difference to it says nothing.
    before = tl.zeros_like(hess) if FORGETS else hess
    grad, excess = estimated(before, grad, other, noise, inverse_deviation, scale, sign, grad_sign, CURVATURE)
    distance = mean
    if HAS_PRIOR_MEAN:
        distance = mean - _values(
            columns, geometry, rows, row, _PRIOR_MEAN, tl.float32, element, place, mask,
            ALIGNED, DIMS, ALIKE, INDEX, MASKED,
        )  # fmt: skip
    if FORGETS:
        beta2, total = 1.0 - weight2, weight_of_all(log_beta2, count, start_weight)
        weight2 = weight2 / total
        before = beta2 * weight_of_all(log_beta2, count - 1, start_weight) / total * hess
    new_hess = averaged_hess(hess, before, excess, weight2, damping, RULE)
    averaged = grad
    if RULE == _VADAM:
        averaged = plus(grad, damping, distance)
    if HAS_MOMENTUM:
        new_momentum = plus(momentum, weight1, averaged - momentum)
        averaged = new_momentum * over_weight_so_far(log_beta1, count)

    # The step. What is not finite is left out.
    direction = direction_of(
        averaged, distance, new_hess, log_beta2, count, ess, damping, floor, inverse_gradient_scale, RULE
    )
    if CLIPS:
        direction = clip(direction, clip_radius, present, mask, clipped, MASKED)
    new_mean = plus(mean, -lr, direction)
    usable = usable_elements(new_mean, new_hess, grad, present, mask, unusable, CURVATURE, BLOCK, MASKED)
    new_mean, new_hess = tl.where(usable, new_mean, mean), tl.where(usable, new_hess, hess)
    _write(hesses, new_hess, mask, MASKED)
    if HAS_MOMENTUM:
        _write(momenta, tl.where(usable, new_momentum, momentum), mask, MASKED)
    if HAS_MEAN:
        _write(means, new_mean, mask, MASKED)
    _write(weights, new_mean, mask, MASKED)

"""``functional/diagonal.py`` on tables of tensors, one pass over memory for each kernel.

A program handles a part of a tile, which lies in one row of the table. Flags are compile-time constants, so that a
kernel holds only what it was asked for. Products and sums are joined (fma) only where it says so, not as the
compiler likes (see ``cuda.py``): what is subtracted from a sample is, to the last bit, what was added to the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vprop.kernels.call import LEAST_PRECISION, SMALLEST_SIZE, Curvature, Rule
from vprop.kernels.table import TILE, Column, Role
from vprop.kernels.triton_noise import normals

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
_SQUARE = tl.constexpr(int(Curvature.SQUARE))
_PRICE = tl.constexpr(int(Curvature.PRICE))
_PAIR = tl.constexpr(int(Curvature.PAIR))
_GIVEN = tl.constexpr(int(Curvature.GIVEN))
_RIEMANNIAN = tl.constexpr(int(Rule.RIEMANNIAN))
_VADAM = tl.constexpr(int(Rule.VADAM))
_CLAMPED_ROOT = tl.constexpr(int(Rule.CLAMPED_ROOT))
_RIEMANNIAN_ROOT = tl.constexpr(int(Rule.RIEMANNIAN_ROOT))
_LEAST_PRECISION = tl.constexpr(LEAST_PRECISION)
_SMALLEST_SIZE = tl.constexpr(SMALLEST_SIZE)


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
    """Values as float32. Without a mask loads can be wide, so only the last part of a tensor has one."""
    values = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    return values.to(tl.float32)


@triton.jit
def _write(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty))


@triton.jit
def _plus(x, factor, y):
    """x + factor·y, rounded once."""
    return tl.fma(y, tl.zeros_like(y) + factor, x)


@triton.jit
def _precision(hess, ess, damping, floor):
    return ess * tl.maximum(tl.maximum(hess + damping, _LEAST_PRECISION * damping), floor)


@triton.jit
def _reconciled(mean, weight, dtype: tl.constexpr):
    """The float32 mean, or the weight where somebody else wrote to it."""
    return tl.where(mean.to(dtype).to(tl.float32) == weight, mean, weight)


@triton.jit(do_not_specialize=["rows", "first_step", "source", "sign", "key0", "key1", "ess", "damping"])
def perturb_kernel(
    columns, tile_rows, geometry, steps, floors, rows, first_step, key0, key1, source, sign, ess, damping,
    RESTORE: tl.constexpr, DTYPE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a sample into the weights, or take it out again."""
    part = tl.program_id(0)
    tile = part // (_TILE // BLOCK)
    row = tl.load(tile_rows + tile).to(tl.int64)
    size = tl.load(columns + _SIZE * rows + row)
    tile_in_row = tile - tl.load(columns + _FIRST_TILE * rows + row)
    start = tile_in_row * _TILE + (part % (_TILE // BLOCK)) * BLOCK
    step = first_step + tl.load(steps + row)
    parameter = tl.load(columns + _PARAMETER * rows + row)
    floor = tl.load(floors + row)
    if start + BLOCK <= size:
        _perturb(
            columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
            RESTORE, DTYPE, HAS_MEAN, HAS_PRIOR_PRECISION, ALIGNED, DIMS, ALIKE, INDEX, BLOCK, False,
        )  # fmt: skip
    elif start < size:
        _perturb(
            columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
            RESTORE, DTYPE, HAS_MEAN, HAS_PRIOR_PRECISION, ALIGNED, DIMS, ALIKE, INDEX, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _perturb(
    columns, geometry, rows, row, start, size, parameter, step, key0, key1, source, sign, ess, damping, floor,
    RESTORE: tl.constexpr, DTYPE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    element = start + tl.arange(0, BLOCK)
    mask = element < size
    place = _place(geometry, row, element, DIMS, ALIKE, INDEX)
    weights = _pointers(columns, geometry, rows, row, _WEIGHT, DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    if HAS_MEAN:
        means = _pointers(columns, geometry, rows, row, _MEAN, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX)
        mean = _read(means, mask, MASKED)
        if not RESTORE:
            mean = _reconciled(mean, _read(weights, mask, MASKED), DTYPE)
            _write(means, mean, mask, MASKED)
    else:
        mean = _read(weights, mask, MASKED)
    if RESTORE and HAS_MEAN:
        _write(weights, mean, mask, MASKED)
    else:
        hess = _read(
            _pointers(columns, geometry, rows, row, _HESS, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX),
            mask,
            MASKED,
        )
        if HAS_PRIOR_PRECISION:
            precisions = _pointers(
                columns, geometry, rows, row, _PRIOR_PRECISION, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX
            )
            damping = _read(precisions, mask, MASKED) / ess
        block = tl.load(columns + _FIRST_BLOCK * rows + row) + start // 4
        noise = normals(block, parameter, step, source, key0, key1, BLOCK // 4)
        offset = noise * tl.rsqrt(_precision(hess, ess, damping, floor))
        if RESTORE:
            sign = -sign
        _write(weights, _plus(mean, sign, offset), mask, MASKED)


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
    DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    HAS_PRIOR_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step: the sample out, mean and curvature updated."""
    part = tl.program_id(0)
    tile = part // (_TILE // BLOCK)
    row = tl.load(tile_rows + tile).to(tl.int64)
    size = tl.load(columns + _SIZE * rows + row)
    tile_in_row = tile - tl.load(columns + _FIRST_TILE * rows + row)
    start = tile_in_row * _TILE + (part % (_TILE // BLOCK)) * BLOCK
    if LR_ON_DEVICE:
        lr = tl.load(lr).to(tl.float32)
    if start + BLOCK <= size:
        _step(
            columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
            first_step, key0, key1, source, sign, ess, damping, scale, lr,
            weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
            SAMPLED, CURVATURE, RULE, CLIPS, FORGETS, DTYPE, GRAD_DTYPE, HAS_MEAN, HAS_MOMENTUM,
            HAS_PRIOR_MEAN, HAS_PRIOR_PRECISION, ALIGNED, DIMS, ALIKE, INDEX, BLOCK, False,
        )  # fmt: skip
    elif start < size:
        _step(
            columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
            first_step, key0, key1, source, sign, ess, damping, scale, lr,
            weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
            SAMPLED, CURVATURE, RULE, CLIPS, FORGETS, DTYPE, GRAD_DTYPE, HAS_MEAN, HAS_MOMENTUM,
            HAS_PRIOR_MEAN, HAS_PRIOR_PRECISION, ALIGNED, DIMS, ALIKE, INDEX, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _step(
    columns, geometry, steps, floors, unusable, clipped, rows, row, start, size,
    first_step, key0, key1, source, sign, ess, damping, scale, lr,
    weight1, weight2, log_beta1, log_beta2, clip_radius, grad_sign, start_weight, inverse_gradient_scale,
    SAMPLED: tl.constexpr, CURVATURE: tl.constexpr, RULE: tl.constexpr,
    CLIPS: tl.constexpr, FORGETS: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr, HAS_PRIOR_MEAN: tl.constexpr, HAS_PRIOR_PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    SUMS: tl.constexpr = FORGETS and RULE != _RIEMANNIAN and RULE != _RIEMANNIAN_ROOT
    element = start + tl.arange(0, BLOCK)
    mask = element < size
    place = _place(geometry, row, element, DIMS, ALIKE, INDEX)
    count = first_step + tl.load(steps + row)
    parameter = tl.load(columns + _PARAMETER * rows + row)
    block = tl.load(columns + _FIRST_BLOCK * rows + row) + start // 4
    floor = tl.load(floors + row)

    # All reads come first, so that they are under way while the noise is made. A parameter that takes no part has no
    # gradient: its curvature is read in place of it, and counts as zero.
    takes_part = tl.load(columns + _GRAD * rows + row) != 0
    present = tl.where(takes_part, 1.0, 0.0)
    weights = _pointers(columns, geometry, rows, row, _WEIGHT, DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    hesses = _pointers(columns, geometry, rows, row, _HESS, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX)
    grad_column = tl.where(takes_part, _GRAD, _HESS)
    grads = _pointers(
        columns, geometry, rows, row, grad_column, GRAD_DTYPE, element, place, ALIGNED, DIMS, ALIKE, INDEX
    )
    grad = tl.where(takes_part, _read(grads, mask, MASKED), 0.0)
    hess = _read(hesses, mask, MASKED)
    if HAS_MEAN:
        means = _pointers(columns, geometry, rows, row, _MEAN, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX)
        mean = _read(means, mask, MASKED)
        if not SAMPLED:
            mean = _reconciled(mean, _read(weights, mask, MASKED), DTYPE)
    else:
        mean = _read(weights, mask, MASKED)
    if HAS_MOMENTUM:
        momenta = _pointers(
            columns, geometry, rows, row, _MOMENTUM, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX
        )
        momentum = _read(momenta, mask, MASKED)
    if CURVATURE >= _PAIR:
        other_column = tl.where(takes_part, _OTHER, _HESS)
        others = _pointers(
            columns, geometry, rows, row, other_column, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX
        )
        other = tl.where(takes_part, _read(others, mask, MASKED), 0.0)
    if HAS_PRIOR_PRECISION:
        precisions = _pointers(
            columns, geometry, rows, row, _PRIOR_PRECISION, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX
        )
        damping = _read(precisions, mask, MASKED) / ess

    # The mean. The noise also enters Price's curvature.
    if (SAMPLED and not HAS_MEAN) or CURVATURE == _PRICE:
        sampled_at = tl.where(takes_part, count - 1, count)
        noise = normals(block, parameter, sampled_at, source, key0, key1, BLOCK // 4)
        precision = _precision(hess, ess, damping, floor)
        deviation = tl.rsqrt(precision)
        if SAMPLED and not HAS_MEAN:
            mean = _plus(mean, -sign, noise * deviation)

    # The gradient and the curvature.
    # From here on ``before`` is h, or nothing where the average is a sum, in which h weighs what is left of it: a start
    # that is to be forgotten can be so large that the difference to it says nothing.
    before = tl.zeros_like(hess) if SUMS else hess
    if CURVATURE == _SQUARE:
        excess = _plus(-before, scale, grad * grad)  # ĥ − h
        grad = grad_sign * grad
    else:
        grad = grad_sign * grad
        if CURVATURE == _PRICE:
            excess = _plus(-before, sign, grad * noise * (precision * deviation))
        elif CURVATURE == _PAIR:
            half_difference = (other - grad) * 0.5
            excess = _plus(-before, scale, half_difference * half_difference)
            grad = other + 0.5 * (grad - other)
        else:
            excess = _plus(-before, scale, other)

    # The averages.
    if HAS_PRIOR_MEAN:
        prior_means = _pointers(
            columns, geometry, rows, row, _PRIOR_MEAN, tl.float32, element, place, ALIGNED, DIMS, ALIKE, INDEX
        )
        distance = mean - _read(prior_means, mask, MASKED)
    else:
        distance = mean
    if FORGETS:
        beta2, total = 1.0 - weight2, _weight_of_all(log_beta2, count, start_weight)
        weight2 = weight2 / total
        if SUMS:
            before = beta2 * _weight_of_all(log_beta2, count - 1, start_weight) / total * hess
    if RULE == _RIEMANNIAN or RULE == _RIEMANNIAN_ROOT:
        change = weight2 * excess
        positive = tl.maximum(hess + damping, _LEAST_PRECISION * damping)
        new_hess = hess + change + 0.5 * (change * change) / positive
        least = (_LEAST_PRECISION - 1.0) * damping
        new_hess = tl.where(new_hess < least, least, new_hess)  # NaN stays, to be found
    else:
        new_hess = _plus(before, weight2, excess)
        new_hess = tl.where(new_hess < 0.0, 0.0, new_hess)
    averaged = grad
    if RULE == _VADAM:
        averaged = _plus(grad, damping, distance)
    if HAS_MOMENTUM:
        new_momentum = _plus(momentum, weight1, averaged - momentum)
        averaged = new_momentum * _over_weight_so_far(log_beta1, count)

    # The step.
    if RULE == _VADAM:
        direction = averaged / (tl.sqrt(new_hess * _over_weight_so_far(log_beta2, count)) + damping)
    elif RULE == _CLAMPED_ROOT or RULE == _RIEMANNIAN_ROOT:
        squared_size = new_hess * inverse_gradient_scale
        squared_size = tl.where(squared_size < 0.0, 0.0, squared_size)
        pull = damping * distance
        prior_square = pull * pull + damping * damping / _precision(new_hess, ess, damping, floor)
        direction = (averaged + pull) / (tl.sqrt(squared_size + prior_square) + _SMALLEST_SIZE)
    else:
        # x/y as x·(1/√y)², for y > 0: a third of the instructions of a division, and as exact to a unit or two.
        bounded = new_hess + damping
        root = tl.rsqrt(tl.where(bounded < floor, floor, bounded))
        direction = _plus(averaged, damping, distance) * (root * root)
    if CLIPS:
        too_far = tl.abs(direction) * present > clip_radius
        if MASKED:
            too_far = too_far & mask
        tl.atomic_add(clipped, tl.sum(too_far.to(tl.int64)), sem="relaxed")
        direction = tl.where(direction > clip_radius, clip_radius, direction)
        direction = tl.where(direction < -clip_radius, -clip_radius, direction)
    new_mean = _plus(mean, -lr, direction)

    # What is not finite is left out: x·0 is NaN for NaN and infinity, and only for them.
    zero = _plus(new_hess * 0.0, 0.0, new_mean)
    if CURVATURE == _GIVEN or CURVATURE == _PRICE:  # else an infinite gradient makes an infinite curvature
        zero = _plus(zero, 0.0, grad)
    lost = zero != 0.0
    if MASKED:
        lost = lost & mask
    # One counter for each lane, because to bring them together would cost more than the rest of the bookkeeping.
    tl.atomic_add(unusable + tl.arange(0, BLOCK), tl.full([BLOCK], 1, tl.int32), mask=lost, sem="relaxed")
    usable = zero == present - 1.0  # never, if it takes no part
    new_mean, new_hess = tl.where(usable, new_mean, mean), tl.where(usable, new_hess, hess)
    _write(hesses, new_hess, mask, MASKED)
    if HAS_MOMENTUM:
        _write(momenta, tl.where(usable, new_momentum, momentum), mask, MASKED)
    if HAS_MEAN:
        _write(means, new_mean, mask, MASKED)
    _write(weights, new_mean, mask, MASKED)


@triton.jit
def _weight_of_all(log_beta, count, start_weight):
    """1 − (1−w₀)βᵗ; w₀ itself before the first step."""
    known = tl.where(count > 0, 1.0 / _over_weight_so_far(log_beta, count), 0.0)
    return known + start_weight * (1.0 - known)


@triton.jit
def _over_weight_so_far(log_beta, count):
    """1/(1 − βᵗ). The difference would lose its digits near one, where the series of eˣ−1 keeps them."""
    x = tl.maximum(count, 1).to(tl.float32) * log_beta
    series = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0) * (1.0 + x * 0.125))
    series = 1.0 + x * 0.5 * (1.0 + x * (1.0 / 3.0) * (1.0 + x * 0.25 * (1.0 + x * 0.2 * series)))
    return 1.0 / tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))

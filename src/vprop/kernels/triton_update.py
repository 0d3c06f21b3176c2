"""The formulas of ``functional/diagonal.py`` on blocks of float32 numbers, for ``triton_diagonal.py``.

Flags are compile-time constants, and the functions are inlined: a kernel holds only what it was asked for. Products and
sums are joined (fma) only where it says so, not as the compiler likes (see ``cuda.py``): what is subtracted from a
sample is, to the last bit, what was added to the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vprop.kernels.call import LEAST_PRECISION, SMALLEST_SIZE, Curvature, Rule

_SQUARE = tl.constexpr(int(Curvature.SQUARE))
_PRICE = tl.constexpr(int(Curvature.PRICE))
_PAIR = tl.constexpr(int(Curvature.PAIR))
_GIVEN = tl.constexpr(int(Curvature.GIVEN))
_RIEMANNIAN = tl.constexpr(int(Rule.RIEMANNIAN))
_VADAM = tl.constexpr(int(Rule.VADAM))
_CLAMPED_ROOT = tl.constexpr(int(Rule.CLAMPED_ROOT))
_RIEMANNIAN_ROOT = tl.constexpr(int(Rule.RIEMANNIAN_ROOT))
_CLAMPED_IDENTITY = tl.constexpr(int(Rule.CLAMPED_IDENTITY))
_RIEMANNIAN_IDENTITY = tl.constexpr(int(Rule.RIEMANNIAN_IDENTITY))
_LEAST_PRECISION = tl.constexpr(LEAST_PRECISION)
_SMALLEST_SIZE = tl.constexpr(SMALLEST_SIZE)


@triton.jit
def plus(x, factor, y):
    """x + factor·y, rounded once."""
    return tl.fma(y, tl.zeros_like(y) + factor, x)


@triton.jit
def precision_of(hess, ess, damping, floor):
    """1/σ²"""
    return ess * tl.maximum(tl.maximum(hess + damping, _LEAST_PRECISION * damping), floor)


@triton.jit
def reconciled(mean, weight, dtype: tl.constexpr):
    """The mean that is kept, or the weight where somebody else wrote to it."""
    return tl.where(mean.to(dtype).to(tl.float32) == weight, mean, weight)


@triton.jit
def estimated(before, grad, other, noise, inverse_deviation, scale, sign, grad_sign, CURVATURE: tl.constexpr):
    """ĝ and ĥ − ``before``; ε and 1/σ are read for Price's curvature, ``other`` for pairs and what is given."""
    if CURVATURE == _SQUARE:
        excess = plus(-before, scale, grad * grad)
        grad = grad_sign * grad
    else:
        grad = grad_sign * grad
        if CURVATURE == _PRICE:
            excess = plus(-before, sign, grad * noise * inverse_deviation)
        elif CURVATURE == _PAIR:
            half_difference = (other - grad) * 0.5
            excess = plus(-before, scale, half_difference * half_difference)
            grad = other + 0.5 * (grad - other)
        else:
            excess = plus(-before, scale, other)
    return grad, excess


@triton.jit
def averaged_hess(hess, before, excess, weight, damping, RULE: tl.constexpr):
    """h with ĥ = ``before`` + ``excess`` in it, in a way that keeps the precision positive. NaN stays, to be found."""
    if RULE == _RIEMANNIAN or RULE == _RIEMANNIAN_ROOT or RULE == _RIEMANNIAN_IDENTITY:
        change = weight * excess
        positive = tl.maximum(hess + damping, _LEAST_PRECISION * damping)
        new_hess = hess + change + 0.5 * (change * change) / positive
        least = (_LEAST_PRECISION - 1.0) * damping
        new_hess = tl.where(new_hess < least, least, new_hess)
    else:
        new_hess = plus(before, weight, excess)
        new_hess = tl.where(new_hess < 0.0, 0.0, new_hess)
    return new_hess


@triton.jit
def direction_of(
    averaged, distance, new_hess, log_beta2, count, ess, damping, floor, inverse_gradient_scale, RULE: tl.constexpr
):
    """What the step goes along, before ``lr`` and the clip radius."""
    if RULE == _VADAM:
        direction = averaged / (tl.sqrt(new_hess * over_weight_so_far(log_beta2, count)) + damping)
    elif RULE == _CLAMPED_ROOT or RULE == _RIEMANNIAN_ROOT:
        squared_size = new_hess * inverse_gradient_scale
        squared_size = tl.where(squared_size < 0.0, 0.0, squared_size)
        pull = damping * distance
        prior_square = pull * pull + damping * damping / precision_of(new_hess, ess, damping, floor)
        direction = (averaged + pull) / (tl.sqrt(squared_size + prior_square) + _SMALLEST_SIZE)
    elif RULE == _CLAMPED_IDENTITY or RULE == _RIEMANNIAN_IDENTITY:
        # Without any precision the next sample would be infinite: such an element is to be left out.
        precise = tl.maximum(new_hess + damping, floor) > 0.0
        direction = tl.where(precise, plus(averaged, damping, distance), float("nan"))
    else:
        # x/y as x·(1/√y)², for y > 0: a third of the instructions of a division, and as exact to a unit or two.
        bounded = new_hess + damping
        root = tl.rsqrt(tl.where(bounded < floor, floor, bounded))
        direction = plus(averaged, damping, distance) * (root * root)
    return direction


@triton.jit
def clip(direction, radius, present, mask, clipped, MASKED: tl.constexpr):
    """The direction within the clip radius; elements beyond it are counted, of parameters that take part."""
    too_far = tl.abs(direction) * present > radius
    if MASKED:
        too_far = too_far & mask
    tl.atomic_add(clipped, tl.sum(too_far.to(tl.int64)), sem="relaxed")
    direction = tl.where(direction > radius, radius, direction)
    return tl.where(direction < -radius, -radius, direction)


@triton.jit
def usable_elements(
    new_mean, new_hess, grad, present, mask, unusable, CURVATURE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Which elements are finite, and take part; the others are counted."""
    zero = plus(new_hess * 0.0, 0.0, new_mean)  # x·0 is NaN for NaN and infinity, and only for them
    if CURVATURE == _GIVEN or CURVATURE == _PRICE:  # else an infinite gradient makes an infinite curvature
        zero = plus(zero, 0.0, grad)
    lost = zero != 0.0
    if MASKED:
        lost = lost & mask
    # One counter for each lane, because to bring them together would cost more than the rest of the bookkeeping.
    tl.atomic_add(unusable + tl.arange(0, BLOCK), tl.full([BLOCK], 1, tl.int32), mask=lost, sem="relaxed")
    return zero == present - 1.0  # never, if it takes no part


@triton.jit
def weight_of_all(log_beta, count, start_weight):
    """1 − (1−w₀)βᵗ; w₀ itself before the first step."""
    known = tl.where(count > 0, 1.0 / over_weight_so_far(log_beta, count), 0.0)
    return known + start_weight * (1.0 - known)


@triton.jit
def over_weight_so_far(log_beta, count):
    """1/(1 − βᵗ). The difference would lose its digits near one, where the series of eˣ−1 keeps them."""
    x = tl.maximum(count, 1).to(tl.float32) * log_beta
    series = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0) * (1.0 + x * 0.125))
    series = 1.0 + x * 0.5 * (1.0 + x * (1.0 / 3.0) * (1.0 + x * 0.25 * (1.0 + x * 0.2 * series)))
    return 1.0 / tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))

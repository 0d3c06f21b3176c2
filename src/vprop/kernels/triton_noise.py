"""The normal numbers of ``noise.py`` in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def four_normals(block, parameter, step, source, key0, key1):
    """The normals of elements 4·block … 4·block+3: a Philox call and two of Box–Muller's transforms."""
    words = _philox(
        block.to(tl.uint32), parameter.to(tl.uint32), step.to(tl.uint32), source.to(tl.uint32),
        key0.to(tl.uint32), key1.to(tl.uint32),
    )  # fmt: skip
    z0, z1 = _box_muller(words[0], words[1])
    z2, z3 = _box_muller(words[2], words[3])
    return z0, z1, z2, z3


@triton.jit
def _philox(c0, c1, c2, c3, key0, key1):
    """Philox4x32-10. Products in 64 bits, because the GPU gets both halves of one from a single instruction."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = product0.to(tl.uint32)
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def normals(first_block, parameter, step, source, key0, key1, BLOCKS: tl.constexpr):
    """The normals of 4·BLOCKS neighbouring elements, as one vector in their order."""
    block = first_block + tl.arange(0, BLOCKS)
    z0, z1, z2, z3 = four_normals(block, parameter, step, source, key0, key1)
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), [4 * BLOCKS])


@triton.jit
def _box_muller(radius_word, angle_word):
    square = _minus_two_log(tl.fma(radius_word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10))
    radius = square * tl.rsqrt(tl.maximum(square, 1e-30))  # √square, and zero for zero
    cosine, sine = _cos_sin(angle_word)
    return radius * cosine, radius * sine


@triton.jit
def _minus_two_log(x):
    """−2·log(x) of a number in [2⁻³³, 1], to float32 rounding also next to one.

    x = 2ᵉ·(1+f) with f in [−1/3, 1/3), by its bits; no zero, infinity or NaN to look out for.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    square = f * f
    p = tl.fma(f, -1.40753672584e-1, 2.3029220620e-1)
    p = tl.fma(f, p, -2.3353997480e-1)
    p = tl.fma(f, p, 2.4840281692e-1)
    p = tl.fma(f, p, -2.8498645574e-1)
    p = tl.fma(f, p, 3.3336115330e-1)
    p = tl.fma(f, p, -4.0001429530e-1)
    p = tl.fma(f, p, 4.9999987986e-1)
    p = tl.fma(f, p, -6.6666662348e-1)
    p = tl.fma(square * f, p, square)
    return tl.fma(exponent.to(tl.float32), -1.3862943611198906, tl.fma(f, -2.0, p))


@triton.jit
def _cos_sin(word):
    """Cosine and sine of 2π·word/2³².

    The quadrant is in the topmost bits, so that the range is reduced exactly in integers, and what is left, within
    ±π/4, takes two short polynomials: cheaper than functions that must be ready for any argument.
    """
    quadrant = (word + 0x20000000) >> 30
    rest = (word - (quadrant << 30)).to(tl.int32, bitcast=True)
    x = rest.to(tl.float32) * 1.4629180792671596e-09  # π·2⁻³¹
    square = x * x
    sine = tl.fma(square, -1.9515295891e-4, 8.3321608736e-3)
    sine = tl.fma(square, sine, -1.6666654611e-1)
    sine = tl.fma(square * x, sine, x)
    cosine = tl.fma(square, 2.443315711809948e-5, -1.388731625493765e-3)
    cosine = tl.fma(square, cosine, 4.166664568298827e-2)
    cosine = tl.fma(square * square, cosine, tl.fma(square, -0.5, 1.0))
    swapped = (quadrant & 1) != 0
    first, second = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    # cos: + − − +, sin: + + − − over the quadrants
    first = tl.where(((quadrant + 1) & 2) != 0, -first, first)
    second = tl.where((quadrant & 2) != 0, -second, second)
    return first, second


@triton.jit(do_not_specialize=["start", "count", "parameter", "step", "source", "key0", "key1"])
def fill_kernel(
    out,
    start,
    count,
    parameter,
    step,
    source,
    key0,
    key1,
    STEP_ON_DEVICE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``out[i]`` is the normal of element ``start + i``."""
    if STEP_ON_DEVICE:
        step = tl.load(step)
    first_block = start // 4 + tl.program_id(0).to(tl.int64) * BLOCKS
    values = normals(
        first_block, parameter, step, source, key0,
        key1, BLOCKS,
    )  # fmt: skip
    place = first_block * 4 - start + tl.arange(0, 4 * BLOCKS)
    tl.store(out + place, values, mask=(place >= 0) & (place < count))

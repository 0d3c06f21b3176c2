"""Normal numbers from a counter: nothing is stored, everything can be generated again.

The generator is Philox4x32-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011), a keyed
bijection of 128-bit counters. Here

    key     = seed (64 bits)
    counter = (element index // 4, parameter number, step, stream and sample)

and the four 32-bit words of one call become the normals of four neighbouring elements, by Box–Muller. A normal
therefore depends on *which* element of *which* parameter it belongs to and on nothing else: not on the device,
not on how a parameter is sharded, not on what was drawn before.

The arithmetic is int64 torch operations (32-bit words in 64-bit integers), so it runs wherever torch runs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vprop import kernels
from vprop.bundles import bundle_limit, bundles
from vprop.parallel.sharding import block_of, is_sharded, to_local
from vprop.precision import compute_dtype

Word = int | Tensor
"""A 32-bit word: a Python int, or an int64 tensor that holds values in [0, 2³²)."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_LANES = 4
"""Normals per Philox call."""


class Stream(enum.IntEnum):
    """Who draws. Streams never overlap, so evaluation cannot disturb the noise of training."""

    TRAINING = 0
    EVALUATION = 1
    POSTERIOR = 2
    LABELS = 3
    """Also the probes of Hutchinson's estimator: one estimator never draws both."""


class Draw(NamedTuple):
    """The address of one parameter's noise: everything of the counter but the element."""

    seed: int
    parameter: Word
    step: Word
    sample: Word = 0
    """Below 2³⁰, because it shares its word with the stream."""
    stream: Stream = Stream.TRAINING


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 tensors.

    At least one word of ``counter`` must be a tensor. Products of two 32-bit words need 64 unsigned bits; int64
    wraps, which leaves all 64 bits as they should be, and the mask after the arithmetic shift drops the sign.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{word.item():08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3  # type: ignore[return-value]


def normal(
    start: int,
    stop: int,
    draw: Draw,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The standard normals of elements ``start`` to ``stop - 1`` of a parameter, in row-major order.

    Any slice can be had without the rest:

    >>> draw = Draw(seed=1, parameter=0, step=7)
    >>> torch.equal(normal(0, 10, draw)[3:6], normal(3, 6, draw))
    True
    """
    kernel = _kernel_for(torch.device(device), dtype, draw)
    if kernel is not None:
        out = torch.empty(stop - start, dtype=dtype, device=device)
        source = source_word(draw.stream, draw.sample)
        kernel.normal(out, start, seed=draw.seed, parameter=draw.parameter, step=draw.step, source=source)  # type: ignore[arg-type]
        return out
    return portable_normal(start, stop, draw, device=device, dtype=dtype)


def portable_normal(
    start: int,
    stop: int,
    draw: Draw,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same with torch's own operations, whatever the device: what kernels are held against."""
    out = torch.empty(stop - start, dtype=dtype, device=device)
    stop_block, chunk = -(-stop // _LANES), bundle_limit(out.device) // _LANES
    for first_block in range(start // _LANES, stop_block, chunk):
        last_block = min(first_block + chunk, stop_block)
        blocks = torch.arange(first_block, last_block, dtype=torch.int64, device=device)
        values = torch.stack(_four_normals(blocks, draw, dtype), dim=-1).flatten()
        offset = first_block * _LANES
        low, high = max(start, offset), min(stop, last_block * _LANES)
        out[low - start : high - start] = values[low - offset : high - offset]
    return out


def normals_of_samples(parameter: Tensor, draw: Draw, samples: range) -> Tensor:
    """The noise of one parameter, which is not sharded, in several samples, in the first dimension.

    For many samples of small parameters, of which calls of :func:`normals_like` would cost more than the numbers.

    >>> weight, draw = torch.zeros(3, 5), Draw(1, parameter=2, step=7)
    >>> torch.equal(normals_of_samples(weight, draw, range(4, 6))[1].flatten(), normal(0, 15, draw._replace(sample=5)))
    True
    """
    dtype, size, device = compute_dtype(parameter), parameter.numel(), parameter.device
    kernel = _kernel_for(device, dtype, draw)
    if kernel is not None:
        out = torch.empty(len(samples), size, dtype=dtype, device=device)
        for row, sample in zip(out, samples, strict=True):
            source = source_word(draw.stream, sample)
            kernel.normal(row, 0, seed=draw.seed, parameter=draw.parameter, step=draw.step, source=source)  # type: ignore[arg-type]
    else:
        numbers = torch.arange(samples.start, samples.stop, dtype=torch.int64, device=device).unsqueeze(1)
        blocks = torch.arange(-(-size // _LANES), dtype=torch.int64, device=device).unsqueeze(0)
        lanes = _four_normals(blocks, draw._replace(sample=numbers), dtype)
        out = torch.stack(lanes, dim=-1).flatten(1)[:, :size]
    return out.reshape(len(samples), *parameter.shape)


def normals_like(
    parameters: Sequence[Tensor], draws: Sequence[Draw], *, portable: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """The noise of parameters, each in its shape, on its device and in the precision of its arithmetic.

    Of a parameter that is spread over ranks it is the noise of the part that lies here, cut out of that of the whole.

    Yields (position, noise) in no particular order, generating as it goes, so that the noise of one large parameter
    or of a batch of small ones exists at a time. Small parameters share Philox calls: a network has many of them,
    and a call costs a hundred small torch operations whatever its length. ``portable`` forbids kernels.

    >>> weight, bias = torch.zeros(3, 5), torch.zeros(5)
    >>> noises = dict(normals_like([weight, bias], [Draw(1, parameter=0, step=7), Draw(1, parameter=1, step=7)]))
    >>> torch.equal(noises[1], normal(0, 5, Draw(1, parameter=1, step=7)))
    True
    """

    whole = []
    for i, parameter in enumerate(parameters):
        if is_sharded(parameter):
            yield i, _of_part(parameter, draws[i], portable)
        else:
            whole.append(i)

    def kind(i: int) -> tuple:
        parameter, draw = parameters[i], draws[i]
        return parameter.device, compute_dtype(parameter), draw.seed, draw.sample, draw.stream

    def limit(i: int) -> int:
        return bundle_limit(parameters[i].device)

    for members in bundles(whole, kind=kind, size=lambda i: parameters[i].numel(), limit=limit):
        first = members[0]
        parameter, size = parameters[first], parameters[first].numel()
        device, dtype = parameter.device, compute_dtype(parameter)
        by_kernel = not portable and _kernel_for(device, dtype, draws[first]) is not None
        if size > limit(first) or by_kernel:
            generate = normal if by_kernel else portable_normal
            for i in members:
                values = generate(0, parameters[i].numel(), draws[i], device=device, dtype=dtype)
                yield i, values.view(parameters[i].shape)
        else:
            yield from _batch(parameters, draws, members)


def _of_part(p: Tensor, draw: Draw, portable: bool) -> Tensor:
    """The noise of the part of a parameter that lies on this rank."""
    block, part, dtype = block_of(p), to_local(p), compute_dtype(p)
    if block.start is None:
        return normal_at(block.numbers(part.device), draw, dtype=dtype)
    generate = portable_normal if portable else normal
    values = generate(block.start, block.start + part.numel(), draw, device=part.device, dtype=dtype)
    return values.view(part.shape)


def _kernel_for(device: torch.device, dtype: torch.dtype, draw: Draw) -> kernels.Backend | None:
    """The kernels that can make this noise, if there are any."""
    if dtype != torch.float32 or isinstance(draw.parameter, Tensor) or torch.compiler.is_compiling():
        return None
    return kernels.backend_for(device)


def _batch(parameters: Sequence[Tensor], draws: Sequence[Draw], members: list[int]) -> Iterator[tuple[int, Tensor]]:
    """The noise of ``members``, which share device, precision, seed, sample and stream, from one Philox call."""
    device, dtype = parameters[members[0]].device, compute_dtype(parameters[members[0]])
    block_counts = [-(-parameters[i].numel() // _LANES) for i in members]
    blocks = torch.cat([torch.arange(n, dtype=torch.int64, device=device) for n in block_counts])

    def per_block(words: list[Word]) -> Word:
        if isinstance(words[0], int) and all(word == words[0] for word in words):
            return words[0]
        # Filled on the device: a copy from the host could not be captured in a CUDA graph.
        return torch.cat(
            [
                torch.full((n,), word, dtype=torch.int64, device=device)
                if isinstance(word, int)
                else word.to(device).expand(n)  # torch.compile makes tensors on the CPU of step counts
                for word, n in zip(words, block_counts, strict=True)
            ]
        )

    shared = draws[members[0]]._replace(
        parameter=per_block([draws[i].parameter for i in members]),
        step=per_block([draws[i].step for i in members]),
    )
    values = torch.stack(_four_normals(blocks, shared, dtype), dim=-1).flatten()
    for i, piece in zip(members, values.split([_LANES * n for n in block_counts]), strict=True):
        yield i, piece[: parameters[i].numel()].view(parameters[i].shape)


def normal_at(index: Tensor, draw: Draw, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The standard normals of the elements numbered ``index`` (int64, any shape): for slices that are not runs."""
    lanes = torch.stack(_four_normals(index // _LANES, draw, dtype), dim=-1)
    return lanes.gather(-1, (index % _LANES).unsqueeze(-1)).squeeze(-1)


def _four_normals(blocks: Tensor, draw: Draw, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    step = draw.step & _MASK
    source = source_word(draw.stream, draw.sample)
    key = (draw.seed & _MASK, (draw.seed >> 32) & _MASK)
    words = philox4x32((blocks, draw.parameter, step, source), key)
    return (*_box_muller(words[0], words[1], dtype), *_box_muller(words[2], words[3], dtype))


def source_word(stream: Stream, sample: Any) -> Any:
    """The last word of the counter: who draws, and which sample; a tensor for several samples."""
    return (int(stream) << 30) | sample


def _box_muller(radius_word: Tensor, angle_word: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two independent standard normals from two words.

    The radius word is shifted by a half, so that its logarithm is finite (|z| stays under 6.8). The angle word is
    read as a signed number in [−π, π), where float32 keeps the most digits.
    """
    uniform = radius_word.to(dtype).mul_(2.0**-32).add_(2.0**-33)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    signed = torch.where(angle_word >= 2**31, angle_word - 2**32, angle_word)
    angle = signed.to(dtype).mul_(math.pi * 2.0**-31)
    return radius * angle.cos(), radius * angle.sin()

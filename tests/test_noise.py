"""The generator: known answers, moments, and that a normal depends on its address alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vprop.noise import Draw, Stream, normal, normal_at, normals_like, philox4x32, portable_normal

ONES = 0xFFFFFFFF
# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def naive_philox(counter, key):
    """Philox4x32-10 on Python integers, from its definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & ONES, (p0 >> 32) ^ c[3] ^ k[1], p0 & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@settings(max_examples=50)
@given(
    index=st.integers(0, 2**34 - 1),
    parameter=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**40),
    sample=st.integers(0, 2**30 - 1),
    seed=st.integers(0, 2**64 - 1),
    stream=st.sampled_from(list(Stream)),
)
def test_normal_from_its_definition(index, parameter, step, sample, seed, stream):
    words = naive_philox(
        (index // 4, parameter, step & ONES, (stream << 30) | sample), (seed & ONES, (seed >> 32) & ONES)
    )
    lane = index % 4
    radius_word, angle_word = words[lane // 2 * 2], words[lane // 2 * 2 + 1]
    radius = math.sqrt(-2 * math.log((radius_word + 0.5) / 2**32))
    angle = 2 * math.pi * angle_word / 2**32
    expected = radius * (math.sin(angle) if lane % 2 else math.cos(angle))
    draw = Draw(seed, parameter, step, sample, stream)
    assert float(normal(index, index + 1, draw, dtype=torch.float64)) == pytest.approx(expected, abs=1e-8)
    assert float(normal_at(torch.tensor(index), draw)) == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize("generate", [normal, portable_normal])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 4), (5, 777), (2**17 - 3, 2**17 + 9)])
def test_any_slice_without_the_rest(generate, start, stop):
    draw = Draw(seed=5, parameter=2, step=9, sample=1)
    whole = generate(0, 2**17 + 50, draw)
    assert torch.equal(generate(start, stop, draw), whole[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 4), (5, 777), (2**17 - 3, 2**17 + 9)])
def test_single_elements(start, stop):
    draw = Draw(seed=5, parameter=2, step=9, sample=1)
    index = torch.arange(start, stop).flip(0)
    assert torch.equal(normal_at(index, draw), portable_normal(start, stop, draw).flip(0))


@pytest.mark.parametrize("portable", [False, True])
def test_many_parameters_share_calls_without_changing_a_number(portable):
    shapes = [(3, 5), (), (0,), (7,), (2**17 + 1,), (2, 2, 2), (2**16, 2), (1,)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    parameters = [torch.zeros(shape, dtype=dtypes[i % 3]) for i, shape in enumerate(shapes)]
    draws = [Draw(seed=i % 2, parameter=i, step=10 + i // 4) for i in range(len(shapes))]
    noises = dict(normals_like(parameters, draws, portable=portable))
    generate = portable_normal if portable else normal
    assert sorted(noises) == list(range(len(shapes)))
    for i, (parameter, draw) in enumerate(zip(parameters, draws, strict=True)):
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        assert noises[i].shape == parameter.shape
        assert torch.equal(noises[i], generate(0, parameter.numel(), draw, dtype=dtype).view(parameter.shape))


def test_the_step_may_be_a_tensor():
    parameters = [torch.zeros(9), torch.zeros(6)]
    as_int = dict(normals_like(parameters, [Draw(1, 0, 4), Draw(1, 1, 4)]))
    as_tensor = dict(normals_like(parameters, [Draw(1, 0, torch.tensor(4)), Draw(1, 1, torch.tensor(4))]))
    assert all(torch.equal(as_int[i], as_tensor[i]) for i in (0, 1))


def test_moments():
    """False-alarm rate: each bound is 5 standard errors, about 6e-7 each."""
    n = 1_000_000
    z = normal(0, n, Draw(seed=11, parameter=0, step=0)).double()
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((z**power).mean()) - expected) < 5 * math.sqrt(variance / n)
    assert abs(float((z[:-1] * z[1:]).mean())) < 5 / math.sqrt(n)
    assert abs(float((z[:-2] * z[2:]).mean())) < 5 / math.sqrt(n)
    sorted_z = z.sort().values
    uniform = torch.special.ndtr(sorted_z)
    ks = float((uniform - (torch.arange(n) + 0.5) / n).abs().max())
    assert ks < 2.8 / math.sqrt(n)  # Kolmogorov's distribution: about 3e-7


@pytest.mark.parametrize(
    "other",
    [
        Draw(seed=2, parameter=3, step=4, sample=5),
        Draw(seed=1 + 2**32, parameter=3, step=4, sample=5),
        Draw(seed=1, parameter=4, step=4, sample=5),
        Draw(seed=1, parameter=3, step=5, sample=5),
        Draw(seed=1, parameter=3, step=4, sample=6),
        Draw(seed=1, parameter=3, step=4, sample=5, stream=Stream.EVALUATION),
        Draw(seed=1, parameter=3, step=4, sample=5, stream=Stream.POSTERIOR),
    ],
)
def test_every_part_of_the_address_counts(other):
    """Correlation of 100,000 independent pairs stays within 5 standard errors."""
    n = 100_000
    z = normal(0, n, Draw(seed=1, parameter=3, step=4, sample=5))
    assert abs(float((z * normal(0, n, other)).mean())) < 5 / math.sqrt(n)

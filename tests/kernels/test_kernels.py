"""All kernels against the portable code: the same noise, and the same step up to rounding."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.checks import (
    CLAMPED_RULES,
    EPS,
    LAYOUTS,
    NOISE,
    RIEMANNIAN_RULES,
    STEP,
    SUBNORMAL,
    UNIT,
    Problem,
    check_step,
    compiled,
    pair_radius,
    portable_normals,
    problem,
    reconciled,
    row_normals,
    triton,
    width,
)
from vprop import noise as portable
from vprop.functional import diagonal
from vprop.kernels import call
from vprop.kernels.call import Curvature, Rule
from vprop.kernels.table import TILE, Role

COMPILED, TRITON = ([pytest.param(v, id=name) for name, v in found.items()] for found in (compiled(), triton()))
each_version = pytest.mark.parametrize("kernels", COMPILED + TRITON)


def for_each_version(examples: int, **strategies):
    """A test for all kernels, and one for Triton's: with fewer examples in its interpreter, which is slow.

    Every ``dtype`` is one that the kernels have.
    """

    def pair(check):
        tests = []
        for versions in (COMPILED, TRITON):
            slow = any(version.values[0].slow for version in versions)
            dtypes = st.sampled_from(versions[0].values[0].dtypes if versions else (torch.float32,))
            chosen = {name: dtypes if name.endswith("dtype") else wanted for name, wanted in strategies.items()}
            limits = {"max_examples": examples // 6, "phases": [Phase.generate]} if slow else {"max_examples": examples}
            tests.append(pytest.mark.parametrize("kernels", versions)(settings(**limits)(given(**chosen)(check))))
        return tests

    return pair


def test_the_constants_are_the_same():
    assert call.LEAST_PRECISION == diagonal.LEAST_PRECISION
    assert call.SMALLEST_SIZE == diagonal.SMALLEST_SIZE


# -- noise ---------------------------------------------------------------------------------------------------------


@for_each_version(
    60,
    start=st.one_of(st.integers(0, 70), st.integers(2**31 - 50, 2**31 + 50), st.integers(0, 2**34 - 2000)),
    count=st.integers(0, 1500),
    seed=st.integers(0, 2**64 - 1),
    parameter=st.integers(0, 2**32 - 1),
    step=st.one_of(st.integers(0, 50), st.integers(2**31 - 3, 2**31 + 3), st.integers(0, 2**40)),
    sample=st.integers(0, 2**30 - 1),
    stream=st.sampled_from(list(portable.Stream)),
)
def _check_normals_are_the_portable_ones(kernels, start, count, seed, parameter, step, sample, stream):
    source = (int(stream) << 30) | sample
    ours = kernels.normals(start, start + count, seed=seed, parameter=parameter, step=step, source=source)
    draw = portable.Draw(seed, parameter, step, sample, stream)
    expected = portable_normals(start, start + count, draw)
    # The portable code rounds an angle of up to π to float32 (2⁻²³ at most), the kernel none; both round a few times
    # more in sine and logarithm. The radius that this is multiplied with is at most 6.8, and mostly below 3.
    radius = pair_radius(start, count, draw)
    assert bool(((ours - expected).abs() <= 5e-7 * radius.clamp_min(0.01)).all())


test_normals_are_the_portable_ones, test_normals_are_the_portable_ones_in_triton = _check_normals_are_the_portable_ones


@each_version
def test_many_normals(kernels):
    """Also the rare words: a million normals, of which some have u near 0 and near 1."""
    draw, count = portable.Draw(11, 3, 4), 2**16 if kernels.slow else 2**20
    ours, expected = kernels.normals(0, count, seed=11, parameter=3, step=4), portable_normals(0, count, draw)
    assert bool(((ours - expected).abs() <= 5e-7 * pair_radius(0, count, draw).clamp_min(1e-6)).all())
    assert float(ours.abs().max()) < 6.8
    assert abs(float(ours.double().mean())) < 5 / math.sqrt(count)
    assert abs(float(ours.double().square().mean()) - 1) < 5 * math.sqrt(2 / count)


@each_version
def test_any_slice_without_the_rest(kernels):
    whole = kernels.normals(0, 2**17 + 50)
    for start, stop in [(0, 0), (3, 4), (5, 777), (2**17 - 3, 2**17 + 9)]:
        assert torch.equal(kernels.normals(start, stop), whole[start:stop])


# -- steps ---------------------------------------------------------------------------------------------------------


@each_version
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("curvature", Curvature)
def test_every_kind_of_step(kernels, curvature, rule):
    for momentum, prior, clips, maximize, sampled, floor, forgets in kernels.choices(7):
        step = replace(
            STEP,
            noise=replace(NOISE, sign=-1 if maximize else 1),
            curvature=curvature,
            rule=rule,
            sampled=sampled,
            clip_radius=1.5 if clips else math.inf,
            grad_sign=-1 if maximize else 1,
            betas=(0.9 if momentum else 0.0, 0.95),
            start_weight=0.1 if forgets and rule in CLAMPED_RULES else 1.0,
            gradient_scale=7.0,
        )
        floors = [0.4, 0.03] if floor else None
        check_step(kernels, problem([(2, 9), (37,)], momentum=momentum, prior=prior, floors=floors), step)


@each_version
@pytest.mark.parametrize("count", [1, 2, 40, 100_000])
@pytest.mark.parametrize("start_weight", [0.0, 0.002, 0.5])
def test_an_average_that_forgets_its_start(kernels, count, start_weight):
    step = replace(STEP, start_weight=start_weight, betas=(0.9, 0.999))
    check_step(kernels, problem([(40,)], counts=[count], momentum=True), step)


@each_version
def test_a_floor_bounds_the_samples(kernels):
    """Where h+δ is below it, σ is that of the floor; and the same number is taken out again."""
    given = problem([(300,)], floors=[2.0])
    ours = given.copy(kernels.device)
    kernels.perturb(ours.table(), NOISE, 1)
    normals = row_normals(kernels, given, 0, NOISE, given.counts[0])
    moved = ours.row(0)[Role.WEIGHT] - given.row(0)[Role.WEIGHT]
    torch.testing.assert_close(moved, normals / math.sqrt(2.0 * NOISE.ess), rtol=1e-4, atol=1e-5)
    kernels.perturb(ours.table(), NOISE, -1)
    torch.testing.assert_close(ours.row(0)[Role.WEIGHT], given.row(0)[Role.WEIGHT], rtol=0, atol=1e-6)


shapes = st.lists(
    st.one_of(
        st.lists(st.integers(0, 6), max_size=4).map(tuple),
        st.integers(0, 70).map(lambda n: (n,)),
        st.sampled_from([(TILE + 3,), (2, TILE), (TILE - 1,), (17, 31), (3, 520)]),
    ),
    min_size=1,
    max_size=4,
)


@for_each_version(
    40,
    shapes=shapes,
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=5),
    dtype=...,
    grad_dtype=...,
    momentum=st.booleans(),
    prior=st.booleans(),
    sampled=st.booleans(),
    source=st.sampled_from([5, 2**31 + 1]),
    curvature=st.sampled_from(Curvature),
    rule=st.sampled_from(Rule),
    clips=st.booleans(),
    first_step=st.sampled_from([0, 5, 2**31 - 4, 2**32 - 4]),
    betas=st.sampled_from([(0.9, 0.95), (0.2, 0.3), (0.5, 0.5), (0.9, 0.0)]),
    data=st.data(),
)
def _check_shapes_strides_and_types(
    kernels, shapes, layouts, dtype, grad_dtype, momentum, prior, sampled, source, curvature, rule, clips,
    first_step, betas, data,
):  # fmt: skip
    grad_less = data.draw(st.sets(st.sampled_from(range(len(shapes)))))
    given = problem(
        shapes,
        layouts=layouts,
        dtype=dtype,
        grad_dtype=grad_dtype,
        momentum=momentum,
        prior=prior,
        without_grad=grad_less,
        first_step=first_step,
    )
    step = replace(
        STEP,
        noise=replace(NOISE, source=source),
        curvature=curvature,
        rule=rule,
        sampled=sampled,
        clip_radius=2.0 if clips else math.inf,
        betas=betas,
    )
    check_step(kernels, given, step)


test_shapes_strides_and_types, test_shapes_strides_and_types_in_triton = _check_shapes_strides_and_types


@each_version
@pytest.mark.parametrize("role", [Role.GRAD, Role.OTHER])
@pytest.mark.parametrize("clip_radius", [math.inf, 0.5])
def test_an_unusable_element_is_left_out(kernels, role, clip_radius):
    for curvature, rule, momentum in itertools.product(Curvature, Rule, (False, True)):
        if role == Role.OTHER and curvature not in (Curvature.PAIR, Curvature.GIVEN):
            continue
        given = problem([(41,), (5, 3)], momentum=momentum)
        bad = {0: math.nan, 17: math.inf, 40: -math.inf}
        given.roles[role][0][list(bad)] = torch.tensor(list(bad.values()))
        step = replace(STEP, curvature=curvature, rule=rule, clip_radius=clip_radius, sampled=False)
        after = given.copy(kernels.device)
        table = after.table()
        kernels.step(table, step)
        if clip_radius == math.inf:
            check_step(kernels, given, step)
        if role == Role.OTHER and curvature == Curvature.GIVEN and rule not in RIEMANNIAN_RULES:
            del bad[40]  # an estimate of −∞ is clamped to zero, by the portable code too
        assert int(table.unusable.sum()) == len(bad)
        for kept in {Role.WEIGHT, Role.HESS, Role.MOMENTUM} & set(given.roles):
            ours, before = after.roles[kept][0].cpu(), given.roles[kept][0]
            assert torch.equal(ours[list(bad)], before[list(bad)])
            assert torch.isfinite(ours).all()


@each_version
@pytest.mark.parametrize("rule", CLAMPED_RULES)
def test_an_element_without_prior_keeps_its_last_curvature(kernels, rule):
    """Whatever the step divides by: without any precision the next sample would be infinite."""
    given = problem([(40,)])
    given.roles[Role.GRAD][0][17] = 0
    step = replace(STEP, noise=replace(NOISE, damping=0.0), rule=rule, betas=(0.0, 0.0), sampled=False)
    after = given.copy(kernels.device)
    table = after.table()
    kernels.step(table, step)
    assert int(table.unusable.sum()) == 1
    for kept in (Role.WEIGHT, Role.HESS):
        assert after.roles[kept][0][17] == given.roles[kept][0][17]


@each_version
@pytest.mark.parametrize("rule", Rule)
def test_a_parameter_that_never_took_part(kernels, rule):
    """Its count is zero, and so is what its averages would be divided by."""
    given = problem([(9,), (5,)], momentum=True, counts=[0, 1], without_grad={0})
    check_step(kernels, given, replace(STEP, rule=rule))


@each_version
def test_lr_can_be_a_tensor(kernels):
    check_step(kernels, problem([(33,)]), replace(STEP, lr=torch.tensor(0.05)))


# -- samples -------------------------------------------------------------------------------------------------------


@for_each_version(
    40,
    shapes=shapes,
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4),
    dtype=...,
    prior=st.booleans(),
    sign=st.sampled_from([-1, 1]),
)
def _check_a_sample_and_back(kernels, shapes, layouts, dtype, prior, sign):
    given, noise = problem(shapes, layouts=layouts, dtype=dtype, prior=prior), replace(NOISE, sign=sign)
    ours = given.copy(kernels.device)
    table = ours.table()
    kernels.perturb(table, noise, 1)
    for i in range(len(shapes)):
        row, before = ours.row(i), given.row(i)
        mean = reconciled(given, i) if dtype != torch.float32 else before[Role.WEIGHT]
        sigma, _ = width(before, noise)
        offset = sign * sigma * row_normals(kernels, given, i, noise, given.counts[i])
        error = EPS * (mean.abs() + offset.abs())
        if dtype != torch.float32:
            assert torch.equal(row[Role.MEAN], mean)
            error += UNIT[dtype] * (mean + offset).abs() + SUBNORMAL[dtype]
        assert bool(((row[Role.WEIGHT] - mean - offset).abs() <= error).all())
    sampled = ours.copy()
    kernels.perturb(table, noise, -1)
    for i, before in enumerate(given.roles[Role.WEIGHT]):
        restored = ours.roles[Role.WEIGHT][i].cpu()
        if dtype != torch.float32:
            assert torch.equal(restored, ours.roles[Role.MEAN][i].cpu().to(dtype))
        else:
            # Rounded twice, at the size of the sample and at that of the mean.
            size = sampled.roles[Role.WEIGHT][i].cpu().abs() + before.abs()
            assert bool(((restored - before).abs() <= UNIT[dtype] * size).all())


test_a_sample_and_back, test_a_sample_and_back_in_triton = _check_a_sample_and_back


@for_each_version(
    30,
    shapes=shapes,
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4),
    dtype=...,
    prior=st.booleans(),
    curvature=st.sampled_from(Curvature),
    rule=st.sampled_from(Rule),
    data=st.data(),
)
def _check_steps_take_out_what_samples_put_in(kernels, shapes, layouts, dtype, prior, curvature, rule, data):
    """Whether the sample is taken out by the step or before it."""
    grad_less = data.draw(st.sets(st.sampled_from(range(len(shapes)))))
    given = problem(shapes, layouts=layouts, dtype=dtype, prior=prior, without_grad=grad_less).copy(kernels.device)
    before = replace(given, counts=[n - (i not in grad_less) for i, n in enumerate(given.counts)])
    kernels.perturb(before.table(), NOISE, 1)
    step = replace(STEP, curvature=curvature, rule=rule)

    fused, single = given.copy(), given.copy()
    kernels.step(fused.table(), step)
    kernels.perturb(replace(single, counts=before.counts).table(), NOISE, -1)
    kernels.step(single.table(), replace(step, sampled=False))
    for role, tensors in fused.roles.items():
        for ours, other in zip(tensors, single.roles[role], strict=True):
            assert torch.equal(ours, other), role


test_steps_take_out_what_samples_put_in, test_steps_take_out_what_samples_put_in_in_triton = (
    _check_steps_take_out_what_samples_put_in
)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param(version.values[0], dtype, id=f"{version.id}-{dtype}")
        for version in COMPILED + TRITON
        for dtype in version.values[0].dtypes
        if dtype != torch.float32
    ],
)
def test_half_precision_is_torchs(kernels, dtype):
    """Every 16-bit pattern becomes a mean; every kind of float32 becomes a weight."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    mean, hess = torch.full((2**16,), math.nan), torch.ones(2**16)
    given = Problem({Role.WEIGHT: [every], Role.HESS: [hess], Role.MEAN: [mean]}, [0], [0]).copy(kernels.device)
    kernels.perturb(given.table(), NOISE, 1)
    mean = given.roles[Role.MEAN][0].cpu()
    torch.testing.assert_close(mean, every.float(), rtol=0, atol=0, equal_nan=True)

    patterns = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(0)).int()
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 3.4e38])
    ties = every.float() * (1 + UNIT[dtype])
    values = torch.cat([patterns.view(torch.float32), edges, -edges, ties, torch.randn(1000) * 2.0**-15])
    given = Problem(
        {Role.WEIGHT: [values.to(dtype)], Role.HESS: [torch.ones_like(values)], Role.MEAN: [values]}, [0], [0]
    ).copy(kernels.device)
    weight = given.roles[Role.WEIGHT][0].zero_()
    kernels.perturb(given.table(), NOISE, -1)
    torch.testing.assert_close(weight.cpu(), values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param(version.values[0], dtype, id=f"{version.id}-{dtype}")
        for version in COMPILED + TRITON
        for dtype in version.values[0].dtypes
        if dtype != torch.float32
    ],
)
@pytest.mark.parametrize("curvature", Curvature)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_state_is_kept_in_another_dtype_than_computed_with(kernels, dtype, curvature, weight_dtype):
    """Bit for bit what float32 state would become, rounded when it is written; also of a row that takes no part."""
    shapes = [(3, 50 if kernels.slow else 700), (37,), (2, 9), (5,)]
    given = problem(shapes, layouts=LAYOUTS, dtype=weight_dtype, momentum=True, prior=True, without_grad={1, 3})
    kept = (Role.HESS, Role.MOMENTUM)
    narrow = given.copy()
    for role in kept:
        narrow.roles[role] = [torch.empty_like(t, dtype=dtype).copy_(t) for t in given.roles[role]]
    wide = narrow.copy()
    for role in kept:
        wide.roles[role] = [
            torch.empty_like(t).copy_(n) for t, n in zip(given.roles[role], narrow.roles[role], strict=True)
        ]
    narrow, wide = narrow.copy(kernels.device), wide.copy(kernels.device)
    for one in (narrow, wide):
        table = one.table()
        assert table.dtypes[Role.HESS] == one.roles[Role.HESS][0].dtype
        before = [t.clone() for role in kept for t in one.roles[role]]
        kernels.perturb(table, NOISE, 1)
        assert all(map(torch.equal, before, [t for role in kept for t in one.roles[role]]))
        kernels.step(table, replace(STEP, curvature=curvature))
    for role, tensors in narrow.roles.items():
        for i, (ours, theirs) in enumerate(zip(tensors, wide.roles[role], strict=True)):
            assert torch.equal(ours, theirs.to(ours.dtype)), (role, i)
    moved = (narrow.roles[Role.HESS][0].cpu() != given.roles[Role.HESS][0].to(dtype)).float().mean()
    assert moved > 0.5  # not too coarse to say anything


@each_version
def test_no_row_and_no_element(kernels):
    kernels.step(problem([(0,), (3, 0)]).copy(kernels.device).table(), STEP)
    kernels.perturb(problem([(0,)], dtype=torch.bfloat16).copy(kernels.device).table(), NOISE, 1)


@each_version
@pytest.mark.parametrize("curvature", [Curvature.SQUARE, Curvature.PRICE])
def test_a_part_of_a_parameter_has_the_noise_of_its_place_in_the_whole(kernels, curvature):
    """Bit for bit: a part begins at any multiple of four, and ends anywhere."""
    whole = problem([(TILE + 50,)], momentum=True)
    ends = [0, 24, TILE + 4, TILE + 50]
    pieces = list(itertools.pairwise(ends))
    parts = replace(
        whole,
        roles={role: [ts[0][a:b].clone() for a, b in pieces] for role, ts in whole.roles.items()},
        counts=whole.counts * len(pieces),
        numbers=whole.numbers * len(pieces),
        first_blocks=[a // 4 for a, _ in pieces],
    )
    step = replace(STEP, curvature=curvature, sampled=True, betas=(0.9, 0.95))
    done = []
    for case in (whole.copy(kernels.device), parts.copy(kernels.device)):
        kernels.perturb(case.table(), step.noise, 1)
        sample = torch.cat(case.roles[Role.WEIGHT]).clone()
        kernels.step(case.table(), step)
        done.append([sample] + [torch.cat(case.roles[role]) for role in (Role.WEIGHT, Role.HESS, Role.MOMENTUM)])
    for of_whole, of_parts in zip(*done, strict=True):
        assert torch.equal(of_whole, of_parts)

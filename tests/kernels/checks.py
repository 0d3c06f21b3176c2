"""What kernels should do, worked out with the portable code, for the tests of all kernels.

Steps are compared with ``functional/diagonal.py`` in float64, which gets the kernel's own normals; those are compared
with ``noise.py`` separately. What may differ is then float32's rounding, and how far it can move a result is worked out
beside the result (:func:`reference`): every operation may be off by ``EPS`` of its largest operand.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vprop import noise as portable
from vprop.functional import diagonal
from vprop.kernels import cpu
from vprop.kernels.call import Curvature, Noise, Rule, Step
from vprop.kernels.table import Role, Table

EPS = 8 * 2.0**-24
"""Eight roundings: no chain of operations between two sums is longer."""
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUBNORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
ORDER = {"AVX512": 0, "AVX2": 1}


@dataclass
class Kernels:
    """One version of the kernels, and where its tensors must be."""

    library: Any
    device: str = "cpu"
    slow: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

    def choices(self, number: int) -> Iterable[tuple[bool, ...]]:
        """All combinations of yes and no; of slow kernels only some, among which any two have all combinations."""
        if not self.slow:
            return itertools.product((False, True), repeat=number)
        basis = itertools.product((False, True), repeat=3)
        return [(a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c)[:number] for a, b, c in basis]

    def perturb(self, table: Table, noise: Noise, direction: int) -> None:
        self.library.perturb(table, noise, direction)

    def step(self, table: Table, step: Step) -> None:
        self.library.step(table, step)

    def normals(self, start: int, stop: int, *, seed=5, parameter=2, step=9, source=0) -> torch.Tensor:
        out = torch.empty(stop - start, device=self.device)
        self.library.normal(out, start, seed=seed, parameter=parameter, step=step, source=source)
        return out.cpu()


def compiled() -> dict[str, Kernels]:
    """The CPU's, for each instruction set that this one has."""
    first = ORDER.get(torch.backends.cpu.get_cpu_capability(), 2)
    names = [name for name in cpu.INSTRUCTION_SETS[first:] if cpu.path_of(name).exists()]
    return {name: Kernels(cpu.Library(cpu.path_of(name))) for name in names}


def triton() -> dict[str, Kernels]:
    """Triton's, on a GPU or else in its interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None or not (interpreted or torch.cuda.is_available()):
        return {}
    from vprop.kernels import cuda

    if not interpreted:  # slow, too: every combination is compiled
        return {"triton": Kernels(cuda, "cuda", slow=True)}
    # The interpreter cuts a float32 off where the GPU rounds it to bfloat16: that is for the tests on a GPU.
    return {"triton": Kernels(cuda, slow=True, dtypes=(torch.float32, torch.float16))}


def portable_normals(start, stop, draw):
    return portable.portable_normal(start, stop, draw)


def pair_radius(start, count, draw):
    first = start - start % 2
    values = portable_normals(first, start + count + 2, draw)
    values = values[: values.numel() // 2 * 2]
    radius = values.view(-1, 2).norm(dim=1).repeat_interleave(2)
    return radius[start - first : start - first + count]


# -- tables --------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Tensors of a table by role, which the kernel writes to."""

    roles: dict[Role, list[torch.Tensor]]
    counts: list[int]
    numbers: list[int]
    without_grad: set[int] = field(default_factory=set)
    first_step: int = 0
    first_blocks: list[int] | None = None
    floors: list[float] | None = None

    def floor(self, i: int) -> float:
        return 0.0 if self.floors is None else self.floors[i]

    def table(self) -> Table:
        steps = torch.tensor(self.counts, device=self.roles[Role.WEIGHT][0].device)
        table = Table(self.numbers, self.roles, steps, self.first_blocks)
        table.first_step = self.first_step
        table.floors.copy_(torch.tensor([self.floor(i) for i in range(table.rows)]))
        for row in self.without_grad:
            table.columns[Role.GRAD, row] = 0
        return table

    def copy(self, device: str | None = None) -> Problem:
        return replace(self, roles={role: [copied(t, device) for t in ts] for role, ts in self.roles.items()})

    def row(self, i: int) -> dict[Role, torch.Tensor]:
        """In float64 and in the order of the elements."""
        return {role: tensors[i].cpu().double().flatten() for role, tensors in self.roles.items()}


def copied(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """With the same strides, offset and unused places in between."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    whole = whole.clone() if device is None else whole.to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


LAYOUTS = ("contiguous", "shifted", "permuted", "sliced")


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "permuted":
        backwards = tuple(reversed(range(values.dim())))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == "sliced" and values.dim():
        room = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 7.0, dtype=values.dtype)
        return room[..., 1::2].copy_(values)
    return (
        torch.full((values.numel() + 1,), 7.0, dtype=values.dtype)[int(layout != "contiguous") :][: values.numel()]
        .view(values.shape)
        .copy_(values)
    )


def problem(
    shapes,
    *,
    layouts=("contiguous",),
    dtype=torch.float32,
    grad_dtype=torch.float32,
    momentum=False,
    prior=False,
    seed=0,
    counts=None,
    **others,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    layout = itertools.cycle(layouts)

    def tensors(make, dtype=torch.float32):
        return [laid_out(make(shape).to(dtype), next(layout)) for shape in shapes]

    def normal(shape):
        return torch.randn(shape, generator=generator)

    def positive(shape):
        return torch.rand(shape, generator=generator) + 0.01

    roles = {
        Role.WEIGHT: tensors(normal, dtype),
        Role.HESS: tensors(lambda shape: positive(shape) * torch.randint(0, 2, shape, generator=generator)),
        Role.GRAD: tensors(normal, grad_dtype),
        Role.OTHER: tensors(normal),
    }
    if momentum:
        roles[Role.MOMENTUM] = tensors(normal)
    if prior:
        roles[Role.PRIOR_MEAN], roles[Role.PRIOR_PRECISION] = tensors(normal), tensors(positive)
    if dtype != torch.float32:
        roles[Role.MEAN] = []
        for i, weight in enumerate(roles[Role.WEIGHT]):
            # Half of them within the rounding of the weights, half of them somewhere else.
            near = weight.float() * (1 + 0.1 * UNIT[dtype])
            mean = torch.where(torch.rand(weight.shape, generator=generator) < 0.5, near, normal(weight.shape))
            roles[Role.MEAN].append(laid_out(mean, layouts[i % len(layouts)]))
    return Problem(roles, counts or [3 + i for i in range(len(shapes))], [10 + i for i in range(len(shapes))], **others)


NOISE = Noise(seed=2**40 + 77, source=5, sign=1, ess=50.0, damping=0.02)
STEP = Step(
    noise=NOISE,
    sampled=True,
    curvature=Curvature.SQUARE,
    scale=0.7,
    rule=Rule.CLAMPED,
    lr=0.1,
    betas=(0.9, 0.95),
    clip_radius=math.inf,
    grad_sign=1,
)


# -- what should come out ------------------------------------------------------------------------------------------


def row_normals(kernels, problem, i, noise, step):
    size = problem.roles[Role.WEIGHT][i].numel()
    normals = kernels.normals(
        0, size, seed=noise.seed, parameter=problem.numbers[i], step=step & 0xFFFFFFFF, source=noise.source
    )
    return normals.double()


ROOT_RULES = (Rule.CLAMPED_ROOT, Rule.RIEMANNIAN_ROOT)
RIEMANNIAN_RULES = (Rule.RIEMANNIAN, Rule.RIEMANNIAN_ROOT, Rule.RIEMANNIAN_IDENTITY)
CLAMPED_RULES = (Rule.CLAMPED, Rule.CLAMPED_ROOT, Rule.CLAMPED_IDENTITY)
IDENTITY_RULES = (Rule.CLAMPED_IDENTITY, Rule.RIEMANNIAN_IDENTITY)


def width(row, noise, floor=0.0):
    """σ, and δ."""
    damping = row[Role.PRIOR_PRECISION] / noise.ess if Role.PRIOR_PRECISION in row else noise.damping
    return diagonal.variance(row[Role.HESS], noise.ess, damping, floor).sqrt(), damping


def reconciled(problem, i):
    weight, mean = problem.roles[Role.WEIGHT][i], problem.roles[Role.MEAN][i]
    return torch.where(mean.to(weight.dtype) == weight, mean, weight.float()).double().flatten()


def mean_before(kernels, problem, i, step):
    """μ at the start of a step, and how far rounding can move it."""
    row, takes_part = problem.row(i), i not in problem.without_grad
    if Role.MEAN in row:
        mean = row[Role.MEAN] if step.sampled else reconciled(problem, i)
        return mean, torch.zeros_like(mean)
    if not step.sampled:
        return row[Role.WEIGHT], torch.zeros_like(row[Role.WEIGHT])
    sigma, _ = width(row, step.noise, problem.floor(i))
    count = problem.first_step + problem.counts[i] - takes_part
    offset = step.noise.sign * sigma * row_normals(kernels, problem, i, step.noise, count)
    return row[Role.WEIGHT] - offset, EPS * (row[Role.WEIGHT].abs() + offset.abs())


def estimates(kernels, problem, i, step):
    """ĝ and ĥ."""
    row = problem.row(i)
    grad, other = step.grad_sign * row[Role.GRAD], row[Role.OTHER]
    if step.curvature == Curvature.SQUARE:
        return grad, step.scale * grad.square()
    if step.curvature == Curvature.PAIR:
        return (grad + other) / 2, step.scale * ((other - grad) / 2).square()
    if step.curvature == Curvature.GIVEN:
        return grad, step.scale * other
    sigma, _ = width(row, step.noise, problem.floor(i))
    normals = row_normals(kernels, problem, i, step.noise, problem.first_step + problem.counts[i] - 1)
    return grad, grad * step.noise.sign * normals / sigma


@dataclass
class Expected:
    """Each result, and how far float32 can be from it."""

    results: dict[Role, tuple[torch.Tensor, torch.Tensor]]
    unusable: int = 0
    fewest_clipped: int = 0
    most_clipped: int = 0


def reference(kernels, problem, i, step) -> Expected:
    row, takes_part = problem.row(i), i not in problem.without_grad
    mean, mean_error = mean_before(kernels, problem, i, step)
    expected = Expected({})
    for role in {Role.HESS, Role.MOMENTUM} & set(row):
        expected.results[role] = (row[role], torch.zeros_like(row[role]))
    if takes_part:
        mean, mean_error = _after_update(kernels, problem, i, step, mean, mean_error, expected)
    if Role.MEAN in row:
        expected.results[Role.MEAN] = (mean, mean_error)
    dtype = problem.roles[Role.WEIGHT][i].dtype
    rounding = 0 if dtype == torch.float32 else UNIT[dtype] * (mean.abs() + mean_error) + SUBNORMAL[dtype]
    expected.results[Role.WEIGHT] = (mean, mean_error + rounding)
    return expected


def _after_update(kernels, problem, i, step, mean, mean_error, expected):
    """Fills ``expected`` from one call of the portable step in float64."""
    row, count = problem.row(i), problem.first_step + problem.counts[i]
    _, damping = width(row, step.noise)
    grad, estimate = estimates(kernels, problem, i, step)
    momentum, prior_mean = row.get(Role.MOMENTUM), row.get(Role.PRIOR_MEAN, torch.zeros_like(mean))
    rule = diagonal.vadam_step if step.rule == Rule.VADAM else diagonal.natural_gradient_step
    options = {"riemannian": True} if step.rule in RIEMANNIAN_RULES else {}
    if step.rule != Rule.VADAM:
        options["floor"], options["start_weight"] = problem.floor(i), step.start_weight
        options["gradient_scale"] = step.gradient_scale if step.rule in ROOT_RULES else None
        options["divides"] = step.rule not in IDENTITY_RULES
        options["ess"] = step.noise.ess
    arguments = {
        "step": count, "lr": float(step.lr), "betas": step.betas, "damping": damping, "prior_mean": prior_mean,
        **options,
    }  # fmt: skip
    new = rule(mean, row[Role.HESS], momentum, grad, estimate, clip_radius=step.clip_radius, **arguments)
    free = rule(mean, row[Role.HESS], momentum, grad, estimate, clip_radius=math.inf, **{**arguments, "lr": 1.0})
    direction = mean - free.mean

    # How far float32 can be off.
    hess, weight2 = row[Role.HESS], float(diagonal.newest_weight(step.betas[1], count, step.start_weight))
    old, other = hess.abs(), row[Role.OTHER].abs()
    finite = torch.where(estimate == -math.inf, 0.0, estimate)  # which a clamp makes an exact zero of
    size = finite.abs() + (step.scale * (grad.abs() + other).square() if step.curvature == Curvature.PAIR else 0)
    if step.curvature == Curvature.PRICE:  # of the precision under the root
        size = size * (1 + (old + damping) / (hess + damping).clamp_min(1e-3 * damping))
    hess_error = EPS * (old + size)
    if step.rule in RIEMANNIAN_RULES:
        above = (hess + damping).clamp_min(1e-3 * damping)
        change = weight2 * (size + old)
        hess_error = hess_error + EPS * (damping + change + change.square() / above * (1 + (old + damping) / above))
    debias1 = 1 - step.betas[0] ** count if momentum is not None else 1.0
    terms = (grad.abs() + other + (0 if momentum is None else momentum.abs())) / debias1
    terms = terms + damping * (mean.abs() + prior_mean.abs()) / (debias1 if step.rule == Rule.VADAM else 1.0)
    top_error = EPS * terms + damping * mean_error / (debias1 if step.rule == Rule.VADAM else 1.0)
    if step.rule == Rule.VADAM:
        debias2 = 1 - step.betas[1] ** count
        inside, moved = (new.hess / debias2).sqrt(), (hess_error / debias2).sqrt()
        bottom, bottom_error = inside + damping, moved.square() / (inside + moved + 1e-30)
    elif step.rule in ROOT_RULES:
        pull = damping * (mean - prior_mean)
        new_variance = diagonal.variance(new.hess, step.noise.ess, damping, problem.floor(i))
        inside = ((new.hess / step.gradient_scale).clamp_min(0) + pull.square() + damping**2 * new_variance).sqrt()
        pull_error = EPS * damping * (mean.abs() + prior_mean.abs()) + damping * mean_error
        variance_error = new_variance * (EPS + hess_error / (new.hess + damping).clamp_min(1e-3 * damping))
        moved = (hess_error / step.gradient_scale + 2 * pull.abs() * pull_error + damping**2 * variance_error).sqrt()
        bottom, bottom_error = inside + 1e-8, moved.square() / (inside + moved + 1e-30)
    elif step.rule in IDENTITY_RULES:
        bottom, bottom_error = torch.ones_like(mean), torch.zeros_like(mean)
    else:
        bottom, bottom_error = (new.hess + damping).clamp_min(problem.floor(i)), hess_error
    relative = EPS + bottom_error / bottom
    direction_error = direction.abs() * relative / (1 - relative).clamp_min(0.1) + top_error / bottom
    used = torch.isfinite(new.mean - mean) & torch.isfinite(grad + finite + direction)

    def where_used(error):
        return torch.where(used, error, 0.0)

    lr = abs(float(step.lr))
    step_error = lr * (direction_error + EPS * direction.abs().clamp_max(step.clip_radius))
    step_error = step_error.clamp_max(2 * lr * step.clip_radius)
    if momentum is not None:
        moved = EPS * (momentum.abs() + terms * debias1) + where_used(top_error * debias1)
        expected.results[Role.MOMENTUM] = (new.momentum, where_used(moved))
    expected.results[Role.HESS] = (new.hess, where_used(hess_error))
    expected.unusable = int(new.unusable)
    if step.clips:
        expected.fewest_clipped = int((direction.abs() - direction_error > step.clip_radius).sum())
        expected.most_clipped = int((~(direction.abs() + direction_error <= step.clip_radius)).sum())
    return new.mean, mean_error + where_used(step_error + EPS * new.mean.abs())


def check_step(kernels, problem, step):
    ours = problem.copy(kernels.device)
    table = ours.table()
    kernels.step(table, step)
    expected = [reference(kernels, problem, i, step) for i in range(table.rows)]
    for i, row in enumerate(expected):
        for role, (value, error) in row.results.items():
            difference = (ours.row(i)[role] - value).abs()
            assert bool((difference <= error).all()), (i, role, float((difference - error).max()))
    assert int(table.unusable.sum()) == sum(row.unusable for row in expected)
    clipped = int(table.clipped)
    assert sum(row.fewest_clipped for row in expected) <= clipped <= sum(row.most_clipped for row in expected)
    for role, tensors in ours.roles.items():
        for tensor, before in zip(tensors, problem.roles[role], strict=True):
            assert between(tensor, before), role
            if role in (Role.GRAD, Role.OTHER, Role.PRIOR_MEAN, Role.PRIOR_PRECISION):
                assert torch.equal(tensor.cpu().nan_to_num(), before.nan_to_num())
    return ours


def between(ours, before):
    """Whether nothing was written between the elements of a strided tensor."""
    marks = [copied(tensor, "cpu") for tensor in (ours, before)]
    for tensor in marks:
        tensor.zero_()
    ours, before = (torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in marks)
    return torch.equal(ours, before)

"""Plain loops with the usual additions, against the plain float32 run: to the last bit where arithmetic allows."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.harness import assert_same_run, everything, make_batch, make_model
from tests.integrations.loops import (
    EVERY_WAY,
    LEARNING_RATE,
    OPEN_WAYS,
    WITH_VOGN,
    mean_of,
    precision,
    run,
)
from vprop import IVON, Objective, Vprop

CASTS = 12
"""Roundings on the way from a weight to its gradient in two layers: inputs, weights, biases and outputs of each, the
tanh between them, and as many slopes backwards as there are outputs."""
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


# -- autocast and GradScaler ---------------------------------------------------------------------------------


class CastByHand(nn.Module):
    """The small model with the casts that autocast makes, written out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers, self.dtype = make_model(), dtype

    def forward(self, x):
        first, tanh, last = self.layers
        return self._linear(last, tanh(self._linear(first, x))).float()

    def _linear(self, layer, x):
        return F.linear(x.to(self.dtype), layer.weight.to(self.dtype), layer.bias.to(self.dtype))


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
@pytest.mark.parametrize(("name", "way"), WITH_VOGN)
class TestAutocast:
    def test_casts_the_weights_and_nothing_else(self, name, way, dtype):
        """Noise, mean and curvature are those of float32 weights. VOGN's curvature sums examples in another order."""
        autocast, by_hand = run(name, way, autocast=dtype), run(name, way, model=CastByHand(dtype))
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "VOGN" else {}
        assert_same_run((by_hand[0].layers, by_hand[1]), autocast, **tolerance)
        assert {value.dtype for value in everything(*autocast).values()} == {torch.float32, torch.int64}

    def test_stays_near_the_float32_run(self, name, way, dtype):
        """Gradients are off by ``CASTS`` relative roundings, and so are steps: that share of the way made, at most.

        It is less than half of what another draw of the noise would do.
        """
        path = [mean_of(make_model())]
        plain = run(name, way, after_step=lambda model, *_: path.append(mean_of(model)))
        length = sum(float((after - before).norm()) for before, after in itertools.pairwise(path))
        bound = CASTS * UNIT_ROUNDOFF[dtype] * length
        autocast, other_noise = run(name, way, autocast=dtype), run(name, way, seed=1)
        distances = [float((mean_of(model) - mean_of(plain[0])).norm()) for model, _ in (autocast, other_noise)]
        assert 0 < distances[0] < bound
        assert distances[1] > 2 * bound


def scaler_at(exponent):
    return GradScaler("cpu", init_scale=2.0**exponent)


@pytest.mark.parametrize(("dtype", "unscaled"), [(None, None), (torch.bfloat16, None), (torch.float16, 8)], ids=str)
@pytest.mark.parametrize(("name", "way"), OPEN_WAYS)
def test_a_scaler_changes_nothing(name, way, dtype, unscaled):
    """Scales are powers of two. Without any, float16 would round the smallest slopes, so there it is one of two."""
    reference = run(name, way, autocast=dtype, scaler=None if unscaled is None else scaler_at(unscaled))
    scaler = scaler_at(12)
    assert_same_run(reference, run(name, way, autocast=dtype, scaler=scaler))
    assert scaler.get_scale() == 2.0**12  # no step was skipped


@pytest.mark.parametrize(("name", "way"), OPEN_WAYS)
def test_steps_that_overflow_are_skipped_and_leave_no_trace(name, way):
    """From a scale that float16 cannot hold the scaler comes down by itself; each batch is tried until it fits."""
    scaler, seen = scaler_at(24), []
    wrapped = run(name, way, autocast=torch.float16, scaler=scaler, wrap=lambda model: Watch(model, seen))
    skipped = round(24 - torch.tensor(scaler.get_scale()).log2().item())
    assert skipped >= 3
    assert len(seen) == 5 + skipped
    assert all(torch.equal(seen[0], again) for again in seen[1 : 1 + 3])  # the same sample for each attempt
    assert_same_run(run(name, way, autocast=torch.float16, scaler=scaler_at(8)), wrapped)


class Watch(nn.Module):
    """Writes down what the model returns."""

    def __init__(self, model, seen) -> None:
        super().__init__()
        self.model, self.seen = model, seen

    def forward(self, x):
        self.seen.append(self.model(x))
        return self.seen[-1]


# -- accumulation and clipping -------------------------------------------------------------------------------


def unequal_parts(step):
    (x, y), sizes = make_batch(seed=step), [7, 4, 1]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_micro_batches_of_unequal_size(name, way):
    """Weighted by size they are the batch. Sums in another order: some roundings of gradients, 1e-6 of the steps."""
    assert_same_run(run(name, way), run(name, way, batches=unequal_parts), rtol=1e-4, atol=2e-6)


MAX_NORM, MAX_VALUE = 0.2, 0.03
CLIPS = {
    "norm": (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
        lambda model, grads: [
            grad * (MAX_NORM / (torch.stack([g.norm() for g in grads]).norm() + 1e-6)).clamp(max=1) for grad in grads
        ],
    ),
    "value": (
        lambda model: nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE),
        lambda model, grads: [grad.clamp(-MAX_VALUE, MAX_VALUE) for grad in grads],
    ),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize(("name", "way", "mc_samples"), [(*case, 1) for case in EVERY_WAY] + [("IVON", "closure", 2)])
def test_clipping_is_what_it_is_by_hand(name, way, mc_samples, kind):
    clip, formula = CLIPS[kind]

    def by_hand(model):
        grads = [p.grad for p in model.parameters()]
        for p, grad in zip(model.parameters(), formula(model, grads), strict=True):
            p.grad = grad

    clipped = run(name, way, clip=clip, mc_samples=mc_samples)
    assert_same_run(run(name, way, clip=by_hand, mc_samples=mc_samples), clipped)
    assert not torch.equal(mean_of(clipped[0]), mean_of(run(name, way, mc_samples=mc_samples)[0]))


def test_several_samples_are_clipped_one_by_one_in_their_blocks():
    """As docs/guide.md says; and so it is in a closure, which runs once for each sample."""
    clip, _ = CLIPS["norm"]
    model = make_model()
    optimizer = Vprop(model.parameters(), lr=LEARNING_RATE, num_data=200, mc_samples=2)
    for step in range(5):
        x, y = make_batch(seed=step)
        optimizer.zero_grad()
        for sample in range(2):
            with optimizer.sampled_params(sample):
                F.cross_entropy(model(x), y).backward()
                clip(model)
        optimizer.step()
    assert_same_run(run("Vprop", "closure", clip=clip, mc_samples=2), (model, optimizer))


# -- averages of the weights ---------------------------------------------------------------------------------

DECAY = 0.8
AVERAGES = {
    "ema": ({"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}, lambda means: ema(means)),
    "swa": ({}, lambda means: torch.stack(means).mean(0)),
}


def ema(means):
    average = means[0]
    for mean in means[1:]:
        average = DECAY * average + (1 - DECAY) * mean
    return average


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize(("name", "way"), WITH_VOGN)
def test_averages_are_of_means(name, way, kind):
    """An average of the means that posteriors have, in a run that it does not disturb. Off by five roundings."""
    arguments, formula = AVERAGES[kind]
    means, averaged = [], []

    def average(model, optimizer, step):
        if not averaged:
            averaged.append(AveragedModel(model, **arguments))  # made in the middle of training, hooks and all
        averaged[0].update_parameters(model)

    def note(model, optimizer, step):
        posterior = optimizer.posterior(model)
        means.append(torch.cat([posterior.mean[key].flatten() for key, _ in model.named_parameters()]))

    model, optimizer = run(name, way, after_step=average)
    assert_same_run(run(name, way, after_step=note), (model, optimizer))
    torch.testing.assert_close(mean_of(averaged[0]), formula(means), rtol=5 * 2.0**-23, atol=1e-7)
    posterior = optimizer.posterior(model)
    model.load_state_dict(averaged[0].module.state_dict())
    of_average = optimizer.posterior(model)  # the way to predictions of the average: its mean, this run's variances
    assert all(torch.equal(of_average.mean[key], p) for key, p in averaged[0].module.named_parameters())
    assert all(torch.equal(of_average.variance[key], posterior.variance[key]) for key in posterior.mean)


def test_an_average_in_a_hook_of_the_step():
    averages = []

    def prepare(optimizer):
        params = optimizer.param_groups[0]["params"]
        optimizer.register_step_post_hook(lambda *_: averages.append(torch.cat([p.flatten() for p in params])))

    means = []
    run("Vprop", "attach", prepare=prepare, after_step=lambda model, *_: means.append(mean_of(model)))
    assert all(torch.equal(average, mean) for average, mean in zip(averages, means, strict=True))


def test_update_bn_of_an_average_of_an_attached_model():
    """The statistics are those of the average's weights; the copied hooks do not sample, here or in the original."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = IVON(model.parameters(), num_data=20)
    optimizer.attach(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    loader = [make_batch(seed=step) for step in range(4)]
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(average.module[0].state_dict())
    update_bn(loader, average)
    hidden = torch.stack([average.module[0](x).detach() for x, _ in loader])
    torch.testing.assert_close(average.module[1].running_mean, hidden.mean((0, 1)))
    torch.testing.assert_close(average.module[1].running_var, hidden.var(1).mean(0))
    for state, module in zip(before, (model, average.module[0]), strict=True):
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


# -- schedulers ----------------------------------------------------------------------------------------------

LOSSES = [1.0, 0.5, 0.6, 0.7, 0.4, 0.3]
SCHEDULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),  # cycles β₁ too
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),  # so does this
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def advance(scheduler, step):
    scheduler.step(*([LOSSES[step]] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "way"), [case for case in WITH_VOGN if "context" not in case])
def test_a_schedule_is_lr_and_momentum_set_by_hand(name, way, schedule):
    """To the values that it gives Adam with the same lr and betas."""
    started = []

    def start(optimizer):
        betas = optimizer.param_groups[0]["betas"]
        started.append(SCHEDULES[schedule](optimizer))
        adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=LEARNING_RATE, betas=betas)
        oracle = SCHEDULES[schedule](adam)
        adam.step()
        for step in range(6):
            by_hand.append({key: adam.param_groups[0][key] for key in ("lr", "betas")})
            advance(oracle, step)

    by_hand = []
    scheduled = run(
        name, way, steps=6, prepare=start, after_step=lambda model, optimizer, step: advance(started[0], step)
    )
    assert len({values["lr"] for values in by_hand}) > 1
    assert (len({values["betas"] for values in by_hand}) > 1) == (schedule in ("OneCycleLR", "CyclicLR"))

    def set_by_hand(model, optimizer, step):
        optimizer.param_groups[0].update(by_hand[step + 1] if step < 5 else {})

    reference = run(name, way, steps=6, prepare=lambda o: o.param_groups[0].update(by_hand[0]), after_step=set_by_hand)
    assert_same_run(reference, scheduled)


# -- all together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way"), OPEN_WAYS)
def test_everything_at_once(name, way):
    """Autocast, micro-batches, clipping, a schedule and an average: the same run with a scaler and with evaluations."""
    runs, averages = [], []
    for watched in (False, True):
        scheduler, average = [], []

        def prepare(optimizer, scheduler=scheduler):
            scheduler.append(SCHEDULES["OneCycleLR"](optimizer))

        def after_step(model, optimizer, step, watched=watched, scheduler=scheduler, average=average):
            scheduler[0].step()
            average.append(average[-1] if average else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
            average[-1].update_parameters(model)
            if watched:
                with torch.no_grad(), precision(torch.bfloat16):
                    model.eval()(make_batch()[0])
                model.train()
                optimizer.posterior(model, likelihood="categorical").predict(make_batch()[0], num_samples=2)

        trained = run(
            name,
            way,
            autocast=torch.bfloat16,
            scaler=scaler_at(10) if watched else None,
            batches=unequal_parts,
            clip=CLIPS["norm"][0],
            prepare=prepare,
            after_step=after_step,
        )
        runs.append(trained)
        averages.append(mean_of(average[-1]))
    assert_same_run(*runs)
    assert torch.equal(*averages)


def test_an_objective_under_autocast_is_a_closure_with_autocast_inside():
    """The way to mixed precision where ``step`` is given an objective."""
    model = make_model()
    optimizer = Vprop(model.parameters(), lr=LEARNING_RATE, num_data=200)
    for step in range(5):
        with precision(torch.bfloat16):
            optimizer.step(Objective(model, F.cross_entropy, *make_batch(seed=step)))
    assert_same_run(run("Vprop", "closure", autocast=torch.bfloat16), (model, optimizer))

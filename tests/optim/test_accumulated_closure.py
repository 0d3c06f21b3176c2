"""Closures that add to gradients of other weights are an error, and those that do not are none; held samples."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import Batch, assert_same_run, everything, make_batch, make_model, split
from tests.table import cases
from vprop import Vprop

MICRO_BATCHES = 3


def part_of_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) / MICRO_BATCHES


def set_up(**arguments):
    model = make_model()
    return model, Vprop(model.parameters(), num_data=100, **arguments)


def last_of(model, batches, after=lambda: None):
    """The closure of the last micro-batch, which adds to the gradients of the others."""

    def closure():
        loss = part_of_loss(model, batches[-1])
        loss.backward()
        after()
        return loss

    return closure


# -- wrong sums --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of create_graph
@pytest.mark.parametrize("mc_samples", [1, 2])
@pytest.mark.parametrize("then", ["nothing", "clip", "another backward", "create_graph"])
def test_adding_to_gradients_at_the_mean_is_an_error(mc_samples, then):
    model, optimizer = set_up(mc_samples=mc_samples)
    batches = split(make_batch(), MICRO_BATCHES)
    before = {name: value.clone() for name, value in everything(model, optimizer).items()}

    def closure():
        loss = part_of_loss(model, batches[-1])
        loss.backward(create_graph=then == "create_graph")
        if then == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif then == "another backward":
            part_of_loss(model, batches[1]).backward()
        return loss

    part_of_loss(model, batches[0]).backward()
    with pytest.raises(RuntimeError, match=r"added its gradients to others.*sampled_params\(\).*PosteriorCallback\(\)"):
        optimizer.step(closure)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=1e-6, atol=1e-7)
        assert int(optimizer.state[p]["step"]) == 0


def test_adding_to_the_last_steps_gradients_is_an_error():
    """A closure that never clears."""
    model, optimizer = set_up()
    closure = last_of(model, split(make_batch(), MICRO_BATCHES))
    optimizer.step(closure)
    with pytest.raises(RuntimeError, match=r"Clear the gradients in the closure, with optimizer\.zero_grad\(\)"):
        optimizer.step(closure)


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_a_closure_that_does_nothing_is_an_error(mc_samples):
    model, optimizer = set_up(mc_samples=mc_samples)
    part_of_loss(model, make_batch()).backward()
    with pytest.raises(RuntimeError, match=r"computed neither loss nor gradients.*PosteriorCallback\(\)"):
        optimizer.step(lambda: None)


# -- right sums --------------------------------------------------------------------------------------------------


def held_step(optimizer, model, batches):
    """As a callback does: the sample is put in at the start, and in again after a validation."""
    optimizer.zero_grad()
    for batch in batches[:-1]:
        optimizer.hold_sample()
        part_of_loss(model, batch).backward()
    optimizer.hold_sample()
    optimizer.step(last_of(model, batches))


def context_step(optimizer, model, batches):
    optimizer.zero_grad()
    for batch in batches[:-1]:
        with optimizer.sampled_params():
            part_of_loss(model, batch).backward()
    optimizer.step(last_of(model, batches))


def attached_step(optimizer, model, batches):
    optimizer.zero_grad()
    for batch in batches[:-1]:
        part_of_loss(model, batch).backward()
    optimizer.step(last_of(model, batches))


def whole_step(optimizer, model, batches):
    def closure():
        optimizer.zero_grad()
        losses = [part_of_loss(model, batch) for batch in batches]
        for loss in losses:
            loss.backward()
        return sum(losses)

    optimizer.step(closure)


@pytest.mark.parametrize(("step", "exact"), [(held_step, True), (attached_step, True), (context_step, False)])
@pytest.mark.parametrize("case", cases(at_most_samples=1, any_loop=True))
def test_the_last_micro_batch_may_be_a_closure(case, step, exact):
    """Bit for bit where the sample stays in the weights; else rounded once more per micro-batch."""
    runs = []
    for one in (whole_step, step):
        model = make_model()
        optimizer = case(model.parameters())
        handle = optimizer.attach(model) if one is attached_step else None
        for seed in range(4):
            one(optimizer, model, split(make_batch(seed=seed), MICRO_BATCHES))
        if handle is not None:
            handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs, **({} if exact else {"rtol": 1e-4, "atol": 1e-5}))


def test_a_held_sample_stays_until_step():
    model, optimizer = set_up()
    mean = model[0].weight.detach().clone()
    optimizer.hold_sample()
    sample = model[0].weight.detach().clone()
    optimizer.hold_sample()
    assert torch.equal(model[0].weight, sample)
    assert not torch.allclose(sample, mean, atol=1e-3)
    part_of_loss(model, make_batch()).backward()
    optimizer.step()
    assert optimizer._sampling.is_mean


def test_a_held_sample_is_written_once(monkeypatch):
    """step() takes it over, whatever is called in between to hold it."""
    model, optimizer = set_up()
    batches, writes = split(make_batch(), MICRO_BATCHES), []
    write = optimizer._sampling.write
    monkeypatch.setattr(optimizer._sampling, "write", lambda *what: (writes.append(what), write(*what)))
    held_step(optimizer, model, batches)
    assert len(writes) == 1


def test_a_released_sample_comes_back():
    model, optimizer = set_up()
    mean = model[0].weight.detach().clone()
    optimizer.hold_sample()
    sample = model[0].weight.detach().clone()
    part_of_loss(model, make_batch()).backward()
    optimizer.release_sample()
    torch.testing.assert_close(model[0].weight.detach(), mean)
    optimizer.hold_sample()
    torch.testing.assert_close(model[0].weight.detach(), sample)
    optimizer.step(last_of(model, split(make_batch(), MICRO_BATCHES)))
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_holding_several_samples_is_an_error():
    _, optimizer = set_up(mc_samples=2)
    with pytest.raises(ValueError, match=r"Invalid mc_samples=2: must be 0 or 1 with hold_sample\(\).*closure"):
        optimizer.hold_sample()


@pytest.mark.parametrize("name", ["hold_sample", "release_sample"])
def test_holding_inside_a_sample_is_an_error(name):
    _, optimizer = set_up()
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match=rf"{name}\(\) inside an active sample"):
        getattr(optimizer, name)()


def test_at_the_mean_all_sums_are_right():
    model, optimizer = set_up(mc_samples=0, hess_init=1.0)
    batches = split(make_batch(), MICRO_BATCHES)
    for batch in batches[:-1]:
        part_of_loss(model, batch).backward()
    optimizer.step(last_of(model, batches))
    reference = set_up(mc_samples=0, hess_init=1.0)
    whole_step(reference[1], reference[0], batches)
    assert_same_run(reference, (model, optimizer))


# -- closures that must be left in peace ---------------------------------------------------------------------------


def by_hand(model, in_place):
    for p in model.parameters():
        if in_place and p.grad is not None:
            p.grad.data.zero_()  # without a trace in the version
        elif not in_place:
            p.grad = None


CLEARINGS = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(),
    "optimizer, zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "model, zeros": lambda optimizer, model: model.zero_grad(set_to_none=False),
    "by hand": lambda optimizer, model: by_hand(model, in_place=False),
    "by hand, zeros": lambda optimizer, model: by_hand(model, in_place=True),
}


@pytest.mark.parametrize("where", ["inside", "late", "outside"])
@pytest.mark.parametrize("mc_samples", [1, 2])
@pytest.mark.parametrize("clear", CLEARINGS)
def test_closures_that_clear_in_any_way_are_welcome(clear, mc_samples, where):
    """ "Late" is Lightning's order: forward, clear, backward. "Outside": before step()."""
    runs = []
    for way in ("optimizer", clear):
        model, optimizer = set_up(mc_samples=mc_samples)
        for seed in range(3):
            x, y = make_batch(seed=seed)

            def closure(model=model, optimizer=optimizer, x=x, y=y, way=way):
                if where == "inside":
                    CLEARINGS[way](optimizer, model)
                loss = F.cross_entropy(model(x), y)
                if where == "late":
                    CLEARINGS[way](optimizer, model)
                loss.backward()
                return loss

            if where == "outside":
                CLEARINGS[way](optimizer, model)
            optimizer.step(closure)
        runs.append((model, optimizer))
    assert_same_run(*runs)


def cleared_by_it(optimizer, model, way):
    CLEARINGS[way](optimizer, model)
    return backward_of(model, model, make_batch(), clear=False)


def closures_alike(optimizer, model, way, kind):
    """A closure that looks the same as others that clear in another way: one code object, or one type."""
    if kind == "partial":
        return functools.partial(cleared_by_it, optimizer, model, way)
    if kind == "decorated":
        return torch.enable_grad()(lambda: cleared_by_it(optimizer, model, way))
    return lambda: cleared_by_it(optimizer, model, way)


@pytest.mark.parametrize("kind", ["lambda", "partial", "decorated"])
@pytest.mark.parametrize("way", ["model", "by hand"])
def test_closures_that_look_the_same_may_clear_differently(kind, way):
    model, optimizer = set_up()
    for now in ("optimizer", way, way, "optimizer", "optimizer", way):
        optimizer.step(closures_alike(optimizer, model, now, kind))
    assert int(optimizer.state[model[0].weight]["step"]) == 6


def test_a_closure_that_clears_only_sometimes_is_refused_only_when_it_adds():
    model, optimizer = set_up()
    clears = True

    def closure():
        if clears:
            optimizer.zero_grad()
        return backward_of(model, model, make_batch(), clear=False)

    optimizer.step(closure)
    clears = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match="added its gradients to others"):
            optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    clears = True
    optimizer.step(closure)
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_parameters_that_a_closure_does_not_reach_are_welcome():
    """Cleared in place and not reached: one write to the gradient, which is no addition."""
    model, optimizer = set_up()
    optimizer.step(lambda: backward_of(model, model, make_batch()))

    def only_the_first_layer():
        model.zero_grad(set_to_none=False)
        loss = model[0](make_batch()[0]).square().mean()
        loss.backward()
        return loss

    optimizer.step(only_the_first_layer)
    assert int(optimizer.state[model[0].weight]["step"]) == 2


def backward_of(model, runner, batch, clear=True):
    if clear:
        model.zero_grad()
    loss = F.cross_entropy(runner(batch[0]), batch[1])
    loss.backward()
    return loss


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_are_assigned_are_welcome(in_place):
    """torch.autograd.grad, whose result a closure puts into p.grad itself."""
    runs = []
    for assigned in (False, True):
        model, optimizer = set_up()
        for seed in range(3):
            x, y = make_batch(seed=seed)

            def closure(model=model, x=x, y=y, assigned=assigned):
                if not assigned:
                    return backward_of(model, model, (x, y))
                loss = F.cross_entropy(model(x), y)
                for p, grad in zip(
                    model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    if in_place and p.grad is not None:
                        p.grad.copy_(grad)
                    else:
                        p.grad = grad
                return loss

            optimizer.step(closure)
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_gradients_that_are_only_looked_at_are_welcome():
    """torch.autograd.grad before the gradients are cleared, as for a penalty on the gradient's norm."""
    model, optimizer = set_up()
    for _ in range(3):

        def closure():
            loss = F.cross_entropy(model(make_batch()[0]), make_batch()[1])
            penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, model.parameters(), create_graph=True))
            optimizer.zero_grad()
            (loss + penalty).backward()
            return loss

        optimizer.step(closure)
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_two_backwards_in_one_closure_are_welcome():
    model, optimizer = set_up()
    for seed in range(3):
        whole_step(optimizer, model, split(make_batch(seed=seed), MICRO_BATCHES))
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_a_batch_that_is_skipped_is_welcome():
    """A closure that clears and returns no loss leaves nothing to update from."""
    model, optimizer = set_up()
    optimizer.step(lambda: backward_of(model, model, make_batch()))
    assert optimizer.step(lambda: optimizer.zero_grad()) is None
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_frozen_parameters_with_old_gradients_are_welcome():
    model, optimizer = set_up()
    optimizer.step(lambda: backward_of(model, model, make_batch()))
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer.step(lambda: backward_of(model, model, make_batch()))
    assert int(optimizer.state[model[2].weight]["step"]) == 2


def test_hooks_are_gone_after_the_step_and_do_not_make_a_compiled_model_compile_again():
    torch._dynamo.reset()
    model, optimizer = set_up()
    compilations = 0

    def backend(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    runner = torch.compile(model, backend=backend)
    for seed in range(4):
        optimizer.step(lambda seed=seed: backward_of(model, runner, make_batch(seed=seed)))
    assert compilations == 1
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    torch._dynamo.reset()


@pytest.mark.parametrize("interruption", ["evaluation", "context", "diagnose", "posterior"])
def test_a_held_sample_stays_whatever_is_asked_in_between(interruption):
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    optimizer.hold_sample()
    sample = model[0].weight.detach().clone()
    if interruption == "evaluation":
        with optimizer.sampled_params(train=False):
            assert not torch.equal(model[0].weight, sample)
    elif interruption == "context":
        with optimizer.sampled_params():
            assert torch.equal(model[0].weight, sample)
    elif interruption == "diagnose":
        optimizer.diagnose()
    else:
        mean = optimizer.posterior(model).mean["0.weight"]
        assert not torch.equal(mean, sample)
    torch.testing.assert_close(model[0].weight.detach(), sample, rtol=1e-6, atol=1e-7)
    optimizer.release_sample()
    assert not torch.allclose(model[0].weight.detach(), sample)

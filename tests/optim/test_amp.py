"""Clipping and GradScaler between backward and step; samples inside one autocast block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.amp import GradScaler

from tests.harness import assert_same_run, make_batch, make_model, train
from tests.table import cases
from vprop import Objective, Vprop

ONE_SAMPLE = cases(at_most_samples=1, any_loop=True)


def set_up(case, loop):
    model = make_model()
    optimizer = case(model.parameters())
    handle = optimizer.attach(model) if loop == "attached" else None
    return model, optimizer, handle, GradScaler("cpu", init_scale=2.0**10)


def forward_backward(optimizer, model, loop, scale=lambda loss: loss, batch=None):
    x, y = make_batch() if batch is None else batch
    if loop == "context":
        with optimizer.sampled_params():
            scale(F.cross_entropy(model(x), y)).backward()
    else:
        scale(F.cross_entropy(model(x), y)).backward()


@pytest.mark.parametrize("loop", ["context", "attached"])
def test_clipping_changes_the_step_as_it_does_for_rmsprop(loop):
    """Clipped by a factor c, RMSprop's square_avg of a first step is c² times what it was; so is our h − β₂h₀."""
    beta2, hess_init, fraction = 0.9, 1.0, 0.25
    increments = {}
    for clipped in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, betas=(0.0, beta2), hess_init=hess_init)
        if loop == "attached":
            optimizer.attach(model)
        forward_backward(optimizer, model, loop)
        rmsprop_model = make_model()
        rmsprop = torch.optim.RMSprop(rmsprop_model.parameters(), alpha=beta2)
        for p, q in zip(rmsprop_model.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        if clipped:
            for parameters in (model.parameters(), rmsprop_model.parameters()):
                parameters = list(parameters)
                norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
                torch.nn.utils.clip_grad_norm_(parameters, fraction * float(norm))
        optimizer.step()
        rmsprop.step()
        increments[clipped] = (
            torch.cat([(optimizer.state[p]["hess"] - beta2 * hess_init).flatten() for p in model.parameters()]),
            torch.cat([rmsprop.state[p]["square_avg"].flatten() for p in rmsprop_model.parameters()]),
        )
    for plain, clipped in zip(increments[False], increments[True], strict=True):
        torch.testing.assert_close(clipped, fraction**2 * plain, rtol=1e-3, atol=1e-6)
    for ours, rmsprop_average in increments.values():
        torch.testing.assert_close(ours, 100 * rmsprop_average, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("explicit_unscale", [False, True])
@pytest.mark.parametrize("loop", ["context", "attached"])
@pytest.mark.parametrize("case", ONE_SAMPLE)
def test_grad_scaler_gives_the_unscaled_run(case, loop, explicit_unscale):
    reference = train(case, loop, steps=4)
    model, optimizer, handle, scaler = set_up(case, loop)
    for step in range(4):
        forward_backward(optimizer, model, loop, scaler.scale, make_batch(seed=step))
        if explicit_unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    assert_same_run(reference, (model, optimizer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loop", ["context", "attached"])
@pytest.mark.parametrize("case", ONE_SAMPLE)
def test_grad_scaler_skips_a_step_with_infinities_and_lowers_its_scale(case, loop):
    reference = train(case, loop, steps=3)
    model, optimizer, handle, scaler = set_up(case, loop)
    for step in range(3):
        for overflow in (True, False) if step == 1 else (False,):
            forward_backward(optimizer, model, loop, scaler.scale, make_batch(seed=step))
            if overflow:
                model[0].weight.grad[0, 0] = torch.inf
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (before / 2 if overflow else before)
            optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    assert_same_run(reference, (model, optimizer), rtol=1e-5, atol=1e-6)


def test_a_closure_cannot_be_scaled():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    scaler = GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(make_batch()[0]), make_batch()[1])
        scaler.scale(loss).backward()
        return loss

    before = model.state_dict()
    forward_backward(optimizer, model, "context", scaler.scale)
    with pytest.raises(RuntimeError, match=r"A closure cannot be scaled: .*sampled_params\(\).*attach\(model\)"):
        scaler.step(optimizer, closure)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):  # torch's own
        scaler.step(optimizer, closure=closure)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_grad_scaler_with_several_samples_is_an_error():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2)
    scaler = GradScaler("cpu")
    for sample in range(2):
        with optimizer.sampled_params(sample):
            scaler.scale(F.cross_entropy(model(make_batch()[0]), make_batch()[1])).backward()
    model[0].weight.grad[0, 0] = torch.inf  # also when the step would be skipped
    with pytest.raises(RuntimeError, match=r"GradScaler with mc_samples=2: .*Use mc_samples=1.*bfloat16"):
        scaler.step(optimizer)


def test_after_a_skipped_step_an_unscaled_closure_is_welcome():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    scaler = GradScaler("cpu")
    forward_backward(optimizer, model, "context", scaler.scale)
    model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    optimizer.zero_grad()
    train(Vprop, model=model, optimizer=optimizer, steps=1)
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_weights_are_the_mean_after_a_skipped_step():
    """Whoever averages or saves the weights then, must not average or save a sample; and the run goes on with it."""
    reference = train(Vprop, "attached", steps=1, num_data=200)
    model = make_model()
    optimizer, average = Vprop(model.parameters(), num_data=200), torch.optim.swa_utils.AveragedModel(model)
    handle, scaler = optimizer.attach(model), GradScaler("cpu", init_scale=2.0**10)
    for overflow in (True, False):
        optimizer.zero_grad()
        forward_backward(optimizer, model, "attached", scaler.scale, make_batch(seed=0))
        if overflow:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            average.update_parameters(model)
    handle.remove()
    for p, start in zip(average.module.parameters(), make_model().parameters(), strict=True):
        torch.testing.assert_close(p, start, rtol=1e-5, atol=1e-6)
    assert_same_run(reference, (model, optimizer), rtol=1e-5, atol=1e-6)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_all_samples_of_a_step_inside_one_autocast_block():
    """Autocast keeps its casts of the weights until the block ends, and the weights are others for each sample."""
    runs = []
    for around_step in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=200, mc_samples=2)

        for step in range(3):
            objective = Objective(model, F.cross_entropy, *make_batch(seed=step))
            if around_step:
                with autocast():
                    optimizer.step(objective)
                continue

            def closure(optimizer=optimizer, objective=objective):
                optimizer.zero_grad()
                with autocast():
                    loss = F.cross_entropy(objective.model(objective.x), objective.y)
                loss.backward()
                return loss

            optimizer.step(closure)
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.parametrize("way", ["steps", "evaluations", "modes"])
def test_weights_that_change_inside_one_autocast_block_are_cast_anew(way):
    model, (x, y) = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=20)
    outputs = []
    with autocast():
        if way == "steps":
            for _ in range(2):
                outputs.append(optimizer.step(Objective(model, F.cross_entropy, x, y)))
        elif way == "evaluations":
            for _ in range(2):
                with optimizer.sampled_params(train=False):
                    outputs.append(model(x))
        else:
            optimizer.attach(model)
            outputs = [model(x), model.eval()(x)]
    assert not torch.equal(*outputs)

"""The three training loops: the same result from each, and from micro-batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import LOOPS, assert_same_run, backward, make_batch, make_model, train
from tests.table import cases
from vprop import VOGN, Objective, Vario, Vprop


@pytest.mark.parametrize("case", cases(any_loop=True))
@pytest.mark.parametrize("loop", ["context", "attached"])
def test_all_loops_give_the_same_run(case, loop):
    if loop == "attached" and case.mc_samples > 1:
        with pytest.raises(ValueError, match=r"mc_samples=\d: must be 0 or 1 with attach\(\)"):
            train(case, "attached")
        return
    assert_same_run(train(case, "closure"), train(case, loop), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases(any_loop=True))
@pytest.mark.parametrize("loop", list(LOOPS))
def test_micro_batches_equal_one_batch(case, loop):
    if loop == "attached" and case.mc_samples > 1:
        loop = "closure"
    if case.arguments.get("structure") == "eigenbasis":
        # Eigenvectors amplify the difference of two roundings by the gaps between eigenvalues: few digits of float32
        # would be left of directions that pairs of gradients have almost the same curvature in.
        runs = [train(case, loop, model=make_model().double(), micro_batches=k) for k in (1, 4)]
        assert_same_run(*runs, rtol=1e-6, atol=1e-9)
        return
    whole, parts = train(case, loop), train(case, loop, micro_batches=4)
    assert_same_run(whole, parts, rtol=1e-4, atol=2e-6)


def test_closure_is_called_once_per_sample_and_its_mean_loss_returned():
    model, batch = make_model(), make_batch()
    for mc_samples, calls in [(0, 1), (1, 1), (4, 4)]:
        optimizer, losses = Vprop(model.parameters(), num_data=100, mc_samples=mc_samples), []

        def closure(optimizer=optimizer, losses=losses):
            optimizer.zero_grad()
            losses.append(backward(model, [batch]))
            return losses[-1]

        returned = optimizer.step(closure)
        assert len(losses) == calls
        torch.testing.assert_close(returned, torch.stack(losses).mean())


def test_closure_may_return_a_number_or_nothing():
    model, batch = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2)
    for value, expected in [(1.5, 1.5), (None, None)]:

        def closure(value=value):
            optimizer.zero_grad()
            backward(model, [batch])
            return value

        assert optimizer.step(closure) == expected


def test_samples_of_one_step_need_not_clear_their_gradients():
    """Between two samples the optimizer clears p.grad itself, whether or not the closure does."""
    runs = []
    for clear_inside in (True, False):
        model, batch = make_model(), make_batch()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=3)
        for _ in range(3):

            def closure(optimizer=optimizer, model=model, batch=batch, clear=clear_inside):
                if clear:
                    optimizer.zero_grad()
                return backward(model, [batch])

            optimizer.step(closure)
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_zero_grad_between_the_samples_of_a_step_loses_nothing():
    runs = []
    for where in ("before the step", "outside each block", "inside each block"):
        model, batch = make_model(), make_batch()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=3)
        for _ in range(3):
            if where == "before the step":
                optimizer.zero_grad()
            for sample in range(3):
                if where == "outside each block":
                    optimizer.zero_grad()
                with optimizer.sampled_params(sample):
                    if where == "inside each block":
                        optimizer.zero_grad()
                    backward(model, [batch])
            optimizer.step()
        runs.append((model, optimizer))
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2])


def test_objective_is_a_closure():
    (x, y), model, other = make_batch(), make_model(), make_model()
    optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2)
    reference = Vprop(other.parameters(), num_data=100, mc_samples=2)
    for _ in range(3):
        optimizer.step(Objective(model, F.cross_entropy, x, y))

        def closure():
            reference.zero_grad()
            return backward(other, [(x, y)])

        reference.step(closure)
    assert_same_run((other, reference), (model, optimizer))


class Halves(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.mul_(0.5) if self.in_place else x * 0.5


@pytest.mark.parametrize("optimizer", [partial(Vprop, mc_samples=2), VOGN], ids=["samples", "estimator"])
def test_a_model_that_writes_into_its_input_finds_it_as_it_was_in_every_call_of_an_objective(optimizer):
    runs = []
    for in_place in (True, False):
        model = nn.Sequential(Halves(in_place), *make_model())
        runs.append((model, optimizer(model.parameters(), num_data=100)))
        x, y = make_batch()
        objective = Objective(model, F.cross_entropy, x, y)
        for _ in range(2):
            runs[-1][1].step(objective)
        assert torch.equal(x, make_batch()[0])
    assert_same_run(*runs)


def test_a_parameter_absent_from_some_samples_counts_as_zero_there():
    """Layer drop: in sample 1 of 3 a weight takes no part, which is a gradient of zero, not a missing sample."""
    states = []
    for masked in (False, True):  # absent from the graph, or present with a zero factor
        w, v = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))
        optimizer = Vprop([w, v], num_data=10, mc_samples=3)
        for sample, present in enumerate([False, True, False]):
            with optimizer.sampled_params(sample):
                loss = w.square().sum()
                if present or masked:
                    loss = loss + float(present) * (3 * v).sum()
                loss.backward()
        optimizer.step()
        states.append((v.detach().clone(), optimizer.state[v]["hess"].clone()))
    torch.testing.assert_close(states[0], states[1])


def test_a_closure_without_backward():
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = Vario(model.parameters(), num_data=3, batch_size=3)
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient\. Call loss\.backward\(\) in the closure"):
        optimizer.step(lambda: model(x).square().mean())


def test_an_objective_whose_loss_is_a_sum():
    """It would count N times. Of N = 1 it is right: the sum over all data is the mean over one example."""
    model, x, y = nn.Linear(2, 1), torch.ones(3, 2), torch.zeros(3, 1)
    for loss_fn in (nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")):
        objective = Objective(model, loss_fn, x, y)
        with pytest.raises(ValueError, match=r'Invalid loss_fn: it is a sum over the batch .* num_data=3 .*"mean"'):
            Vario(model.parameters(), num_data=3, batch_size=3).step(objective)
        Vario(model.parameters(), num_data=1, batch_size=1).step(objective)


def test_a_loss_is_no_closure():
    model, (x, y) = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=100)
    with pytest.raises(TypeError, match=r"step\(closure\): got Tensor, must be a function .*without an argument"):
        optimizer.step(F.cross_entropy(model(x), y))

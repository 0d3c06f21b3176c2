"""What torch.func cannot do is done in another way; what the model itself does wrong is seen as it is."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.curvature.test_per_example_fast import (
    EXAMPLES,
    VECTOR,
    Model,
    assert_equal,
    loop_over_examples,
    observe,
    randn,
    seeded,
)
from vprop import VOGN, Objective

CALLS: list[int] = []
"""Of the model: kept outside of it, because every copy of it has lists of its own."""


def objective_of(forward):
    model = seeded(lambda: Model(forward, a=nn.Linear(4, 3)))
    CALLS.clear()
    return Objective(model, F.mse_loss, VECTOR(), randn(EXAMPLES, 3))


class Doubled(torch.autograd.Function):
    """A function of the kind that torch.func refuses."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope


def write_into_a_constant(m, x):
    return torch.zeros(len(x), 3, dtype=x.dtype).add_(m.a(x))


BEYOND_TORCH_FUNC = {
    "writes into a constant": write_into_a_constant,
    "reads a number": lambda m, x: m.a(x) * x.sum().item(),
    "decides by a number": lambda m, x: m.a(x) if x.sum() > 0 else m.a(2 * x),
    "reads an array": lambda m, x: m.a(torch.as_tensor(x.numpy() ** 2)),
    "function without setup_context": lambda m, x: Doubled.apply(m.a(x)),
    "shapes that depend on numbers": lambda m, x: m.a(x) * len(x.flatten().nonzero()),
}


@pytest.mark.parametrize("name", BEYOND_TORCH_FUNC)
def test_what_torch_func_cannot_do(name):
    objective = objective_of(BEYOND_TORCH_FUNC[name])
    assert_equal(observe(objective), loop_over_examples(objective))


def calls_of(model):
    """One more call of the model, in all of its calls."""
    CALLS.append(1)
    return CALLS


def always_raise(m, x):
    calls_of(m)
    raise RuntimeError("the model's own")


def test_an_error_of_the_models_is_raised_as_it_is():
    """After a second, plain run, which tells that it is the model's."""
    objective = objective_of(always_raise)
    with pytest.raises(RuntimeError, match="the model's own") as caught:
        observe(objective)
    assert len(CALLS) == 2
    assert "always_raise" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert caught.value.__context__ is None


def test_memory_that_is_not_there():
    """More than any machine has."""
    objective = objective_of(lambda m, x: (calls_of(m), m.a(x) + x.new_empty(1 << 55).sum())[1])
    with pytest.raises(RuntimeError, match="allocate"):
        observe(objective)


def test_memory_of_a_device_that_is_not_there_is_not_hidden_by_a_slower_way():
    def forward(m, x):
        if not calls_of(m)[1:]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return m.a(x)

    with pytest.raises(torch.OutOfMemoryError):
        observe(objective_of(forward))
    assert len(CALLS) == 1


def test_an_operation_that_fails_says_so_in_the_shapes_of_one_example():
    """torch does not say whether that is its own fault, so the model is asked once more, without torch.func."""
    objective = objective_of(lambda m, x: (calls_of(m), m.a(x[:, :2]))[1])
    with pytest.raises(RuntimeError, match="1x2 and 4x3") as caught:
        observe(objective)
    assert len(CALLS) == 2
    assert caught.value.__context__ is None


def test_a_step_leaves_the_mean_in_the_weights():
    """The first call is for the gradient, which is there already when the second fails."""
    objective = objective_of(fail_from_the_second_call_on)
    optimizer = VOGN(objective.model.parameters(), num_data=10)
    before = [p.detach().clone() for p in objective.model.parameters()]
    with pytest.raises(RuntimeError, match="the second"):
        optimizer.step(objective)
    # The mean comes back out of the sample by subtracting the noise again, a rounding apart.
    for p, mean in zip(objective.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), mean, rtol=1e-12, atol=1e-12)


def fail_from_the_second_call_on(m, x):
    if len(calls_of(m)) >= 2:
        raise RuntimeError("the second")
    return m.a(x)

"""How models are called: their inputs stay as they were, and are copied only where that needs it."""

import pytest
import torch
from torch import nn

import vprop
from vprop.calling import Untouched, copied


class Noting(nn.Module):
    """Notes where its input lies; writes into it in training mode, if asked to."""

    def __init__(self, writes=False):
        super().__init__()
        self.layer, self.writes, self.seen = nn.Linear(2, 1), writes, []

    def forward(self, x):
        self.seen.append((x.data_ptr(), x.clone()))
        if self.writes and self.training:
            x.mul_(0.5)
        return self.layer(x)


@pytest.mark.parametrize("writes", [False, True])
def test_only_a_model_that_writes_into_its_input_gets_copies_after_the_first_call(writes):
    model, x, call = Noting(writes), torch.ones(3, 2), Untouched()
    for _ in range(3):
        call(model, (x,), {})
    assert torch.equal(x, torch.ones(3, 2))
    assert all(torch.equal(seen, x) for _, seen in model.seen)
    assert [place == x.data_ptr() for place, _ in model.seen] == [False, not writes, not writes]


def test_each_mode_is_looked_at_by_itself():
    model, x, call = Noting(writes=True), torch.ones(3, 2), Untouched()
    model.eval()
    call(model, (x,), {})
    model.train()
    call(model, (x,), {})
    call(model, (x,), {})
    assert torch.equal(x, torch.ones(3, 2))


def test_an_objective_does_not_copy_its_inputs_in_every_call():
    model, x = Noting(), torch.ones(3, 2)
    objective = vprop.Objective(model, nn.functional.mse_loss, x, torch.ones(3, 1))
    for _ in range(3):
        objective()
    assert [place == x.data_ptr() for place, _ in model.seen] == [False, True, True]


def test_one_tensor_that_is_there_twice_stays_one():
    x = torch.ones(2)
    (first, second), named = copied(((x, torch.ones(2)), {"again": x}))
    assert first is named["again"]
    assert first is not second
    assert first is not x

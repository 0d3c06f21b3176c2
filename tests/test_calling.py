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


class WritesIntoLargeOnes(nn.Module):
    """Into some batches and not into others."""

    def __init__(self):
        super().__init__()
        self.body, self.layer = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        if x.max() > 1.5:
            x /= 10
        return self.layer(self.body(x))


def posterior_and_batches():
    torch.manual_seed(0)
    model = WritesIntoLargeOnes()
    posterior = vprop.Vprop(model.parameters(), num_data=8).posterior(model, likelihood="gaussian")
    return posterior, torch.rand(4, 2), 1000 * torch.rand(4, 2)


def test_a_model_that_writes_into_later_batches_alone_has_the_same_elbo():
    posterior, small, large = posterior_and_batches()
    y, before = torch.zeros(4, 1), large.clone()

    def elbo(batches):
        return float(posterior.elbo([(x, y) for x in batches], loss_fn=nn.MSELoss(), num_samples=4))

    assert elbo([small, large]) == pytest.approx(elbo([large, small]), rel=1e-6)
    assert torch.equal(large, before)


@pytest.mark.parametrize("head", [None, "layer"])
def test_a_model_that_writes_into_later_batches_alone_has_the_same_predictions(head):
    posterior, small, large = posterior_and_batches()
    posterior = posterior if head is None else posterior.last_layer(head)
    x = torch.cat([small, large])
    before, alone = x.clone(), posterior.predict(large, num_samples=3).samples
    for _ in range(2):
        together = posterior.predict(x, num_samples=3, batch_size=4).samples
        assert torch.allclose(together[:, 4:], alone, rtol=1e-6)
    assert torch.equal(x, before)


def test_a_first_write_in_a_later_call_is_warned_of_and_is_the_last():
    class Flips(nn.Module):
        flip = False

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(x.neg_() if self.flip else x)

    model, x = Flips(), torch.ones(3, 2)
    objective = vprop.Objective(model, nn.functional.mse_loss, x, torch.ones(3, 1))
    objective()
    model.flip = True
    with pytest.warns(RuntimeWarning, match=r"wrote into its inputs, which it did not when it was first called"):
        objective()
    written = x.clone()
    objective()
    assert torch.equal(x, written)


def test_what_is_written_into_the_inputs_between_calls_is_seen():
    model, x = Noting(), torch.ones(3, 2)
    objective = vprop.Objective(model, nn.functional.mse_loss, x, torch.ones(3, 1))
    for value in (1.0, 2.0, 3.0):
        x.data.fill_(value)
        objective()
    assert [float(seen.mean()) for _, seen in model.seen] == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_inputs_in_inference_mode():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 1))

        def forward(self, x):
            return torch.sparse.mm(x, self.weight)

    model, x = Sparse(), torch.eye(4, 2).to_sparse()
    posterior = vprop.Vprop(model.parameters(), num_data=4).posterior(model, likelihood="gaussian")

    def elbo():
        return float(posterior.elbo([(x, torch.zeros(4, 1))], loss_fn=nn.MSELoss(), num_samples=2))

    expected = elbo()
    with torch.inference_mode():
        assert elbo() == pytest.approx(expected, rel=1e-6)


def test_copies_have_what_was_written_onto_a_tensor():
    x = torch.ones(2)
    x.scale = 2.0
    assert copied(x).scale == 2.0


def test_copies_of_ragged_tensors_have_a_memory_of_their_own():
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    copied(ragged).values().mul_(2)
    assert torch.equal(ragged.values(), torch.ones(6, 3))


def test_a_head_after_nan_inputs_in_inference_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    posterior = vprop.Vprop(model.parameters(), num_data=8).posterior(model, likelihood="gaussian").last_layer()
    x = torch.ones(3, 2)
    x[1] = float("nan")
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="NaN for 1 of 3"):
        assert int(posterior.predict(x, num_samples=2).mean.isnan().sum()) == 1

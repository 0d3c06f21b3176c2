"""One call that trains a mixture: the same training several times, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vprop

BATCH = (torch.ones(2, 1), torch.ones(2, 1))


def make_optimizer(model, seed):
    return vprop.Vprop([p for p in model.parameters() if p.requires_grad], num_data=4, seed=seed)


def train_two(make_model=lambda: nn.Linear(1, 1), loader=(BATCH,), loss_fn=F.mse_loss, make=make_optimizer, **rest):
    return vprop.train_mixture(make_model, make, loader, loss_fn, **{"members": 2} | rest)


def test_training_by_one_call():
    x = torch.linspace(-1, 1, 24)[:, None]
    state = torch.get_rng_state()

    def train(seed=0):
        return vprop.train_mixture(
            lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)),
            lambda model, seed: vprop.Vprop(model.parameters(), lr=0.1, num_data=24, seed=seed),
            [(x[:12], x[:12]), (x[12:], x[12:])],
            F.mse_loss,
            members=3,
            epochs=2,
            seed=seed,
            make_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        )

    mixture = train()
    assert torch.equal(torch.get_rng_state(), state)
    assert [member.seed for member in mixture.members] == [0, 1, 2]
    firsts = [member.mean["0.weight"] for member in mixture.members]
    assert not torch.equal(firsts[0], firsts[1])
    assert (mixture.likelihood, mixture.noise_variance) == ("gaussian", 0.5)
    again = train()
    assert all(torch.equal(a.mean["0.weight"], b) for a, b in zip(again.members, firsts, strict=True))
    assert torch.equal(train(seed=1).members[0].mean["0.weight"], firsts[1])


def test_training_refusals():
    for arguments, message in [
        ({"members": 0}, "Invalid members"),
        ({"epochs": 0}, "Invalid epochs"),
        ({"seed": -1}, "Invalid seed"),
        ({"loader": []}, "there are no batches"),
    ]:
        with pytest.raises(ValueError, match=message):
            train_two(**arguments)
    with pytest.raises(TypeError, match="loss_fn"):
        train_two(loss_fn=nn.MSELoss)
    with pytest.raises(ValueError, match=r"GaussianLikelihood has parameters to be learned, \['log_noise_variance'\]"):
        train_two(loss_fn=vprop.GaussianLikelihood(0.3))
    same = nn.Linear(1, 1)
    for again in (lambda: same, lambda: nn.DataParallel(same)):
        with pytest.raises(ValueError, match="it returned the same model twice"):
            train_two(again)
    for part in (lambda: nn.Sequential(same), lambda: nn.Sequential(same, nn.Linear(1, 1))):
        with pytest.raises(ValueError, match=r"models that share the weights \['0\.weight', '0\.bias'\], must"):
            train_two(part)
    assert train_two(loss_fn=vprop.GaussianLikelihood(0.3, learnable=False)).noise_variance == pytest.approx(0.3)


def test_a_dataset_of_batches_is_a_loader():
    class Batches(torch.utils.data.Dataset):
        def __getitem__(self, i):
            if i >= 2:
                raise IndexError
            return BATCH

    runs = [train_two(loader=loader) for loader in (Batches(), [BATCH, BATCH])]
    for one, other in zip(*(run.members for run in runs), strict=True):
        assert all(torch.equal(value, other.mean[name]) for name, value in one.mean.items())


def test_what_the_functions_return_is_looked_at_before_anything_is_trained():
    for arguments, message in [
        ({"make_scheduler": lambda optimizer: None}, r"make_scheduler\): it returned None, must return a scheduler"),
        ({"make_scheduler": 0.1}, r"make_scheduler\): got 0.1, must be a function"),
        ({"make_model": nn.Linear(1, 1)}, r"make_model\): got Linear.*must be a function"),
        ({"make_model": lambda: None}, "what it returned: got NoneType"),
        (
            {"make": lambda model, seed: torch.optim.SGD(model.parameters())},
            "it returned a SGD, must return an optimizer",
        ),
        ({"make": make_optimizer(nn.Linear(1, 1), 0)}, r"make_optimizer\): got Vprop"),
        ({"make": lambda model: None}, r"it takes other arguments \(too many .*\), must take a model and a seed"),
        ({"loader": [(torch.ones(1, 1),) * 3]}, r"a batch of type tuple, must be a pair \(x, y\)"),
        ({"loader": [torch.ones(2, 1)]}, "a batch of type Tensor, must be a pair"),
        ({"loader": torch.ones(2, 2, 1)}, "got a Tensor, must be a loader"),
    ]:
        with pytest.raises(TypeError, match=message):
            train_two(**arguments)


def test_every_member_has_a_loss_with_a_state_of_its_own():
    class Watching(vprop.GaussianLikelihood):
        """Its noise is the largest squared error so far."""

        def forward(self, output, y):
            worst = (output.detach() - y).square().max()
            self.log_noise_variance.copy_(torch.maximum(self.log_noise_variance.exp(), worst).log())
            return super().forward(output, y)

    shifts = iter([3.0, 1.0])

    def make_model():
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.constant_(model.bias, next(shifts))
        return model

    mixture = train_two(
        make_model,
        [(torch.ones(1, 1), torch.zeros(1, 1))],
        Watching(1e-3, learnable=False),
        lambda model, seed: vprop.Vprop(model.parameters(), num_data=10**9, seed=seed),
    )
    noises = [float(member.noise_variance) for member in mixture.members]
    assert noises == pytest.approx([9.0, 1.0], rel=0.1)


def test_frozen_weights_may_be_shared():
    body = nn.Linear(1, 3).requires_grad_(False)
    assert len(train_two(lambda: nn.Sequential(body, nn.Linear(3, 1)))) == 2


def test_a_body_that_no_optimizer_trains_may_be_shared():
    body = nn.Linear(1, 3)  # requires_grad is left on, as people do

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, nn.Linear(3, 1)

        def forward(self, x):
            with torch.no_grad():
                features = torch.tanh(self.body(x))
            return self.head(features)

    assert len(train_two(Head, make=lambda model, seed: make_optimizer(model.head, seed))) == 2


def test_targets_keep_their_form_and_class_numbers_of_arrays_are_class_numbers():
    def train(y, loss_fn):
        return train_two(lambda: nn.Linear(1, 3), [(torch.ones(2, 1), y)], loss_fn).members[1].mean["weight"]

    def of_a_list(output, y):
        assert type(y) is list
        return F.cross_entropy(output, y[0])

    labels = np.array([0, 2])
    expected = train(torch.tensor(labels), F.cross_entropy)
    for kind in ("int8", "int32", ">i8"):
        assert torch.equal(train(labels.astype(kind), F.cross_entropy), expected)
    assert torch.equal(train([labels], of_a_list), expected)


def test_several_inputs_and_arrays_go_where_the_model_is():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, a, b):
            return self.layer(a + b)

    x, y = np.ones((4, 1)), np.zeros((4, 1))  # of float64

    def train(batch):
        return train_two(Sum, [batch]).members[1].mean["layer.weight"]

    expected = train(((torch.ones(4, 1), torch.ones(4, 1)), torch.zeros(4, 1)))
    assert torch.equal(train(((x, x), y)), expected)
    assert torch.equal(train(({"a": x, "b": x}, y)), expected)


@pytest.mark.parametrize("seed", [2**64 - 1, np.uint64(2**64 - 1)])
def test_seeds_end_where_they_begin(seed):
    assert [member.seed for member in train_two(seed=seed).members] == [2**64 - 1, 0]

"""Copies of a full-covariance optimizer, the factor it keeps, its memory; and what ``step`` must be given."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.full_harness import hess_of, objective_of, random_spd, sample_of, take_steps
from tests.harness import assert_same_run, make_model, train
from vprop import CVI, VOGN, VON, VONG, Objective, Vprop
from vprop.baselines import Newton


@pytest.mark.parametrize("constructor", [VON, VONG])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_a_copy_goes_on_as_the_original(constructor, how):
    """With a matrix prior and momentum; float32 weights keep a float64 matrix, and nothing is shared."""
    settings = {"num_data": 50, "betas": (0.9, 0.9), "prior_precision": random_spd(67)}
    model, optimizer = train(constructor, steps=3, **settings)
    if how == "state_dict":
        other = make_model(seed=7)
        other.load_state_dict(model.state_dict())
        twin = constructor(other.parameters(), num_data=50)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "deepcopy":
        other, twin = copy.deepcopy((model, optimizer))
    else:
        other, twin = pickle.loads(pickle.dumps((model, optimizer)))
    assert hess_of(twin).dtype == hess_of(optimizer).dtype == torch.float64
    assert optimizer.state[model[0].weight]["momentum"].dtype == torch.float32
    assert torch.equal(twin.posterior(other).prior.precision_matrix, optimizer.posterior(model).prior.precision_matrix)
    for current, own in ((model, optimizer), (other, twin)):
        take_steps(current, own, 2)
    assert_same_run((model, optimizer), (other, twin))
    hess_of(twin).zero_()
    assert hess_of(optimizer).any()


@pytest.mark.parametrize(
    ("constructor", "name"), [(Vprop, "sampled_fisher"), (VONG, "sampled_fisher"), (VON, "chunk_size")]
)
def test_a_checkpoint_from_before_an_argument_existed(constructor, name):
    """What it does not say has its default; torch's own optimizers do the same."""
    model, optimizer = train(constructor, steps=2, num_data=50)
    other, twin = copy.deepcopy((model, optimizer))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    del checkpoint["param_groups"][0][name]
    twin.load_state_dict(checkpoint)
    for current, own in ((model, optimizer), (other, twin)):
        take_steps(current, own, 2)
    assert_same_run((model, optimizer), (other, twin))


EDITS = {
    "prior": lambda model, optimizer: optimizer.param_groups[0].update(prior_precision=30.0),
    "prior matrix": lambda model, optimizer: optimizer.param_groups[0].update(prior_precision=random_spd(67)),
    "prior matrix, in place": lambda model, optimizer: optimizer.param_groups[0]["prior_precision"].mul_(30),
    "num_data": lambda model, optimizer: optimizer.param_groups[0].update(num_data=500),
    "temperature": lambda model, optimizer: optimizer.param_groups[0].update(temperature=0.1),
    "curvature, in place": lambda model, optimizer: hess_of(optimizer).mul_(30),
    "curvature, replaced": lambda model, optimizer: optimizer.state[model[0].weight].update(hess=random_spd(67)),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(
        train(VONG, steps=1, num_data=50, prior_precision=random_spd(67))[1].state_dict()
    ),
    "weights": lambda model, optimizer: nn.init.ones_(model[0].weight),
    "frozen": lambda model, optimizer: model[0].requires_grad_(False),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("when", ["after a sample", "after a step"])
def test_the_kept_factor_is_never_stale(edit, when):
    """After any edit a sample is that of a copy, which has kept nothing; and each edit does change the sample."""
    model = make_model()
    matrix = 3 * random_spd(67) if "in place" in edit else 3.0
    optimizer = VONG(model.parameters(), num_data=50, betas=(0.0, 0.5), prior_precision=matrix)
    take_steps(model, optimizer, 2)
    if when == "after a sample":
        sample_of(model, optimizer)
    unedited = sample_of(*copy.deepcopy((model, optimizer)))
    EDITS[edit](model, optimizer)
    other, fresh = copy.deepcopy((model, optimizer))
    expected = sample_of(other, fresh)
    assert not torch.equal(expected, unedited)
    assert torch.equal(sample_of(model, optimizer), expected)
    take_steps(model, optimizer)
    take_steps(other, fresh)
    assert torch.equal(sample_of(model, optimizer), sample_of(other, fresh))


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("constructor", [VON, VONG])
def test_no_tensor_is_larger_than_the_matrix(constructor, layers):
    """About 300 weights: sample, curvature, step and posterior stay within 300 × 300 numbers at a time."""
    model = nn.Linear(29, 10) if layers == 1 else nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 8))
    size = sum(p.numel() for p in model.parameters())
    optimizer = constructor(model.parameters(), num_data=50, mc_samples=2)
    x, y = torch.ones(8, 29 if layers == 1 else 20), torch.zeros(8, dtype=torch.int64)
    with LargestTensor() as largest:
        for _ in range(2):
            optimizer.step(Objective(model, F.cross_entropy, x, y))
        optimizer.posterior(model).sample()
    assert largest.numel == size**2


# -- what step() is given --------------------------------------------------------------------------------------------

NEED_MORE = [(CVI, {}), (VOGN, {}), (VON, {}), (Newton, {}), (Vprop, {"sampled_fisher": True})]
NEED_MORE.append((VONG, {"sampled_fisher": True}))


@pytest.mark.parametrize(("constructor", "arguments"), NEED_MORE)
class TestMoreThanAGradient:
    message = (
        r"takes its curvature from more than a gradient.*optimizer\.step\(vprop\.Objective\(model, loss_fn, x, y\)\)"
    )

    def test_a_plain_closure_is_an_error(self, constructor, arguments):
        model = make_model()
        optimizer = constructor(model.parameters(), num_data=50, **arguments)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=self.message):
            optimizer.step(lambda: objective_of(model)())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.step(objective_of(model))

    def test_a_step_after_a_block_is_an_error(self, constructor, arguments):
        model = make_model()
        optimizer = constructor(model.parameters(), num_data=50, **arguments)
        with optimizer.sampled_params():
            objective_of(model)()
        with pytest.raises(RuntimeError, match=self.message):
            optimizer.step()

    @pytest.mark.parametrize("stale", [False, True])
    def test_an_objective_of_another_model_is_an_error(self, constructor, arguments, stale):
        """Also where an earlier backward() left gradients, with which a curvature of zero would be learnt."""
        model, other = make_model(), make_model(seed=5)
        optimizer = constructor(model.parameters(), num_data=50, **arguments)
        if stale:
            objective_of(model)()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="not in the objective's model"):
            optimizer.step(objective_of(other))
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=1e-6, atol=1e-6)

"""Interrupt and resume: every weight and state bit-identical to the run that never stopped."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.harness import assert_same_run, make_model, train
from tests.table import cases
from vprop import Vprop

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def through_file(model, optimizer, case, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    checkpoint = torch.load(path, weights_only=True)
    model = make_model(next(model.parameters()).dtype, seed=99)
    model.load_state_dict(checkpoint["model"])
    optimizer = case(model.parameters(), lr=0.77, seed=5)  # all of this comes from the checkpoint
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


def through_deepcopy(model, optimizer, case, path):
    return copy.deepcopy((model, optimizer))


def through_pickle(model, optimizer, case, path):
    return pickle.loads(pickle.dumps((model, optimizer)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases())
def test_resume_is_exact(case, dtype, tmp_path):
    """In every way of the three, and of the run itself, which does not notice that it was copied."""
    never_stopped = train(case, model=make_model(dtype), steps=5)
    interrupted = train(case, model=make_model(dtype), steps=3)
    ways = (through_file, through_deepcopy, through_pickle)
    copies = [way(*interrupted, case, tmp_path / "checkpoint.pt") for way in ways]
    for model, optimizer in (*copies, interrupted):
        train(case, model=model, optimizer=optimizer, first_step=3, steps=2)
        assert_same_run(never_stopped, (model, optimizer))


def test_the_original_goes_on_undisturbed_by_its_copy():
    reference = train(Vprop, num_data=50, steps=6)
    original = train(Vprop, num_data=50, steps=3)
    model = make_model()
    copied = Vprop(model.parameters(), num_data=50)
    model.load_state_dict(original[0].state_dict())
    copied.load_state_dict(original[1].state_dict())
    train(Vprop, model=model, optimizer=copied, first_step=7, steps=2)
    train(Vprop, model=original[0], optimizer=original[1], first_step=3, steps=3)
    assert_same_run(reference, original)


def test_prior_tensors_travel_with_the_checkpoint(tmp_path):
    def make(params, **arguments):
        params = list(params)
        prior = {"prior_mean": [torch.ones_like(p) for p in params], "prior_precision": [p.abs() + 1 for p in params]}
        return Vprop(params, num_data=50, **(prior | arguments))

    never_stopped, interrupted = train(make, steps=4), train(make, steps=2)
    resumed = through_file(*interrupted, lambda params, **_: Vprop(params, num_data=1), tmp_path / "checkpoint.pt")
    train(make, model=resumed[0], optimizer=resumed[1], first_step=2, steps=2)
    assert_same_run(never_stopped, resumed)


@pytest.mark.parametrize(
    ("groups", "has"),
    [([[0, 1, 2]], "1 parameter group with 3"), ([[0, 1], [2, 3]], r"2 parameter groups with 2 \+ 2")],
)
def test_a_changed_number_of_parameters_is_an_error(groups, has):
    """torch's own message has neither the numbers nor a remedy."""
    saved = train(Vprop, num_data=50, steps=1)[1].state_dict()
    params = list(make_model().parameters())
    optimizer = Vprop([{"params": [params[i] for i in group]} for group in groups], num_data=50)
    message = rf"the checkpoint has 1 parameter group with 4 parameters, this optimizer {has} parameters\. Build model"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_of_another_precision(source, target):
    """The state takes the precision that the new weights call for, and training goes on."""
    model, optimizer = train(Vprop, model=make_model(source), num_data=50, steps=2)
    other = make_model(target)
    other.load_state_dict(model.state_dict())
    resumed = Vprop(other.parameters(), num_data=50)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.posterior(other).mean["0.weight"].dtype == (
        torch.float64 if target == torch.float64 else torch.float32
    )
    train(Vprop, model=other, optimizer=resumed, first_step=2, steps=2)
    reference = train(Vprop, num_data=50, steps=4)
    for p, q in zip(other.parameters(), reference[0].parameters(), strict=True):
        assert ("mean" in resumed.state[p]) == (target == torch.bfloat16)
        assert int(resumed.state[p]["step"]) == 4
        torch.testing.assert_close(p.float(), q, rtol=0.1, atol=0.02)


def test_load_hooks_of_others_are_respected():
    _, optimizer = train(Vprop, num_data=50, steps=2)
    model = make_model()
    other = Vprop(model.parameters(), num_data=50)

    def double(_, state_dict):
        state = {key: value | {"hess": 2 * value["hess"]} for key, value in state_dict["state"].items()}
        return state_dict | {"state": state}

    other.register_load_state_dict_pre_hook(double)
    other.load_state_dict(optimizer.state_dict())
    original = next(iter(optimizer.state.values()))["hess"]
    assert torch.equal(other.state[model[0].weight]["hess"], 2 * original)


def test_numpy_hyperparameters_survive_a_checkpoint(tmp_path):
    import numpy as np

    betas = (np.float64(0.9), np.float64(0.99))
    model, optimizer = train(Vprop, num_data=np.int64(50), seed=np.int64(3), lr=np.float64(0.1), betas=betas)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert torch.load(tmp_path / "optimizer.pt", weights_only=True)["param_groups"][0]["num_data"] == 50
    optimizer.posterior(model).save(tmp_path / "posterior.safetensors")


def test_a_checkpoint_with_impossible_hyperparameters_is_refused():
    _, optimizer = train(Vprop, num_data=50)
    state = optimizer.state_dict()
    state["param_groups"][0]["mc_samples"] = -3
    with pytest.raises(ValueError, match=r"Invalid mc_samples=-3"):
        Vprop(make_model().parameters(), num_data=50).load_state_dict(state)


def test_parameters_of_another_shape_are_an_error():
    saved = train(Vprop, num_data=50, steps=1)[1].state_dict()
    wider = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    optimizer = Vprop(wider.parameters(), num_data=50)
    message = r"parameter 0 has shape \(8, 4\) in the checkpoint and \(9, 4\) here\. Build model"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused():
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"no checkpoint of a variational optimizer.*let the optimizer start afresh"):
        Vprop(model.parameters(), num_data=50).load_state_dict(adam.state_dict())

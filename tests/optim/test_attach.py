"""attach(): samples in a loop that is not ours, and the mean wherever the weights leave it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as pruning

from tests.harness import assert_same_run, attached_step, backward, make_batch, make_model
from vprop import IVON, Vprop


@pytest.fixture
def attached():
    """A model, its mean weights, and an attached optimizer with a sample in the weights."""
    model = make_model()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = Vprop(model.parameters(), num_data=100)
    handle = optimizer.attach(model)
    model.train()(make_batch()[0])
    assert not is_mean(model, mean)
    return model, mean, optimizer, handle


def is_mean(model, mean):
    return all(torch.allclose(p, mean[name], rtol=1e-5, atol=1e-5) for name, p in model.named_parameters())


def test_training_forwards_see_the_sample_and_evaluation_forwards_the_mean():
    model, (x, _) = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=100)
    with torch.no_grad():
        at_mean = model(x)
        optimizer.attach(model)
        sampled = model.train()(x)
        assert torch.equal(sampled, model(x))
        assert not torch.allclose(sampled, at_mean, atol=1e-3)
        torch.testing.assert_close(model.eval()(x), at_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.train()(x), sampled, rtol=1e-5, atol=1e-5)


def test_the_mean_is_what_is_saved(attached):
    model, mean, _, _ = attached
    saved = model.state_dict()
    assert all(torch.allclose(saved[name], mean[name], rtol=1e-5, atol=1e-5) for name in mean)


def test_what_is_loaded_stays(attached):
    model, _, optimizer, _ = attached
    best = make_model(seed=5).state_dict()
    model.load_state_dict(best)
    model.eval()(make_batch()[0])
    optimizer.posterior(model)
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


def test_a_held_sample_stays_out_of_guarded_checkpoints():
    model = make_model()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = Vprop(model.parameters(), num_data=100)
    guard = optimizer.guard_checkpoints(model)
    optimizer.hold_sample()
    assert not is_mean(model, mean)
    saved = model.state_dict()
    assert not is_mean(model, mean), "the sample comes back"
    assert all(torch.allclose(saved[name], mean[name], rtol=1e-5, atol=1e-5) for name in mean)
    guard.remove()
    saved = model.state_dict()
    assert not any(torch.allclose(saved[name], mean[name], rtol=1e-5, atol=1e-5) for name in mean)


def test_what_is_loaded_under_a_held_sample_stays():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    optimizer.guard_checkpoints(model)
    optimizer.hold_sample()
    best = make_model(seed=5).state_dict()
    model.load_state_dict(best)
    optimizer.hold_sample()  # of the next micro-batch
    optimizer.discard_samples()
    assert all(torch.allclose(p, best[name], rtol=1e-5, atol=1e-5) for name, p in model.named_parameters())


def test_whether_a_model_is_attached(attached):
    model, _, optimizer, handle = attached
    assert optimizer.is_attached(model)
    assert optimizer.is_attached(torch.nn.Sequential(model)), "a part of it is"
    assert not optimizer.is_attached(model[0])
    assert not Vprop(model.parameters(), num_data=100).is_attached(model)
    handle.remove()
    assert not optimizer.is_attached(model)
    with pytest.raises(TypeError, match=r"is_attached\(model\): got str"):
        optimizer.is_attached("model")
    with pytest.raises(TypeError, match=r"guard_checkpoints\(model\): got str"):
        optimizer.guard_checkpoints("model")


def test_removing_the_handle_puts_the_mean_back(attached):
    model, mean, _, handle = attached
    handle.remove()
    assert is_mean(model, mean)
    model.train()(make_batch()[0])
    assert is_mean(model, mean)


def test_discard_samples_puts_the_mean_back(attached):
    model, mean, optimizer, _ = attached
    optimizer.discard_samples()
    assert is_mean(model, mean)


def test_an_exception_in_the_forward_leaves_the_mean(attached):
    model, mean, _, _ = attached
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 99))
    assert is_mean(model, mean)
    attached_step(attached[2], model, [make_batch()])


def test_copying_the_optimizer_with_a_sample_in_the_weights_is_an_error(attached):
    model, _, optimizer, _ = attached
    with pytest.raises(RuntimeError, match=r"cannot be copied or pickled while a sample is in the weights"):
        copy.deepcopy((model, optimizer))


def test_a_second_attach_replaces_the_first(attached):
    """A notebook cell run twice: the old optimizer must not go on sampling beside the new one."""
    model, mean, old, _ = attached
    new = Vprop(model.parameters(), num_data=100, seed=1)
    handle = new.attach(model)
    assert is_mean(model, mean)
    model.train()(make_batch()[0])
    assert old._sampling.is_mean
    handle.remove()
    assert is_mean(model, mean)


def test_an_optimizer_that_is_gone_samples_no_more():
    model = make_model()
    Vprop(model.parameters(), num_data=100).attach(model)
    gc.collect()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(make_batch()[0])
    assert is_mean(model, mean)


def test_a_model_that_is_not_the_optimizers_is_an_error():
    optimizer = Vprop(make_model().parameters(), num_data=100)
    with pytest.raises(ValueError, match=r"attach\(model\): 4 of the optimizer's parameters are not .*not a copy"):
        optimizer.attach(make_model())


def test_copies_and_pickles_of_an_attached_model_do_not_sample(tmp_path):
    model, (x, _) = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=100)
    optimizer.attach(model)
    weights = [p.detach().clone() for p in model.parameters()]
    copied = copy.deepcopy(model).train()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False).train()
    for other in (copied, loaded):
        assert torch.equal(other(x), other(x))
        assert all(torch.equal(p, w) for p, w in zip(other.parameters(), weights, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_closure_and_attach_together_sample_once():
    plain, both = make_model(), make_model()
    runs = []
    for model in (plain, both):
        optimizer = Vprop(model.parameters(), num_data=100)
        if model is both:
            optimizer.attach(model)
        for _ in range(3):

            def closure(optimizer=optimizer, model=model):
                optimizer.zero_grad()
                return backward(model, [make_batch()])

            optimizer.step(closure)
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_an_evaluation_between_micro_batches_changes_nothing():
    runs = []
    for evaluate in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100)
        handle = optimizer.attach(model)
        for _ in range(3):
            for seed in (0, 1):
                x, y = make_batch(seed=seed)
                (F.cross_entropy(model.train()(x), y) / 2).backward()
                if evaluate:
                    model.eval()(x)
                    model.state_dict()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=1e-4, atol=1e-5)


def test_a_compiled_model():
    runs = []
    for compiled in (False, True):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100)
        handle = optimizer.attach(model)
        runner = torch.compile(model, backend="eager") if compiled else model
        for _ in range(3):
            attached_step(optimizer, runner, [make_batch()])
        handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_batchnorm_statistics_can_be_recomputed_at_the_mean_after_detaching():
    """The guide's advice for evaluating at the mean."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    x, _ = make_batch(size=64)
    optimizer = Vprop(model.parameters(), num_data=10)
    handle = optimizer.attach(model)
    model.train()(x)
    handle.remove()
    torch.optim.swa_utils.update_bn([x], model)
    torch.testing.assert_close(model[1].running_mean, model[0](x).mean(0).detach())


def prune(layer):
    return pruning.l1_unstructured(layer, "weight", 4)


def own_hook(layer):
    """What torch's pruning and the older weight_norm do: make the weight of a parameter before each forward."""
    original = layer.weight
    del layer.weight
    layer.register_parameter("original", original)
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "weight", 2 * module.original))
    layer.weight = 2 * original
    return layer


@pytest.mark.parametrize("change", [prune, own_hook])
def test_hooks_that_make_weights_see_the_sample(change):
    """Also where the attached module is the one that has them."""
    layer, (x, _) = change(nn.Linear(4, 3)), make_batch()
    optimizer = Vprop(layer.parameters(), num_data=20)
    with torch.no_grad(), optimizer.sampled_params():
        expected = layer(x)
    optimizer.attach(layer)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


def test_two_optimizers_with_different_parameters_share_a_model():
    """Each samples its own part, as if the other's had been sampled by hand."""
    runs = []
    for attached in (False, True):
        model = make_model()
        body, head = Vprop(model[0].parameters(), num_data=100), IVON(model[2].parameters(), num_data=100)
        handles = [optimizer.attach(model) for optimizer in (body, head) if attached]
        for step in range(3):
            if attached:
                backward(model, [make_batch(seed=step)])
            else:
                with body.sampled_params(), head.sampled_params():
                    backward(model, [make_batch(seed=step)])
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        runs.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mistake", ["evaluation mode", "parts"])
def test_a_step_without_a_training_forward_of_the_attached_model_is_an_error(mistake):
    model, (x, y) = make_model(), make_batch()
    optimizer = Vprop(model.parameters(), num_data=100)
    optimizer.attach(model)
    output = model.eval()(x) if mistake == "evaluation mode" else model[2](model[1](model[0](x)))
    F.cross_entropy(output, y).backward()
    with pytest.raises(RuntimeError, match=r"a model is attached, but .*Call model\.train\(\).*not its parts"):
        optimizer.step()


def test_what_is_no_model_is_an_error():
    model = make_model()
    with pytest.raises(TypeError, match=r"attach\(model\): got generator .*, must be a torch\.nn\.Module\. Pass"):
        Vprop(model.parameters(), num_data=100).attach(model.parameters())

"""Between forward and backward of an attached model: whoever looks sees the mean, and the sample stays where it is."""

from __future__ import annotations

import copy
import gc
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import assert_same_run, make_batch, make_model
from tests.table import cases
from vprop import VON, Vprop
from vprop.structures.plans import SetAside


def evaluation_forward(optimizer, model, x):
    with torch.no_grad():
        model.eval()(x)
    model.train()


def evaluation_forward_with_gradients(optimizer, model, x):
    model.eval()(x)
    model.train()


def inference_forward(optimizer, model, x):
    with torch.inference_mode():
        model.eval()(x)
    model.train()


def failing_evaluation(optimizer, model, x):
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.eval()(x[:, :1])
    model.train()


def evaluation_draw(optimizer, model, x):
    with torch.no_grad(), optimizer.sampled_params(train=False):
        model(x)


def evaluation_draw_in_evaluation_mode(optimizer, model, x):
    model.eval()
    with torch.no_grad(), optimizer.sampled_params(train=False):
        first = model(x)
        assert torch.equal(model(x), first)
    model.train()


def save_the_model(optimizer, model, x):
    model.state_dict()


def save_a_part(optimizer, model, x):
    model[0].state_dict()


def ask_for_the_posterior(optimizer, model, x):
    optimizer.posterior(model)


def ask_for_a_diagnosis(optimizer, model, x):
    optimizer.diagnose()


def ask_for_marginals(optimizer, model, x):
    optimizer.marginals()


def predict(optimizer, model, x):
    optimizer.posterior(model).predict(x, num_samples=2)


LOOKS = [
    evaluation_forward,
    evaluation_forward_with_gradients,
    inference_forward,
    failing_evaluation,
    evaluation_draw,
    evaluation_draw_in_evaluation_mode,
    save_the_model,
    save_a_part,
    ask_for_the_posterior,
    ask_for_a_diagnosis,
    ask_for_marginals,
    predict,
]


def run(case, look, dtype=torch.float32, steps=3, after_backward=False):
    model = make_model(dtype)
    optimizer = case(model.parameters())
    handle = optimizer.attach(model)
    for step in range(steps):
        x, y = make_batch(dtype=dtype, seed=step)
        loss = F.cross_entropy(model.train()(x).float(), y)
        if look is not None and not after_backward:
            look(optimizer, model, x)
        loss.backward()
        if look is not None and after_backward:
            look(optimizer, model, x)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return model, optimizer


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_nobody_had_looked(look, dtype):
    assert_same_run(run(plain, None, dtype), run(plain, look, dtype))


def plain(params):
    return Vprop(params, lr=0.1, num_data=50)


@pytest.mark.parametrize("case", cases(at_most_samples=1, any_loop=True))
@pytest.mark.parametrize("after_backward", [False, True])
def test_every_optimizer(case, after_backward):
    def all_looks(*what):
        for look in LOOKS:
            if look is not evaluation_forward_with_gradients:
                look(*what)

    assert_same_run(run(case, None), run(case, all_looks, after_backward=after_backward))


@pytest.mark.parametrize("look", [save_the_model, save_a_part])
def test_what_is_saved_is_the_mean_and_remains_it(look):
    model = make_model()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = plain(model.parameters())
    optimizer.attach(model)
    loss = model(make_batch()[0]).square().sum()
    saved = model.state_dict() if look is save_the_model else {f"0.{n}": v for n, v in model[0].state_dict().items()}
    kept = {name: value.clone() for name, value in saved.items()}
    loss.backward()
    optimizer.step()
    for name, value in saved.items():
        torch.testing.assert_close(value, mean[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(value, kept[name])
    assert all(value.requires_grad for value in model.state_dict(keep_vars=True).values())


def test_what_is_saved_of_parameters_that_were_added_after_attach():
    model = make_model()
    mean = copy.deepcopy(model.state_dict())
    optimizer = plain(model[2].parameters())
    optimizer.attach(model)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    model(make_batch()[0])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-6, atol=1e-6)


def test_one_look_is_enough_for_all_modules_of_a_model(monkeypatch):
    model = make_model()
    optimizer = plain(model.parameters())
    optimizer.attach(model)
    model(make_batch()[0])
    looks = []
    monkeypatch.setattr(SetAside, "put_back", lambda aside: looks.append(aside) or aside._kept.put_back())
    model.state_dict()
    assert len(looks) == 1


@pytest.mark.parametrize("wrapper", [partial(torch.compile, backend="eager", fullgraph=True), nn.DataParallel])
@torch.no_grad()
def test_evaluation_of_the_module_inside_a_wrapper_sees_the_mean(wrapper):
    model, (x, _) = make_model(), make_batch()
    at_mean = model(x)
    wrapped = wrapper(model)
    optimizer = plain(model.parameters())
    optimizer.attach(wrapped)
    sampled = wrapped(x)
    assert not torch.allclose(sampled, at_mean, rtol=1e-3)
    for module in (model, wrapped):
        torch.testing.assert_close(module.eval()(x), at_mean, rtol=1e-5, atol=1e-5)
    assert torch.equal(wrapped.train()(x), sampled)


@torch.no_grad()
def test_what_is_seen_is_the_mean():
    model, (x, _) = make_model(), make_batch()
    at_mean = model(x)
    optimizer = plain(model.parameters())
    posterior = optimizer.posterior(model)
    optimizer.attach(model)
    sampled = model.train()(x)
    for _ in range(3):
        torch.testing.assert_close(model.eval()(x), at_mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.train()(x), sampled)
    for name, mean in optimizer.posterior(model).mean.items():
        torch.testing.assert_close(mean, posterior.mean[name], rtol=1e-5, atol=1e-6)


def test_a_backward_through_the_evaluation_is_an_error_of_autograd():
    """The mean is no longer in the weights then. After a step as well, when their number of changes has grown."""
    for steps in (0, 1, 5):
        model, (x, _) = make_model(), make_batch()
        optimizer = plain(model.parameters())
        optimizer.attach(model)
        loss = model(x).square().sum()
        evaluated = model.eval()(x).square().sum()
        model.train()
        if steps:
            loss.backward()
            optimizer.step()
        for _ in range(1, steps):
            model(x).square().sum().backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            evaluated.backward()


def test_an_interrupted_evaluation_is_cleared_up_by_the_next_call():
    class Interrupted(nn.Module):
        def forward(self, x):
            if not self.training:
                raise KeyboardInterrupt
            return x

    runs = []
    for interrupted in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 3), Interrupted())
        optimizer = plain(model.parameters())
        optimizer.attach(model)
        x, y = make_batch()
        loss = F.cross_entropy(model(x), y)
        if interrupted:
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                model.eval()(x)
            model.train()(x)  # puts the sample back, for which the first loss's backward waits
        loss.backward()
        optimizer.step()
        runs.append((model, optimizer))
    assert_same_run(*runs)


# -- gradient checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two blocks, repeated in the backward; autograd stops a repetition when it has all it needs."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attached_to", ["all", "last block", "last layer"])
def test_gradient_checkpointing(attached_to, reentrant):
    """Also of a block, or a layer in it, that alone has a posterior."""
    runs = []
    for way in (None, reentrant):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Checkpointed(way)
        part = {"all": model, "last block": model.blocks[1], "last layer": model.blocks[1][2]}[attached_to]
        optimizer = Vprop(part.parameters(), lr=0.1, num_data=10)
        optimizer.attach(part)
        x = make_batch()[0].requires_grad_()
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_a_forward_that_returns_nothing_keeps_its_sample():
    class Nothing(nn.Linear):
        def forward(self, x):
            self.output = super().forward(x)

    model = Nothing(4, 3)
    optimizer = plain(model.parameters())
    optimizer.attach(model)
    mean = model.weight.detach().clone()
    model(make_batch()[0])
    assert not torch.equal(model.weight, mean)
    model.output.sum().backward()
    optimizer.step()


# -- the end of an optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [Vprop, VON])
@pytest.mark.parametrize("arguments", [{}, {"fused": False}])
@pytest.mark.parametrize("hold", ["attach", "hold_sample"])
@pytest.mark.parametrize("cycle", [False, True])
def test_an_optimizer_that_goes_leaves_the_mean(optimizer_class, arguments, hold, cycle):
    model = make_model()
    mean = copy.deepcopy(model.state_dict())

    def train():
        optimizer = optimizer_class(model.parameters(), num_data=50, **arguments)
        if cycle:
            torch.optim.lr_scheduler.ConstantLR(optimizer)
        if hold == "attach":
            optimizer.attach(model)
            model(make_batch()[0])
        else:
            optimizer.hold_sample()
        assert not torch.equal(model[0].weight, mean["0.weight"])

    train()
    gc.collect()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hold", ["attach", "hold_sample"])
def test_a_notebook_cell_run_again(hold):
    """The new optimizer is built while the old one lives, with its sample in the weights."""
    model = make_model()
    mean = copy.deepcopy(model.state_dict())
    old = plain(model.parameters())
    if hold == "attach":
        old.attach(model)
        model(make_batch()[0])
    else:
        old.hold_sample()
    plain([torch.nn.Parameter(torch.zeros(2))])  # of another model: it changes nothing
    assert not torch.equal(model[0].weight, mean["0.weight"])
    new = plain(model[2].parameters())
    assert new is not None
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-6, atol=1e-6)
    attached = copy.deepcopy(old)  # no sample is in the way
    assert attached.state_dict().keys() == old.state_dict().keys()


@torch.no_grad()
def test_only_one_optimizer_samples_a_model_and_its_wrapper():
    model, (x, _) = make_model(), make_batch()
    old = plain(model.parameters())
    old.attach(model)
    wrapped = nn.DataParallel(model)
    new = plain(model.parameters())
    new.attach(wrapped)
    means = [p.clone() for p in model.parameters()]
    wrapped(x)
    new.discard_samples()
    for p, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(p, mean, rtol=1e-6, atol=1e-6)
    assert old is not new


# -- samples that do not change ------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_grad", [False, True])
def test_evaluation_in_the_blocks_meant_for_training_is_told(no_grad):
    """What users of IVON's package are used to: there such a block draws afresh each time."""
    model, (x, y) = make_model(), make_batch()
    optimizer = plain(model.parameters())
    for _ in range(2):
        for _ in range(2):  # micro-batches
            with optimizer.sampled_params():
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.set_grad_enabled(not no_grad):
        with optimizer.sampled_params():
            first = model(x)
        with (
            pytest.warns(UserWarning, match=r"gives the same sample until step\(\).*sampled_params\(train=False\)"),
            optimizer.sampled_params(),
        ):
            assert torch.allclose(model(x), first, rtol=1e-4, atol=1e-5)
        with optimizer.sampled_params():  # once is enough
            pass


def test_steps_that_are_left_out_are_no_evaluation():
    """As GradScaler leaves them out. The gradient of one batch may lie where that of the last one lay."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = plain([weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                weight.sum().backward()


def test_a_loss_that_does_not_depend_on_all_weights_is_no_evaluation():
    """The first and the last parameter take no part, as with the heads of other tasks."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = plain(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for _ in range(3):  # micro-batches
                with optimizer.sampled_params():
                    weights[1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_weights_in_shared_memory_are_told():
    model = make_model().share_memory()
    with pytest.warns(UserWarning, match=r"Parameter 0 of the group is in shared memory.*Hogwild.*mc_samples=0"):
        plain(model.parameters())
    Vprop(model.parameters(), num_data=10, mc_samples=0)

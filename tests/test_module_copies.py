"""What models do besides calling their layers: the copies do it among themselves, and leave the model alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vprop import Vprop
from vprop.replica import Replica


class Features(nn.Module):
    """Its head reads what a hook caught in its body."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.caught = {}
        self.register_buffer("calls", torch.zeros(()))
        self.body[2].register_forward_hook(self.make_hook())

    def make_hook(self):
        raise NotImplementedError

    def catch(self, module, args, output):
        self.caught["features"] = output
        self.calls = self.calls + 1

    def forward(self, x):
        self.body(x)
        return self.head(self.caught["features"])


class MethodHook(Features):
    def make_hook(self):
        return self.catch


class AttributeHook(Features):
    def make_hook(self):
        def hook(module, args, output):
            self.features = output

        return hook

    def forward(self, x):
        self.body(x)
        return self.head(self.features)


class ClosureHook(Features):
    def make_hook(self):
        caught = self.caught

        def hook(module, args, output):
            caught["features"] = output

        return hook


class DefaultHook(Features):
    def make_hook(self):
        return lambda module, args, output, model=self: model.catch(module, args, output)


class PartialHook(Features):
    def make_hook(self):
        return partial(type(self).catch, self)


class Runner:
    """An object that is no module and runs one."""

    def __init__(self, module):
        self.module = module

    def run(self, x):
        return self.module(x)


class ByAnObject(Features):
    def __init__(self):
        super().__init__()
        self.runner = Runner(self.body)

    def make_hook(self):
        return self.catch

    def forward(self, x):
        self.runner.run(x)
        return self.head(self.caught["features"])


class NewForward(Features):
    """As libraries do that patch a forward from outside, and look at the mode there."""

    def __init__(self):
        super().__init__()
        body, former = self.body, self.body.forward
        body.forward = lambda x: former(x) * (100 if body.training else 1)

    def make_hook(self):
        return self.catch


class HookInForward(Features):
    def make_hook(self):
        return lambda *what: None

    def forward(self, x):
        outputs = []
        handle = self.body.register_forward_hook(lambda module, args, output: outputs.append(output))
        self.body(x)
        handle.remove()
        (features,) = outputs
        return self.head(features)


class SharedList(nn.Module):
    """Two layers that leave notes in one list."""

    class Layer(nn.Module):
        def __init__(self, notes):
            super().__init__()
            self.linear, self.notes = nn.Linear(4, 4), notes

        def forward(self, x):
            self.notes.append(x.sum())
            return torch.tanh(self.linear(x))

    def __init__(self):
        super().__init__()
        self.notes = []
        self.first, self.second = self.Layer(self.notes), self.Layer(self.notes)

    def forward(self, x):
        self.notes.clear()
        return self.second(self.first(x)) + sum(self.notes)


MODELS = [
    MethodHook,
    AttributeHook,
    ClosureHook,
    DefaultHook,
    PartialHook,
    ByAnObject,
    NewForward,
    HookInForward,
    SharedList,
]


def build(model_class):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class().double()


def all_that_a_model_holds(model):
    """Attributes, the entries of lists and dicts among them, and the hooks; by identity."""
    held = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
            held.append((name, id(value), [id(entry) for entry in entries]))
    return held


@pytest.mark.parametrize("model_class", MODELS)
@torch.no_grad()
def test_a_replica_is_right_and_leaves_the_model_alone(model_class):
    """After a forward of the model, which has left things behind that are not the replica's."""
    model, x = build(model_class), torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    model(x)
    held, state = all_that_a_model_holds(model), {name: value.clone() for name, value in model.state_dict().items()}
    replica = Replica(model).eval()
    for factor in (0.5, 2.0):
        weights = {name: factor * p for name, p in model.named_parameters()}
        replica.load(weights)
        outputs = replica(x + 1)
        other = build(model_class).eval()
        other.load_state_dict(state | weights)
        torch.testing.assert_close(outputs, other(x + 1))
    assert all_that_a_model_holds(model) == held
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_results_get_out_of_a_hook_that_is_not_the_models():
    model, seen = nn.Sequential(nn.Linear(4, 3)), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    result = Replica(model)(torch.ones(2, 4))
    assert seen[0] is result


class MergingAdapter(nn.Linear):
    """As loralib has it: in evaluation mode the adapter is part of the weight."""

    def __init__(self):
        super().__init__(4, 3)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x):
        output = F.linear(x, self.weight, self.bias)
        return output if self.merged else output + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_layers_that_write_to_their_weights_when_the_mode_changes(training):
    model, x = build(lambda: nn.Sequential(MergingAdapter())).train(training), torch.eye(4).double()
    optimizer = Vprop([p for p in model.parameters() if p.requires_grad], num_data=10)
    posterior = optimizer.posterior(model)
    weight = model[0].weight.clone()
    samples = posterior.predict(x, num_samples=3).samples
    assert torch.equal(model[0].weight, weight)
    assert model[0].merged is not training
    base = build(lambda: nn.Sequential(MergingAdapter()))[0].weight
    for number, outputs in enumerate(samples):
        drawn = posterior._draw(0, number)
        expected = x @ (base + drawn["0.up"] @ drawn["0.down"]).T + drawn["0.bias"]
        torch.testing.assert_close(outputs, expected)

"""Models that run with other weights than their own: right for all that modules do, and without a trace."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from vprop.replica import Replica


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


class InAList(nn.Module):
    """Layers that are reached by other ways than attributes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = [self.first, {"second": self.second}]
        self.method = self.first.forward
        self.part = partial(F.linear, weight=self.second.weight)
        self.call = partial(_call, self.second)

    def forward(self, x):
        x = self.layers[1]["second"](torch.tanh(self.layers[0](x)))
        return self.call(self.part(self.method(x)))


def _call(module, x):
    return module(x)


class PastTheModules(nn.Module):
    """A closure over a parameter: no look at the modules finds it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight, linear = self.linear.weight, self.linear
        self.closure = lambda x: linear(torch.stack([x @ weight, x]).sum(0))

    def forward(self, x):
        return self.closure(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2)

    def forward(self, x):
        return self.lstm(x[:, None])[0][:, 0]


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def with_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))


def with_parametrization():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())


def with_batchnorm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def with_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output * module.weight.sum())
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + module.bias,))
    return model


def with_an_encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


MODELS = {
    "tied": Tied,
    "in a list": InAList,
    "past the modules": PastTheModules,
    "recurrent": Recurrent,
    "twice": twice,
    "weight_norm": with_weight_norm,
    "parametrization": with_parametrization,
    "batchnorm": with_batchnorm,
    "hooks": with_hooks,
    "encoder": with_an_encoder,
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double().eval()


def other_weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


def written_into_a_copy(name: str, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the model returns when its own parameters are overwritten."""
    model = build(name)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(weights[key])
        return model(x)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_output_is_that_of_a_model_with_these_weights(name):
    model, x = build(name), torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    replica = Replica(model)
    for seed in (1, 2, 3):
        weights = other_weights(model, seed)
        replica.load(weights)
        torch.testing.assert_close(replica(x), written_into_a_copy(name, weights, x))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_cached_parametrizations_are_those_of_the_weights_that_were_loaded():
    model, x = build("parametrization"), torch.ones(2, 4, dtype=torch.float64)
    draws = [other_weights(model, seed) for seed in (1, 2)]
    expected = [written_into_a_copy("parametrization", weights, x) for weights in draws]
    replica, outputs = Replica(model), []
    with nn.utils.parametrize.cached():
        for weights in draws:
            replica.load(weights)
            outputs.append(replica(x))
    torch.testing.assert_close(outputs, expected)


def test_gradients_go_to_the_weights_that_were_loaded():
    model, x = build("hooks"), torch.ones(2, 4, dtype=torch.float64)
    weights = {name: weight.requires_grad_() for name, weight in other_weights(model, 1).items()}
    replica = Replica(model)
    replica.load(weights)
    ours = torch.autograd.grad(replica(x).sum(), list(weights.values()))
    theirs = torch.autograd.grad(functional_call(model, weights, (x,)).sum(), list(weights.values()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_buffers_and_modes_are_its_own():
    model = build("batchnorm").train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    training, evaluating = Replica(model), Replica(model).eval()
    training(x)
    torch.testing.assert_close(evaluating(x), build("batchnorm")(x))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_compiled_part_runs_with_the_weights_that_were_loaded():
    model = build("hooks")
    x = torch.ones(2, 4, dtype=torch.float64)
    weights = other_weights(model, 1)
    expected = written_into_a_copy("hooks", weights, x)
    model[2] = torch.compile(model[2], backend="eager")
    model[0].compile(backend="eager")
    replica = Replica(model)
    replica.load({name.replace("2.", "2._orig_mod."): weight for name, weight in weights.items()})
    torch.testing.assert_close(replica(x).detach(), expected)


def test_weights_of_another_model_are_an_error():
    with pytest.raises(ValueError, match=r"no parameter or buffer 'weight'\. Build the model"):
        Replica(build("hooks")).load({"weight": torch.zeros(())})


def test_a_scripted_module_is_an_error():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 1)))
    with pytest.raises(TypeError, match=r"Sequential is, or has in it, a module compiled by torch\.jit"):
        Replica(model)

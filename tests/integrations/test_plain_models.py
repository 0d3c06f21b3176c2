"""Plain loops over models that are compiled, checkpointed, wrapped or reparametrized, against the plain model's run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.harness import assert_same_run, make_batch, make_model
from tests.integrations.loops import EVERY_WAY, OPEN_WAYS, WAYS, WITH_VOGN, mean_of, run
from vprop import Vprop

# -- torch.compile -------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(**options):
    return lambda model: torch.compile(model, backend="aot_eager", **options)


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def evaluate_at_the_mean(model, optimizer, step):
    """What validation does between steps: another mode of the model, and so another graph."""
    with torch.no_grad():
        model.eval()(make_batch()[0])
    model.train()


@pytest.mark.usefixtures("_fresh_compiler")
class TestCompiledModel:
    """aot_eager runs the same kernels of torch in the same order: to the last bit."""

    @pytest.mark.parametrize(("name", "way"), WITH_VOGN)
    def test_the_same_run(self, name, way):
        assert_same_run(run(name, way), run(name, way, wrap=compiled(), after_step=evaluate_at_the_mean))

    @pytest.mark.parametrize("wrap", [compiled(fullgraph=True), compiled_in_place], ids=["wrapper", "in place"])
    def test_attached_is_what_is_called(self, wrap):
        """Hooks of the compiled module run outside its graph, which can then be one piece."""
        assert_same_run(run("Vprop", "attach"), run("Vprop", "attach", wrap=wrap, attach_wrapper=True))

    def test_detached_and_attached_again(self):
        """A graph made without hooks must not be used with them, nor the other way round."""
        runs = []
        for wrap in (lambda model: model, compiled()):
            model = make_model()
            optimizer, called = Vprop(model.parameters(), num_data=100), wrap(model)
            for step in range(4):
                handle, (x, y) = optimizer.attach(model), make_batch(seed=step)
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                optimizer.step()
                handle.remove()
                before = mean_of(model)
                called(x)
                assert torch.equal(mean_of(model), before)
            runs.append((model, optimizer))
        assert_same_run(*runs)

    def test_model_and_step(self):
        """The step alone, in all configurations: tests/optim/test_schedules.py. Traced is the path without kernels."""

        def compile_step(optimizer):
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")

        both = run("Vprop", "attach", wrap=compiled(), prepare=compile_step, fused=False)
        assert_same_run(run("Vprop", "attach", fused=False), both)

    def test_with_autocast(self):
        """The casts are inside the graph, and made of the weights as they are."""
        arguments = {"autocast": torch.bfloat16}
        assert_same_run(run("IVON", "attach", **arguments), run("IVON", "attach", wrap=compiled(), **arguments))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "way"), WITH_VOGN)
    def test_by_inductor(self, name, way):
        """Its kernels sum in another order: roundings of the gradient, 1e-6 of five steps of 0.05."""
        assert_same_run(run(name, way), run(name, way, wrap=torch.compile), rtol=1e-4, atol=2e-6)


# -- what is done to models ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """The small model, whose hidden layer is computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = make_model(), reentrant

    def forward(self, x):
        # The older kind makes a graph only for inputs that have one.
        x = x.requires_grad_() if self.reentrant else x
        return self.layers[2](checkpoint(self.layers[:2], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_gradient_checkpointing(name, way, reentrant):
    """What is computed again in the backward pass is computed with the same sample."""
    model, optimizer = run(name, way, model=Checkpointed(reentrant=reentrant))
    assert_same_run(run(name, way), (model.layers, optimizer))


def test_gradient_checkpointing_of_single_examples():
    model, optimizer = run("VOGN", "closure", model=Checkpointed(reentrant=False))
    assert_same_run(run("VOGN", "closure"), (model.layers, optimizer), rtol=1e-5, atol=1e-6)


class Wrapper(nn.Module):
    """As DistributedDataParallel does: the model as ``module``, and names with a prefix."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("attach_wrapper", [False, True])
@pytest.mark.parametrize("wrap", [Wrapper, nn.DataParallel])
@pytest.mark.parametrize("way", WAYS)
def test_wrappers(way, wrap, attach_wrapper):
    assert_same_run(run("Vprop", way), run("Vprop", way, wrap=wrap, attach_wrapper=attach_wrapper))


class ByHand(nn.Module):
    """The small model with a first weight that is made of parameters, which come after the bias as torch has them."""

    def __init__(self, make_weight, *made_of) -> None:
        super().__init__()
        first, _, last = make_model()
        self.bias, self.made_of = first.bias, nn.ParameterList(made_of)
        self.make_weight, self.last = make_weight, last

    def forward(self, x):
        return self.last(F.linear(x, self.make_weight(*self.made_of), self.bias).tanh())


def pruned():
    model, mask = make_model(), torch.arange(32).view(8, 4) % 3 > 0
    by_hand = ByHand(lambda weight: weight * mask, make_model()[0].weight)
    prune.custom_from_mask(model[0], "weight", mask)
    return model, by_hand


def weight_norm():
    model, v = make_model(), make_model()[0].weight
    g = nn.Parameter(v.detach().norm(dim=1, keepdim=True))
    by_hand = ByHand(lambda g, v: g * v / v.norm(dim=1, keepdim=True), g, v)
    parametrizations.weight_norm(model[0])
    return model, by_hand


@pytest.mark.parametrize("make", [pruned, weight_norm])
@pytest.mark.parametrize(("name", "way"), WITH_VOGN)
def test_weights_that_are_made_of_parameters(name, way, make):
    """As in the model that has the formula written out: roundings of gradients, 1e-6 of five steps of 0.05."""
    numbers = []
    for model in make():
        _, optimizer = run(name, way, model=model)
        posterior = optimizer.posterior(model, likelihood="categorical")
        numbers.append([p.detach() for p in model.parameters()])
        numbers[-1] += [optimizer.state[p]["hess"] for p in model.parameters()]
        numbers[-1].append(posterior.predict(make_batch()[0], num_samples=4).probs)
    torch.testing.assert_close(*numbers, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.orthogonal])
@pytest.mark.parametrize(("name", "way"), OPEN_WAYS)
def test_parametrizations_that_keep_buffers(name, way, make):
    """The three ways are one run, power iterations and all."""
    runs = []
    for current in ("closure", way):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make_model()
            make(model[0])
        runs.append(run(name, current, model=model))
        assert runs[-1][1].posterior(model).predict(make_batch()[0], num_samples=2).samples.isfinite().all()
    assert_same_run(*runs, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """A weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.back = nn.Linear(8, 8, bias=False)
        self.back.weight = nn.Parameter(0.1 * torch.eye(8))
        self.there = nn.Linear(8, 8, bias=False)
        self.there.weight = self.back.weight

    def forward(self, x):
        hidden = self.layers[:2](x)
        return self.layers[2](self.back(self.there(hidden)) + hidden)


@pytest.mark.parametrize(("name", "way"), WITH_VOGN)
def test_tied_weights_are_sampled_once(name, way):
    """Both uses see one sample, in all ways: as in a model that names the weight once."""

    class NamedOnce(Tied):
        def forward(self, x):
            hidden, weight = self.layers[:2](x), self.back.weight
            return self.layers[2](F.linear(F.linear(hidden, weight), weight) + hidden)

    tied, once = Tied(), NamedOnce()
    del once.there
    first, second = run(name, way, model=tied), run(name, way, model=once)
    assert tied.there.weight is tied.back.weight
    torch.testing.assert_close(mean_of(first[0]), mean_of(second[0]), rtol=1e-5, atol=1e-6)


def test_gradients_by_torch_func():
    """Inside the block the weights are the sample, whoever differentiates."""
    model = make_model()
    optimizer = Vprop(model.parameters(), lr=0.05, num_data=200)
    for step in range(5):
        x, y = make_batch(seed=step)

        def loss(weights, x=x, y=y):
            return F.cross_entropy(functional_call(model, weights, (x,)), y)

        with optimizer.sampled_params():
            gradients = grad(loss)(dict(model.named_parameters()))
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    assert_same_run(run("Vprop", "context"), (model, optimizer), rtol=1e-5, atol=1e-6)

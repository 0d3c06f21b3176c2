"""Squared gradients of single examples, against a loop over the examples, for every way in which a model may use them.

The loop differentiates the loss of one example at a time by plain autograd: no vmap, no rules for layers.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

import vprop.curvature._single_examples as single_examples
import vprop.curvature.per_example as per_example
from vprop import VOGN, Objective
from vprop.calling import call_model
from vprop.curvature import PerExampleGaussNewton
from vprop.curvature._layer_calls import LayerCall, NotByLayersError
from vprop.noise import Draw, Stream

EXAMPLES = 7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
        for p in model.parameters():  # norms start with ones and zeros, which hide mistakes
            nn.init.normal_(p, std=0.5)
        return model


def observe(objective, names=None, chunk_size=3):
    parameters = {n: p for n, p in objective.model.named_parameters() if names is None or n in names}
    return PerExampleGaussNewton(chunk_size).observe(objective, parameters, Draw(3, 0, 0, stream=Stream.LABELS))


def pick(data, i):
    """Example i as a batch of one."""
    if isinstance(data, tuple | list):
        return type(data)(pick(part, i) for part in data)
    if isinstance(data, dict):
        return {key: pick(part, i) for key, part in data.items()}
    return data[i : i + 1] if isinstance(data, torch.Tensor) else data


def loop_over_examples(objective, names=None, shares=None):
    """The mean over examples of squared gradients, with ``shares`` as weights."""
    shares = torch.ones(objective.batch_size) if shares is None else shares
    parameters = {n: p for n, p in objective.model.named_parameters() if names is None or n in names}
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in parameters.values()]
    for i in range(objective.batch_size):
        weights = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
        loss = objective.loss_at(weights, pick(objective.x, i), pick(objective.y, i))
        if not loss.requires_grad:
            continue
        grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        for total, grad in zip(totals, grads, strict=True):
            total += shares[i] * grad.double().square()
    return [total / shares.sum() for total in totals]


class Model(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def image(channels=2, size=5, dims=2):
    return lambda: randn(EXAMPLES, channels, *[size] * dims)


VECTOR, SEQUENCE, IMAGE = (lambda: randn(EXAMPLES, 4)), (lambda: randn(EXAMPLES, 3, 4)), image()
TOKENS = lambda: randint(6, EXAMPLES, 5)  # noqa: E731


def chain(inputs, *layers):
    """A model of these layers, and its inputs."""
    return lambda: copy.deepcopy(nn.Sequential(*layers, nn.Flatten())), inputs


def on(inputs, forward, **parts):
    """A model that is a function of its parts, by default three linear layers, and its inputs."""
    usual = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 3)}
    return lambda: Model(forward, **copy.deepcopy(parts or usual)), inputs


def hooked(hook):
    make, inputs = chain(VECTOR, nn.Linear(4, 3), nn.Tanh())

    def build():
        model = make()
        model[0].register_forward_hook(hook)
        return model

    return build, inputs


def residual(m, x):
    x = F.relu(m.norm(m.stem(x)), inplace=True)
    return m.out(F.relu(x + m.b(F.relu(m.a(x)))).mean((2, 3)))


def overwriting(m, x):
    z = m.a(x)
    z[:, 0] *= 2
    z.relu_()
    return m.c(m.b(z).mul_(3).tanh_())


def several_ways(m, x):
    """Through a layer twice, and outside any layer."""
    return m.a(x) * m.b(x) + x @ m.a.weight.T * m.b.bias + m.a(x).cos() @ m.a.weight


def not_everywhere(m, x):
    with torch.no_grad():
        seen = m.a(x)
    return m.a(x) * seen + m.a(m.b(x)).detach()


def functional(m, x):
    return F.linear(bias=m.a.bias, weight=m.b.weight, input=x) + F.linear(x.cos(), m.b.weight, m.a.weight[0])


RESIDUAL = {
    "stem": nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
    "norm": nn.GroupNorm(2, 4),
    "a": nn.Conv2d(4, 4, 3, padding=1),
    "b": nn.Conv2d(4, 4, 3, padding=1),
    "out": nn.Linear(4, 3),
}
TRANSFORMER = {
    "layer": nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
    "positions": nn.Embedding(3, 4),
}

# name: (model, inputs)
MODELS = {
    "linear": chain(VECTOR, nn.Linear(4, 3)),
    "MLP": chain(VECTOR, nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)),
    "sequences": chain(SEQUENCE, nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    "without a batch": on(VECTOR, lambda m, x: m.a(x[0]).tanh()[None]),
    "convolution": chain(IMAGE, nn.Conv2d(2, 3, 3)),
    "CNN": chain(image(size=8), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1), nn.Tanh()),
    "stride, padding": chain(IMAGE, nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2))),
    "a stride that leaves a rest": chain(IMAGE, nn.Conv2d(2, 3, 2, stride=3, bias=False)),
    "dilation": chain(IMAGE, nn.Conv2d(2, 3, 2, dilation=(2, 1), padding=1)),
    "groups": chain(image(4), nn.Conv2d(4, 6, 3, groups=2)),
    "depthwise": chain(image(3), nn.Conv2d(3, 6, 3, groups=3, padding="valid")),
    "same": chain(IMAGE, nn.Conv2d(2, 3, 3, padding="same")),
    "same, even kernel": chain(IMAGE, nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(1, 2))),
    "circular": chain(IMAGE, nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular")),
    "reflected": chain(image(dims=1), nn.Conv1d(2, 3, 2, padding="same", padding_mode="reflect")),
    "in 1 dimension": chain(image(dims=1), nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 2)),
    "in 3 dimensions": chain(image(size=3, dims=3), nn.Conv3d(2, 3, 2, stride=2, padding=1)),
    "transposed": chain(IMAGE, nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2)),
    "transposed in 1 dimension": chain(image(dims=1), nn.ConvTranspose1d(2, 3, 3, dilation=2), nn.Tanh()),
    "transposed in 3 dimensions": chain(image(size=2, dims=3), nn.ConvTranspose3d(2, 1, 2, bias=False)),
    "image without a batch": on(IMAGE, lambda m, x: m.a(x[0]).flatten()[None], a=nn.Conv2d(2, 3, 3)),
    "several signals each": on(IMAGE, lambda m, x: m.a(x[0]).mean((0, 2))[None], a=nn.Conv1d(5, 3, 3)),
    "embedding": chain(TOKENS, nn.Embedding(6, 3), nn.Tanh()),
    "embedding with padding": chain(TOKENS, nn.Embedding(6, 3, padding_idx=-2), nn.Tanh(), nn.Linear(3, 2)),
    "embedding that is limited": chain(TOKENS, nn.Embedding(6, 3, max_norm=100.0), nn.Linear(3, 2)),
    "embedding bag": chain(TOKENS, nn.EmbeddingBag(6, 3), nn.Linear(3, 2)),
    "tied": on(TOKENS, lambda m, x: F.linear(m.a(x).tanh(), m.a.weight).mean(1), a=nn.Embedding(6, 3)),
    "GroupNorm": chain(IMAGE, nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "LayerNorm": chain(SEQUENCE, nn.Linear(4, 5), nn.LayerNorm((3, 5)), nn.Linear(5, 2)),
    "RMSNorm": chain(SEQUENCE, nn.Linear(4, 5), nn.RMSNorm(5), nn.Linear(5, 2)),
    "InstanceNorm": chain(IMAGE, nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.ReLU()),
    "BatchNorm, evaluation": chain(IMAGE, nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3).eval(), nn.ReLU()),
    "dropout, evaluation": chain(VECTOR, nn.Linear(4, 5), nn.Dropout(0.5).eval(), nn.Linear(5, 3)),
    "PReLU": chain(IMAGE, nn.Conv2d(2, 3, 3), nn.PReLU(3), nn.PReLU()),
    "bilinear": on(VECTOR, lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(4, 4, 3)),
    "residual": on(IMAGE, residual, **RESIDUAL),
    "attention": on(SEQUENCE, lambda m, x: m.layer(x + m.positions(torch.arange(3))).mean(1), **TRANSFORMER),
    "cross-attention": on(
        SEQUENCE, lambda m, x: m.a(x, x.cos(), x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)
    ),
    "in place": on(VECTOR, overwriting),
    "one layer twice": on(VECTOR, lambda m, x: m.c(m.a(m.a(x).tanh()))),
    "several ways": on(VECTOR, several_ways),
    "not everywhere": on(VECTOR, not_everywhere),
    "not at all": on(VECTOR, lambda m, x: m.a(x).detach()),
    "functional": on(VECTOR, functional),
    "of a constant": on(VECTOR, lambda m, x: m.c(torch.ones(2, 4).double()).mean(0) * x[:, :3]),
    "hook": hooked(lambda module, args, output: output**2 - args[0][:, :3]),
    "hook that mixes": hooked(lambda module, args, output: output - output.mean(0) / 2),
    "examples would meet": on(VECTOR, lambda m, x: m.a(x - x.sum(0) / 3).softmax(0) * m.b(x)),
    "two inputs": on(lambda: (VECTOR(), randn(EXAMPLES, 4, seed=1)), lambda m, x, y: m.a(x) - m.a(y).tanh()),
    "named inputs": on(lambda: {"x": VECTOR(), "power": 2}, lambda m, x, power: m.a(x) ** power),
}


def transformed(transform):
    """A layer, what a transformation makes of its function, and one more layer."""
    return on(VECTOR, lambda m, x: m.c(transform(lambda x, b=m.a.bias: F.linear(x, m.a.weight, b).tanh(), x)))


def forward_mode(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def slope_in_a_bias(f, x):
    return torch.func.grad(lambda bias: f(x, bias).square().sum())(torch.zeros(4).double()).expand(1, 4)


def reverse_gradient(z):
    z.register_hook(lambda slope: -2 * slope)
    return z


# Models that their layers' inputs and outputs do not describe, or not with a gain: for these there is torch.func.
OTHERS = {
    "weight norm": chain(IMAGE, parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), nn.Tanh()),
    "spectral norm": chain(VECTOR, parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()),
    "spectral norm, evaluation": chain(VECTOR, parametrizations.spectral_norm(nn.Linear(4, 3)).eval()),
    "product as a weight": on(VECTOR, lambda m, x: F.linear(x, m.a.weight @ m.b.weight, m.a.bias)),
    "slope in the inputs": transformed(lambda f, x: torch.func.grad(lambda x: f(x).sum())(x)),
    "slope along a direction": transformed(lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1]),
    "slope in forward mode": transformed(forward_mode),
    "slope in a bias": transformed(slope_in_a_bias),
    "vmap inside": transformed(lambda f, x: torch.func.vmap(f)(x)),
    "hook on a tensor": transformed(lambda f, x: reverse_gradient(f(x))),
    "hook on a tensor, if any": transformed(lambda f, x: reverse_gradient(z) if (z := f(x)).requires_grad else z),
}


def make_objective(name):
    make, inputs = (MODELS | OTHERS)[name]
    model, x = seeded(make), inputs()
    outputs = call_model(model, pick(x, 0))
    return Objective(model, F.mse_loss, x, randn(EXAMPLES, *outputs.shape[1:], seed=5))


def fail(*args):
    raise AssertionError("not by this path")


def not_by_layers(*args):
    raise NotByLayersError


WAYS = {"layers": [], "torch.func": ["_by_layers"], "one by one": ["_by_layers", "_by_transforms"]}


def only_by(way, monkeypatch):
    for other in WAYS[way]:
        monkeypatch.setattr(single_examples, other, not_by_layers)


def assert_equal(observed, expected):
    for value, wanted in zip(observed, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


NO_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop")


@NO_RULE
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_squares_are_those_of_a_loop(name, chunk_size, monkeypatch):
    """Seven examples in chunks that divide them or not; no trace is left."""
    monkeypatch.setattr(single_examples, "_by_transforms", fail)
    objective = make_objective(name)
    expected = loop_over_examples(objective)
    parameters = list(objective.model.parameters())
    before = {key: value.clone() for key, value in objective.model.state_dict().items()}
    random_state = torch.get_rng_state()
    observed = observe(objective, chunk_size=chunk_size)
    assert_equal(observed, expected)
    assert not any(value.requires_grad for value in observed)
    assert all(torch.equal(value, before[key]) for key, value in objective.model.state_dict().items())
    assert all(p is q and p.grad is None for p, q in zip(objective.model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)


@NO_RULE
@pytest.mark.parametrize("name", MODELS)
def test_without_layers(name, monkeypatch):
    """torch.func, and one example after the other where that cannot do it, are as exact."""
    objective = make_objective(name)
    monkeypatch.setattr(single_examples, "_by_layers", not_by_layers)
    assert_equal(observe(objective), loop_over_examples(objective))


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_cannot_be_had_by_their_layers(name):
    objective = make_objective(name)
    weights = {n: p.detach() for n, p in objective.model.named_parameters()}
    with pytest.raises(RuntimeError):
        single_examples._by_layers(
            lambda copies, x, y: objective.loss_at(copies, x[None], y[None]), weights, objective.x, objective.y
        )
    assert_equal(observe(objective), loop_over_examples(objective))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["CNN", "residual", "attention", "several ways", "functional"])
def test_some_of_the_parameters(name, frozen):
    """The others are constants, frozen or not."""
    objective = make_objective(name)
    names = [n for n, _ in objective.model.named_parameters()]
    for chosen in (names[::2], names[1::2], names[-1:]):
        for n, p in objective.model.named_parameters():
            p.requires_grad_(not frozen or n in chosen)
        assert_equal(observe(objective, chosen), loop_over_examples(objective, chosen))


LAYERS_ONLY = [
    "MLP",
    "sequences",
    "CNN",
    "same",
    "transposed",
    "embedding with padding",
    "in place",
    "one layer twice",
    "hook",
]


@pytest.mark.parametrize("name", LAYERS_ONLY)
def test_layers_need_no_weight_per_example(name, monkeypatch):
    """A convolution with a kernel per example is what would be slow."""
    rows_of, original = {}, single_examples._square

    def spy(name, copy, rows, calls):
        rows_of[name] = rows
        return original(name, copy, rows, calls)

    monkeypatch.setattr(single_examples, "_square", spy)
    observe(make_objective(name))
    assert rows_of
    assert all(rows is None for rows in rows_of.values())


def test_an_embedding_needs_no_table_per_example(monkeypatch):
    objective = make_objective("embedding with padding")
    monkeypatch.setattr(LayerCall, "weight_rows", fail)
    assert_equal(observe(objective, ["0.weight"]), loop_over_examples(objective, ["0.weight"]))


def test_a_large_batch_is_never_seen_at_once(monkeypatch):
    seen, original = [], per_example.squared_gradients

    def spy(loss_of_one, weights, x, y):
        seen.append(len(x))
        return original(loss_of_one, weights, x, y)

    monkeypatch.setattr(per_example, "squared_gradients", spy)
    observe(make_objective("CNN"), chunk_size=3)
    assert seen == [3, 3, 1]


LOSSES = {
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda: randint(3, EXAMPLES)),
    "class probabilities": (F.cross_entropy, lambda: randn(EXAMPLES, 3).softmax(1)),
    "sum": (nn.MSELoss(reduction="sum"), lambda: randn(EXAMPLES, 3)),
    "root": (lambda f, y: F.mse_loss(f, y).sqrt(), lambda: randn(EXAMPLES, 3)),
    "pairs": (lambda f, y: (f - y["a"]).abs().mean() * y["b"].sum(), lambda: {"a": VECTOR()[:, 1:], "b": VECTOR()}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss(name):
    """The loss of an example is the loss of a batch of one, whatever it is a mean over."""
    loss_fn, labels = LOSSES[name]
    objective = Objective(
        seeded(chain(VECTOR, nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))[0]), loss_fn, VECTOR(), labels()
    )
    assert_equal(observe(objective), loop_over_examples(objective))


@pytest.mark.parametrize("way", WAYS)
def test_labels_per_pixel_that_are_ignored(way, monkeypatch):
    """A batch of one is a mean over its own labels that count, and counts as their number, which may be 0."""
    only_by(way, monkeypatch)
    y = randint(3, EXAMPLES, 3, 3)
    y[:3, 0], y[5] = -100, -100
    objective = Objective(seeded(lambda: nn.Conv2d(2, 3, 3)), F.cross_entropy, IMAGE(), y)
    kept = [i for i in range(EXAMPLES) if i != 5]
    counted = Objective(objective.model, F.cross_entropy, objective.x[kept], y[kept])
    shares = (y[kept] >= 0).sum((1, 2))
    assert sorted(set(shares.tolist())) == [6, 9]
    assert_equal(observe(objective), loop_over_examples(counted, shares=shares))


def test_dropout_has_a_mask_per_example():
    """A hidden unit that is dropped for all examples has no gradient: with one mask half the units would."""
    model = seeded(chain(VECTOR, nn.Linear(4, 200), nn.Dropout(0.5), nn.Linear(200, 3))[0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        squares = observe(Objective(model, F.mse_loss, VECTOR(), randn(EXAMPLES, 3)), chunk_size=EXAMPLES)
    # Dropped for all seven with probability 1/128: more than 20 of 200 with probability below 1e-13.
    assert (squares[0] == 0).all(1).sum() <= 20


@pytest.mark.parametrize("name", ["MLP", "CNN", "sequences", "residual"])
def test_bfloat16(name, monkeypatch):
    """Squares and sums in float32, of slopes that have three digits."""
    monkeypatch.setattr(single_examples, "_by_transforms", fail)
    exact = make_objective(name)
    expected = loop_over_examples(exact)
    coarse = Objective(exact.model.bfloat16(), F.mse_loss, exact.x.bfloat16(), exact.y.bfloat16())
    for value, wanted in zip(observe(coarse), expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, rtol=0.2, atol=0.03 * float(wanted.max()))


def test_autocast_where_inputs_are_written_over(monkeypatch):
    """Under autocast a layer keeps a cast of its inputs, so that writing over them is allowed."""
    monkeypatch.setattr(single_examples, "_by_transforms", fail)

    def forward(m, x):
        hidden = m.a(x).to(x.dtype)
        out = m.c(hidden)
        if x.dtype == torch.float32:
            hidden.zero_()
        return out

    model = seeded(on(VECTOR, forward)[0])
    expected = loop_over_examples(Objective(model, F.mse_loss, VECTOR(), randn(EXAMPLES, 3)))
    objective = Objective(model.float(), F.mse_loss, VECTOR().float(), randn(EXAMPLES, 3).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        objective()
        observed = observe(objective)
    for value, wanted in zip(observed, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, rtol=0.1, atol=0.02 * float(wanted.max()))


def test_a_step_of_vogn_takes_these_squares():
    """After one step from h = 0 with β₂ = 0, h is ĥ at the mean."""
    objective = make_objective("residual")
    expected = loop_over_examples(objective)
    optimizer = VOGN(objective.model.parameters(), num_data=50, mc_samples=0, betas=(0.0, 0.0), chunk_size=4)
    optimizer.step(objective)
    assert_equal([optimizer.state[p]["hess"] for p in objective.model.parameters()], expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_one_by_one(kind):
    """torch.func cannot run them on a CPU (LSTM in float64); the squares are still those of single examples."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    model = Recurrent().double()
    x, y = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    objective = Objective(model, F.cross_entropy, x, y)
    found = PerExampleGaussNewton(4).observe(objective, dict(model.named_parameters()), None)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(6):
        Objective(model, F.cross_entropy, x[i : i + 1], y[i : i + 1])()
        for total, p in zip(expected, model.parameters(), strict=True):
            total += p.grad.square() / 6
    torch.testing.assert_close(found, expected)

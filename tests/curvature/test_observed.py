"""Estimators that look into the objective: second derivatives and per-example gradients, against exact ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import vprop.curvature.hessian as hessian_module
from tests.harness import make_batch, make_model
from vprop import CVI, VOGN, VON, Objective
from vprop.curvature import Evidence, Hessian, HessianDiagonal, NoiseProduct, PerExampleGaussNewton
from vprop.noise import Draw, Stream


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def observe(estimator, objective, names=None):
    parameters = {n: p for n, p in objective.model.named_parameters() if names is None or n in names}
    return estimator.observe(objective, parameters, Draw(3, 0, 0, stream=Stream.LABELS))


def diagonal_of(estimator, objective, names=None):
    return torch.cat([value.flatten() for value in observe(estimator, objective, names)])


def exact_hessian(objective):
    """By torch, of the loss as a function of all weights in one vector."""
    parameters = dict(objective.model.named_parameters())

    def loss(vector):
        pieces = vector.split([p.numel() for p in parameters.values()])
        weights = {n: piece.view_as(parameters[n]) for n, piece in zip(parameters, pieces, strict=True)}
        buffers = {name: buffer.clone() for name, buffer in objective.model.named_buffers()}
        return objective.loss_fn(functional_call(objective.model, weights | buffers, objective.x), objective.y)

    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels for attention have no second derivative
        return torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in parameters.values()]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x).tanh())


def chain(*middle):
    return lambda: nn.Sequential(nn.Linear(4, 5), *middle, nn.Linear(5, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x).mean(1)[:, :3]


TO_LABELS = (lambda: randn(6, 4), F.cross_entropy, lambda: randint(3, 6))
CNN = lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2))  # noqa: E731
# name: (model, (x, loss, y), whether it is a chain of linear layers whose examples do not meet; None: either path)
MODELS = {
    "logistic regression": (
        lambda: nn.Linear(4, 1),
        (lambda: randn(6, 4), F.binary_cross_entropy_with_logits, lambda: randint(2, 6, 1).double()),
        True,
    ),
    "softmax regression": (lambda: nn.Linear(4, 3), TO_LABELS, True),
    "softmax regression without bias": (lambda: nn.Linear(4, 3, bias=False), TO_LABELS, True),
    "MLP": (chain(nn.Tanh()), TO_LABELS, True),
    "deeper, in parts": (chain(nn.Sequential(nn.GELU(), nn.Linear(5, 5), nn.Softplus())), TO_LABELS, True),
    "log-softmax": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=-1)),
        (lambda: randn(6, 4), F.nll_loss, lambda: randint(3, 6)),
        None,
    ),
    "plain LayerNorm": (chain(nn.LayerNorm(5, elementwise_affine=False), nn.Tanh()), TO_LABELS, True),
    "ReLU in place": (chain(nn.ReLU(inplace=True)), TO_LABELS, None),
    "SiLU in place": (chain(nn.SiLU(inplace=True)), TO_LABELS, None),
    "softmax over the batch": (chain(nn.Softmax(dim=0)), TO_LABELS, False),
    "LayerNorm over the batch": (chain(nn.LayerNorm((6, 5), elementwise_affine=False)), TO_LABELS, False),
    "one layer twice": ((lambda: (layer := nn.Linear(4, 4)) and nn.Sequential(layer, nn.Tanh(), layer)), TO_LABELS, 0),
    "tied": (Tied, (lambda: randn(6, 3), F.mse_loss, lambda: randn(6, 3, seed=1)), False),
    "CNN": (CNN, (lambda: randn(5, 1, 4, 4), F.cross_entropy, lambda: randint(2, 5)), False),
    "LayerNorm with weights": (chain(nn.LayerNorm(5), nn.Tanh()), TO_LABELS, False),
    "sequences": (chain(nn.Tanh()), (lambda: randn(2, 3, 4), F.mse_loss, lambda: randn(2, 3, 3, seed=1)), False),
    "attention": (Attention, (lambda: randn(3, 2, 4), F.cross_entropy, lambda: randint(3, 3)), False),
    "BatchNorm, training": (chain(nn.BatchNorm1d(5), nn.Tanh()), TO_LABELS, False),
    "dropout, evaluation": (lambda: chain(nn.Dropout(0.5), nn.Tanh())().eval(), TO_LABELS, False),
}


def make_objective(name, dtype=torch.float64):
    make, (x, loss_fn, y), _ = MODELS[name]
    labels = y()
    labels = labels.to(dtype) if labels.is_floating_point() else labels
    return Objective(seeded(make).to(dtype), loss_fn, x().to(dtype), labels)


@pytest.mark.parametrize("name", MODELS)
def test_hessians_are_exact(name):
    """Whatever the chunk; and nothing is left behind: no gradient, no changed buffer, no changed weight."""
    objective = make_objective(name)
    expected = exact_hessian(objective)
    before = {key: value.clone() for key, value in objective.model.state_dict().items()}
    for chunk_size in (1, 2, 1000):
        matrix = torch.cat(observe(Hessian(chunk_size), objective))
        torch.testing.assert_close(matrix, expected, rtol=1e-9, atol=1e-12)
        diagonal = diagonal_of(HessianDiagonal(chunk_size), objective)
        torch.testing.assert_close(diagonal, expected.diagonal(), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in objective.model.state_dict().items())
    assert all(p.grad is None for p in objective.model.parameters())
    observed = observe(HessianDiagonal(), objective)
    for value, p in zip(observed, objective.model.parameters(), strict=True):
        assert value.shape == p.shape
        assert not value.requires_grad


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row[2] is not None])
def test_which_models_take_the_path_of_linear_layers(name, monkeypatch):
    """One row per unit where that is exact, and only there; it is the path that is taken, and gives the same.

    The other path is the one that asks for the loss at copies of the weights.
    """
    objective, is_chain = make_objective(name), bool(MODELS[name][2])
    estimators, original, asked = {"diagonal": HessianDiagonal(2), "full": Hessian(2)}, objective.loss_at, []
    monkeypatch.setattr(objective, "loss_at", lambda weights: asked.append(1) or original(weights))
    fast = {kind: diagonal_of(estimator, objective) for kind, estimator in estimators.items()}
    single_layer = is_chain and sum(isinstance(module, nn.Linear) for module in objective.model.modules()) == 1
    assert len(asked) == (not is_chain) + (not single_layer)
    monkeypatch.setattr(hessian_module, "linear_layers_of", lambda objective: None)
    for kind, estimator in estimators.items():
        torch.testing.assert_close(fast[kind], diagonal_of(estimator, objective), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [chain(nn.Tanh()), lambda: nn.Linear(4, 3)], ids=["MLP", "one layer"])
def test_a_loss_in_which_examples_meet(make):
    """The root of the mean squared error is no mean over examples: one example's slope depends on another's output."""
    objective = Objective(seeded(make), lambda f, y: F.mse_loss(f, y).sqrt(), randn(6, 4), randn(6, 3, seed=1))
    expected = exact_hessian(objective)
    torch.testing.assert_close(diagonal_of(HessianDiagonal(), objective), expected.diagonal())
    torch.testing.assert_close(torch.cat(observe(Hessian(), objective)), expected)


def test_a_hook_may_do_anything():
    objective = make_objective("MLP")
    objective.model[1].register_forward_hook(lambda module, args, output: output**2 - output.roll(1, dims=0))
    torch.testing.assert_close(diagonal_of(HessianDiagonal(), objective), exact_hessian(objective).diagonal())


@pytest.mark.parametrize("name", ["MLP", "CNN", "LayerNorm with weights"])
def test_some_of_the_parameters(name):
    """The others are constants, frozen or not."""
    objective = make_objective(name)
    names = [n for n, _ in objective.model.named_parameters()]
    chosen, rows, start = names[1:-1], [], 0
    for n, p in objective.model.named_parameters():
        rows += range(start, start + p.numel()) if n in chosen else []
        start += p.numel()
    expected = exact_hessian(objective)[rows][:, rows]
    objective.model.get_parameter(names[0]).requires_grad_(False)
    torch.testing.assert_close(torch.cat(observe(Hessian(), objective, chosen)), expected)
    torch.testing.assert_close(diagonal_of(HessianDiagonal(), objective, chosen), expected.diagonal())


@pytest.mark.parametrize("name", ["logistic regression", "MLP", "CNN", "tied"])
def test_float32(name):
    """Against the float64 Hessian at the same (rounded) weights and data."""
    single = make_objective(name, torch.float32)
    labels = single.y.double() if single.y.is_floating_point() else single.y
    diagonal, matrix = diagonal_of(HessianDiagonal(), single), torch.cat(observe(Hessian(), single))
    expected = exact_hessian(Objective(single.model.double(), single.loss_fn, single.x.double(), labels)).float()
    torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(diagonal, expected.diagonal(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("constructor", [CVI, VON])
def test_to_maximize_is_to_minimize_the_negative(constructor):
    weights = []
    for sign in (1, -1):
        model = make_model(torch.float64)
        optimizer = constructor(model.parameters(), num_data=50, maximize=sign < 0, mc_samples=2, betas=(0.5, 0.5))
        for step in range(3):
            x, y = make_batch(dtype=torch.float64, seed=step)
            loss_fn = lambda f, y, sign=sign: sign * F.cross_entropy(f, y)  # noqa: E731
            optimizer.step(Objective(model, loss_fn, x, y, likelihood="categorical"))
        weights.append(optimizer.posterior(model))
    torch.testing.assert_close(weights[1].mean, weights[0].mean)
    torch.testing.assert_close(weights[1].variance, weights[0].variance)


@pytest.mark.parametrize("estimator", [HessianDiagonal(), PerExampleGaussNewton()], ids=["Hessian", "Gauss-Newton"])
def test_mini_batches_are_unbiased(estimator):
    """The estimates on the parts of a batch have the estimate on the whole as their mean; no Monte Carlo."""
    model, x, y = seeded(chain(nn.Tanh())), randn(12, 4), randint(3, 12)
    whole = diagonal_of(estimator, Objective(model, F.cross_entropy, x, y))
    parts = [diagonal_of(estimator, Objective(model, F.cross_entropy, x[i::4], y[i::4])) for i in range(4)]
    torch.testing.assert_close(sum(parts) / 4, whole)


def test_noise_product_is_the_gradient_in_sigma():
    """E[ĝε] = σ·diag H on a quadratic: 5 standard errors of 40,000 draws for 3 weights (2e-6 false alarms)."""
    hess = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
    std, eps = torch.tensor([0.3, 0.2, 0.5]).double(), randn(40_000, 3)
    estimator = NoiseProduct()
    products = estimator.hess(estimator.fold(None, Evidence(0.4 + (eps * std) @ hess, noise=eps)), 50.0)
    error = products.std(0) / math.sqrt(len(eps))
    assert ((products.mean(0) - std * hess.diagonal()).abs() < 5 * error).all()


# -- per-example gradients -----------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, left, right, squash=True):
        hidden = self.linear(left) - self.linear(right)
        return self.out(hidden.tanh() if squash else hidden)


def loop_over_examples(objective, pick):
    total = 0.0
    for i in range(objective.batch_size):
        one = Objective(objective.model, objective.loss_fn, pick(i), objective.y[i : i + 1])
        one()
        total = total + torch.cat([p.grad.flatten() for p in objective.model.parameters()]).square()
    objective.model.zero_grad()
    return total / objective.batch_size


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dict with a flag", "CNN"])
def test_per_example_gradients_are_those_of_a_loop(kind, chunk_size):
    """Seven examples in chunks that divide them or not."""
    left, right, y = randn(7, 4), randn(7, 4, seed=1), randint(3, 7)
    model, x, pick = seeded(TwoInputs), (left, right), lambda i: (left[i : i + 1], right[i : i + 1])
    if kind == "tensor":
        model, x, pick = seeded(chain(nn.Tanh(), nn.LayerNorm(5))), left, lambda i: left[i : i + 1]
    elif kind == "CNN":
        model, x = seeded(CNN), randn(7, 1, 4, 4)
        y, pick = y % 2, lambda i: x[i : i + 1]
    elif kind.startswith("dict"):
        more = {"squash": False} if kind == "dict with a flag" else {}
        x = {"left": left, "right": right, **more}
        pick = lambda i: {"left": left[i : i + 1], "right": right[i : i + 1], **more}  # noqa: E731
    objective = Objective(model, F.cross_entropy, x, y)
    expected = loop_over_examples(objective, pick)
    torch.testing.assert_close(diagonal_of(PerExampleGaussNewton(chunk_size), objective), expected)


def test_per_example_memory_is_bounded_by_the_chunk():
    """Also where the optimizer holds a part of the model: a graph through all chunks must not be kept."""
    model = make_model()
    objective = Objective(model, F.cross_entropy, *make_batch())
    for names in (None, ["2.weight", "2.bias"]):
        assert not any(value.requires_grad for value in observe(PerExampleGaussNewton(3), objective, names))


def test_ignored_examples_are_as_if_left_out():
    """The loss is a mean over the labels that count, and so is its curvature."""
    x, y = make_batch()
    y[::3] = -100
    model = make_model()
    objective = Objective(model, F.cross_entropy, x, y)
    counted = Objective(model, F.cross_entropy, x[y >= 0], y[y >= 0])
    assert objective() == counted()
    for estimator in (PerExampleGaussNewton(5), HessianDiagonal()):
        torch.testing.assert_close(diagonal_of(estimator, objective), diagonal_of(estimator, counted))


def test_batchnorm_mixes_examples():
    objective = make_objective("BatchNorm, training")
    with pytest.raises(ValueError, match=r"'1' is a BatchNorm1d in training mode.*module\.eval\(\).*GroupNorm"):
        observe(PerExampleGaussNewton(), objective)
    objective.model.eval()
    expected = loop_over_examples(objective, lambda i: objective.x[i : i + 1])
    torch.testing.assert_close(diagonal_of(PerExampleGaussNewton(4), objective), expected)


def test_batchnorm_without_running_statistics_mixes_them_in_evaluation_mode_too():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten()).eval()
    objective = Objective(model, F.mse_loss, torch.ones(3, 1, 3, 3), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="BatchNorm2d"):
        observe(PerExampleGaussNewton(), objective)


@pytest.mark.parametrize("constructor", [CVI, VOGN, VON])
def test_the_global_random_state_is_not_touched(constructor):
    model = make_model()
    optimizer = constructor(model.parameters(), num_data=10, mc_samples=2)
    before = torch.get_rng_state()
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    assert torch.equal(torch.get_rng_state(), before)

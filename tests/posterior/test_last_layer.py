"""Posteriors of a last layer: the body runs once, and predictions are those of the whole model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.posterior.test_linearized import covariance_of, gaussian_over
from vprop import VON, Objective, Vprop, load_posterior
from vprop.posterior import FullPosterior

X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A body that counts its calls, and a head, with room for what subclasses do around it."""

    def __init__(self, outputs=3):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
            self.head = nn.Linear(8, outputs)
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return self.head(self.body(x))


class Squeezed(Network):
    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        return super().forward(x).squeeze(-1)


class WithLogits(Network):
    class Output(dict):
        __getattr__ = dict.__getitem__

    def forward(self, x):
        return self.Output(loss=torch.zeros(()), logits=super().forward(x))


def head_posterior(model, constructor=Vprop):
    """Of an optimizer that has the head's parameters only; the rest is fixed."""
    optimizer = constructor(model.head.parameters(), num_data=50, lr=0.1)
    y = torch.zeros(11, dtype=torch.long) if model.head.out_features > 1 else torch.zeros(11)

    def loss(output, y):
        output = getattr(output, "logits", output)
        return F.cross_entropy(output, y) if output.dim() > 1 else F.mse_loss(output, y)

    for _ in range(2):
        optimizer.step(Objective(model.eval(), loss, X, y))
    return optimizer.posterior(model, likelihood="categorical" if model.head.out_features > 1 else "gaussian")


@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
@pytest.mark.parametrize("constructor", [Vprop, VON])
@pytest.mark.parametrize("kind", [Network, Squeezed, WithLogits])
def test_predictions_are_those_of_the_whole_model(kind, constructor, method):
    posterior = head_posterior(kind(), constructor)
    last = posterior.last_layer()
    assert last.head == "head"
    assert posterior.head is None, "the first posterior stays as it was"
    whole, quick = (q.predict(X, 6, seed=2, method=method) for q in (posterior, last))
    assert quick.samples.shape == whole.samples.shape
    torch.testing.assert_close(quick.samples, whole.samples, rtol=1e-5, atol=1e-6)
    if method == "linearized":
        torch.testing.assert_close(quick.output_covariance, whole.output_covariance, rtol=1e-4, atol=1e-6)
    batches = last.predict(iter(X.split(4)), 6, seed=2, method=method)
    torch.testing.assert_close(batches.samples[0], whole.samples[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(last.kl(), posterior.kl())


@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
@pytest.mark.parametrize("vmap", [True, False])
def test_the_body_runs_once_for_each_batch(method, vmap):
    """And the head for each draw."""
    model = Network()
    posterior = head_posterior(model).last_layer("head")
    body, head = [], []
    model.body.register_forward_hook(lambda *_: body.append(1))
    model.head.register_forward_hook(lambda *_: head.append(1))
    posterior.predict(X, 6, method=method, vmap=vmap)
    assert len(body) == 1
    if method == "monte_carlo":
        assert len(head) == 1 + (1 if vmap else 6)
    body.clear()
    posterior.predict(iter(X.split(4)), 6, method=method)
    assert len(body) == 3


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_of_a_posterior_over_all_weights_it_is_the_marginal(structure):
    """The others are at their mean: in the posterior, not in the model, which may have moved on."""
    model = Network().double()
    posterior = gaussian_over(model, structure, likelihood="categorical")
    with torch.no_grad():
        expected_mean = model.eval()(X.double())
        for p in model.parameters():
            p.zero_()
    last = posterior.last_layer()
    assert (last.head, list(last.mean)) == ("head", ["head.weight", "head.bias"])
    rows = slice(posterior.num_parameters - last.num_parameters, None)
    torch.testing.assert_close(covariance_of(last), covariance_of(posterior)[rows, rows])
    for name in last.mean:
        torch.testing.assert_close(last.variance[name], posterior.variance[name])
    linearized = last.predict(X.double(), method="linearized")
    torch.testing.assert_close(linearized.output_mean, expected_mean)
    sampled = last.predict(X.double(), 3, seed=1)
    draws = [last._draw(1, k) for k in range(3)]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(posterior.mean[name])
        features = model.body(X.double())
    expected = torch.stack([F.linear(features, draw["head.weight"], draw["head.bias"]) for draw in draws])
    torch.testing.assert_close(sampled.samples, expected)
    outputs = [sampled_model(X.double()).detach() for sampled_model in last.sampled_models(3, seed=1)]
    torch.testing.assert_close(torch.stack(outputs), expected)


def test_a_prior_with_correlations_is_marginal_too():
    posterior = gaussian_over(Network().double(), "full")
    size = posterior.num_parameters
    matrix = torch.eye(size, dtype=torch.float64) * 2 + 1 / size
    prior = posterior.prior._replace(precision_matrix=matrix, precision=posterior._by_name(matrix.diagonal()))
    joint = FullPosterior(posterior.model, posterior.mean, posterior.precision, prior, ess=1.0)
    last = joint.last_layer()
    rows = slice(size - last.num_parameters, None)
    block = torch.linalg.inv(torch.linalg.inv(matrix)[rows, rows])
    torch.testing.assert_close(last.prior.precision_matrix, block)
    # KL between two Gaussians over the head, by torch.
    own = torch.distributions.MultivariateNormal(last._flat(last.mean), covariance_of(last))
    other = torch.distributions.MultivariateNormal(torch.zeros_like(own.mean), precision_matrix=block)
    torch.testing.assert_close(last.kl(), torch.distributions.kl_divergence(own, other))


def test_it_is_found_saved_and_asked_by_threads(tmp_path):
    posterior = head_posterior(Network())
    posterior.save(tmp_path / "head.safetensors")
    last = load_posterior(tmp_path / "head.safetensors", posterior.model).last_layer()
    expected = [posterior.predict(X, 4, seed=seed).samples for seed in range(5)]
    start = threading.Barrier(4)

    def ask(first):
        start.wait()
        return [(seed % 5, last.predict(X, 4, seed=seed % 5).samples) for seed in range(first, first + 25)]

    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(ask, range(4)):
            for seed, samples in answers:
                torch.testing.assert_close(samples, expected[seed], rtol=1e-5, atol=1e-6)
    last.save(tmp_path / "again.safetensors")  # nothing is lost, because nothing but the head has a posterior
    of_all = gaussian_over(Network(), "diagonal").last_layer()
    with pytest.raises(ValueError, match=r"save\(path\): this posterior of a last layer has the rest .* Save that one"):
        of_all.save(tmp_path / "never.safetensors")


def test_the_default_of_a_sequential_is_its_last_layer():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), nn.Identity())
    assert gaussian_over(model, "diagonal").last_layer().head == "2"
    deep = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 2)))
    optimizer = Vprop(deep[1].parameters(), num_data=10)
    assert optimizer.posterior(deep).last_layer().head == "1.1"


# -- what is refused ---------------------------------------------------------------------------------------------------


class Twice(Network):
    def forward(self, x):
        return self.head(self.body(x)) + self.head(self.body(2 * x))


class Afterwards(Network):
    def forward(self, x):
        return super().forward(x) * 2


class NotCalled(Network):
    def forward(self, x):
        return F.linear(self.body(x), self.head.weight, self.head.bias)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, r"last_layer\('head'\): this module was called 2 times in the model's forward, must be called once"),
        (Afterwards, r"last_layer\('head'\): the model's output is not that of this module: something is done with it"),
        (NotCalled, r"last_layer\('head'\): this module was not called in the model's forward, must be called once"),
    ],
)
@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
def test_a_head_that_is_none(kind, message, method):
    posterior = gaussian_over(kind(), "diagonal").last_layer("head")
    with pytest.raises(ValueError, match=message):
        posterior.predict(X, method=method)


def test_names_that_are_none():
    posterior = gaussian_over(Network(), "diagonal")
    with pytest.raises(ValueError, match=r"last_layer\('tail'\): the model has no such module\. It has .*'head'"):
        posterior.last_layer("tail")
    with pytest.raises(TypeError, match=r"last_layer\(head\): got the module Linear, must be its name in the model"):
        posterior.last_layer(posterior.model.head)
    with pytest.raises(ValueError, match=r"last_layer\('body\.2'\): none of this module's weights has a posterior"):
        posterior.last_layer("body.2")
    with pytest.raises(ValueError, match=r"the model is a single module, and has no last one"):
        gaussian_over(nn.Linear(4, 2), "diagonal").last_layer()


def test_weights_that_the_body_uses_too():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight

        def forward(self, x):
            return self.head(self.first(x))

    posterior = gaussian_over(Tied(), "diagonal")
    message = r"last_layer\('head'\): this module shares the weight 'first\.weight' with"
    with pytest.raises(ValueError, match=message):
        posterior.last_layer("head")
    tied = Tied()
    tied.head.register_parameter("bias", None)  # all that the head has goes by the name of the body's
    with pytest.raises(ValueError, match=message):
        gaussian_over(tied, "diagonal").last_layer("head")

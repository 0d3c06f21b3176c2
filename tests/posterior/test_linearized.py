"""Linearised predictions: closed forms for linear models, finite differences and Monte Carlo for the others."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.harness import make_batch, make_model, train
from tests.test_replica import MODELS, build
from vprop import VONG, Prediction, Vprop
from vprop.posterior import DiagonalPosterior, FullPosterior, GaussianPrior, LinearizedPrediction, Posterior
from vprop.posterior.predictive import jacobians
from vprop.posterior.predictive.jacobians import LinearizedOutputs

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gaussian_over(model, structure, size=0.3, **rest):
    """A posterior with variances, and correlations, that are nobody's estimate."""
    generator = torch.Generator().manual_seed(5)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    prior = GaussianPrior({n: torch.zeros(()) for n in mean}, {n: torch.ones(()) for n in mean})
    if structure == "diagonal":
        variance = {n: size * torch.rand(m.shape, generator=generator, dtype=m.dtype) for n, m in mean.items()}
        return DiagonalPosterior(model, mean, variance, prior, ess=10.0, **rest)
    weights = sum(m.numel() for m in mean.values())
    root = torch.randn(weights, weights, generator=generator, dtype=torch.float64)
    precision = root @ root.T / size + torch.eye(weights, dtype=torch.float64) / size
    return FullPosterior(model, mean, precision, prior, ess=10.0, **rest)


def covariance_of(posterior):
    if isinstance(posterior, FullPosterior):
        return posterior.covariance
    return torch.cat([posterior.variance[name].flatten() for name in posterior.mean]).double().diag()


def linear(outputs, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, outputs).to(dtype)


# -- linear models, where it is exact ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_linear_regression_in_closed_form(structure):
    """y = Wx + b: J of output k is x in row k of W and 1 in b, so all is a quadratic form in (x, 1)."""
    model = linear(2)
    posterior = gaussian_over(model, structure, likelihood="gaussian", noise_variance=0.2)
    prediction = posterior.predict(X, method="linearized")
    covariance = covariance_of(posterior)
    expected = torch.zeros(7, 2, 2, dtype=torch.float64)
    for i, x in enumerate(X):
        rows = torch.zeros(2, 10, dtype=torch.float64)
        rows[0, :4], rows[1, 4:8], rows[0, 8], rows[1, 9] = x, x, 1, 1
        expected[i] = rows @ covariance @ rows.T
    torch.testing.assert_close(prediction.output_covariance, expected)
    torch.testing.assert_close(prediction.mean, model(X).detach())
    torch.testing.assert_close(prediction.epistemic_variance, expected.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(prediction.variance, expected.diagonal(dim1=1, dim2=2) + 0.2)
    low, high = prediction.interval(0.95)
    torch.testing.assert_close((high - low) / 2, 1.959963984540054 * prediction.std)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_linear_models_against_monte_carlo(structure, likelihood):
    """1000 draws: means within 5 standard errors, of 14 numbers and in 4 cases: a false alarm in 30000 runs."""
    posterior = gaussian_over(linear(2), structure, likelihood=likelihood)
    exact, sampled = posterior.predict(X, method="linearized"), posterior.predict(X, 1000)
    if likelihood == "gaussian":
        values, mean = sampled.samples, exact.mean
        ratio = exact.epistemic_variance / sampled.epistemic_variance
        assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 1000)
    else:
        values, mean = sampled.samples.sigmoid(), exact.probs
        torch.testing.assert_close(exact.std, sampled.std, rtol=0.15, atol=0)
        torch.testing.assert_close(exact.mutual_information, sampled.mutual_information, rtol=0.15, atol=2e-3)
        for q in (0.1, 0.5, 0.9):
            torch.testing.assert_close(exact.quantile(q), sampled.quantile(q), rtol=0, atol=0.06)
    errors = values.std(0) / math.sqrt(1000)
    assert ((values.mean(0) - mean).abs() / errors).max() < 5


def test_binary_answers_are_the_integral_over_the_logit():
    """By the trapezoid rule on a fine grid."""
    mean, std = torch.tensor([[0.3], [-2.0], [6.0]], dtype=torch.float64), torch.tensor([[0.5], [3.0], [12.0]])
    prediction = LinearizedPrediction(mean, std.double().square()[..., None], "bernoulli")
    eps = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    weight = torch.exp(-0.5 * eps.square())
    weight /= weight.sum()
    p = (mean + std * eps).sigmoid()
    expected = (p * weight).sum(-1, keepdim=True)
    torch.testing.assert_close(prediction.probs, expected)
    spread = ((p - expected).square() * weight).sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(prediction.std, spread)
    inner = ((torch.special.entr(p) + torch.special.entr(1 - p)) * weight).sum(-1, keepdim=True)
    torch.testing.assert_close(prediction.mutual_information, prediction.entropy - inner)


# -- classes -----------------------------------------------------------------------------------------------------------


def logits_with(covariance, mean):
    return LinearizedPrediction(mean, covariance, "categorical", num_samples=4000)


def test_two_classes_are_a_yes_or_no():
    mean = torch.tensor([[0.5, -0.5], [2.0, 3.0]], dtype=torch.float64)
    covariance = torch.tensor([[[2.0, 0.3], [0.3, 1.0]], [[4.0, -1.0], [-1.0, 2.0]]], dtype=torch.float64)
    difference = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    binary = LinearizedPrediction((mean[:, :1] - mean[:, 1:]), difference[:, None, None], "bernoulli")
    torch.testing.assert_close(logits_with(covariance, mean).probs[:, :1], binary.probs)


def test_classes_without_variance_and_with_a_shift_of_all():
    mean = 3 * torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nothing, shift = torch.zeros(5, 6, 6, dtype=torch.float64), torch.full((5, 6, 6), 9.0, dtype=torch.float64)
    for covariance in (nothing, shift):
        torch.testing.assert_close(logits_with(covariance, mean).probs, mean.softmax(-1))
    assert logits_with(nothing, mean).mutual_information.max() < 1e-12
    one_class = logits_with(torch.ones(5, 1, 1, dtype=torch.float64), mean[:, :1])
    assert one_class.probs.tolist() == [[1.0]] * 5


@pytest.mark.parametrize(("spread", "bound"), [(0.3, 0.01), (1.0, 0.05), (3.0, 0.16)])
def test_classes_are_close_to_the_integral(spread, bound):
    """In total variation, on average; without the variance of the logits (the model at the mean) it is further away."""
    generator = torch.Generator().manual_seed(1)
    mean = spread * torch.randn(30, 10, generator=generator, dtype=torch.float64)
    root = spread * torch.randn(30, 10, 10, generator=generator, dtype=torch.float64) / math.sqrt(10)
    prediction = logits_with(root @ root.mT, mean)
    integral = Prediction(prediction.samples, "categorical").probs

    def distance(probs):
        return float((probs - integral).abs().sum(-1).mean() / 2)

    scaled = (mean / (1 + math.pi / 8 * prediction.output_variance).sqrt()).softmax(-1)  # each logit by itself
    assert distance(prediction.probs) < min(bound, distance(scaled))
    assert distance(prediction.probs) < 0.5 * distance(mean.softmax(-1))
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(30, dtype=torch.float64))


def test_drawn_logits_have_the_covariance():
    covariance = torch.tensor([[[2.0, 1.2], [1.2, 1.0]], [[1.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    prediction = LinearizedPrediction(torch.zeros(2, 2, dtype=torch.float64), covariance, num_samples=20000, seed=4)
    for i in range(2):
        assert (torch.cov(prediction.samples[:, i].T) - covariance[i]).abs().max() < 5 * 2 * math.sqrt(2 / 20000)
    assert prediction.samples is prediction.samples
    again = LinearizedPrediction(torch.zeros(2, 2, dtype=torch.float64), covariance, num_samples=3, seed=4)
    torch.testing.assert_close(again.samples, prediction.samples[:3])


def test_several_labels_for_an_example():
    """(examples, places, classes): each place has the covariance of its own logits."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    root = torch.randn(2, 12, 12, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    whole = logits_with(covariance, mean)
    for place in range(3):
        part = slice(4 * place, 4 * place + 4)
        torch.testing.assert_close(whole.probs[:, place], logits_with(covariance[:, part, part], mean[:, place]).probs)


def test_noise_that_depends_on_the_input():
    """E[exp s] of a normal s, and the variance of the means alone."""
    mean = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    covariance = torch.tensor([[[0.3, 0.1], [0.1, 0.8]]], dtype=torch.float64)
    prediction = LinearizedPrediction(mean, covariance, "heteroscedastic")
    assert prediction.mean.tolist() == [[1.0]]
    assert prediction.epistemic_variance.tolist() == [[0.3]]
    torch.testing.assert_close(prediction.aleatoric_variance, torch.tensor([[math.exp(-0.5 + 0.4)]]).double())


# -- other models ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def jacobian_by_differences(model, x):
    """Central differences, weight by weight, of a model whose parameters are overwritten."""
    columns = []
    for p in model.parameters():
        for i in range(p.numel()):
            ends = []
            for step in (1e-5, -2e-5):
                p.view(-1)[i] += step
                ends.append(model(x))
            p.view(-1)[i] += 1e-5
            columns.append((ends[0] - ends[1]) / 2e-5)
    return torch.stack(columns, -1)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("recurrent", "encoder")])
def test_networks_against_finite_differences(name, structure):
    model = build(name)
    posterior = gaussian_over(model, structure)
    prediction = posterior.predict(X, method="linearized")
    jacobian = jacobian_by_differences(build(name), X)
    expected = jacobian @ covariance_of(posterior) @ jacobian.mT
    torch.testing.assert_close(prediction.output_mean, model(X).detach())
    torch.testing.assert_close(prediction.output_covariance, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["_by_columns", "_by_rows", "_one_by_one"])
@pytest.mark.parametrize("name", ["batchnorm", "tied", "hooks"])
def test_the_modes_agree(name, mode):
    posterior = gaussian_over(build(name), "diagonal")
    outputs = LinearizedOutputs(posterior)
    outputs._modes = [getattr(outputs, mode)]
    expected = posterior.predict(X, method="linearized")
    mean, covariance = outputs(X, lambda count: None)
    torch.testing.assert_close(mean, expected.output_mean)
    torch.testing.assert_close(covariance, expected.output_covariance)


def chosen_mode(posterior, x):
    outputs = LinearizedOutputs(posterior)
    outputs(x, lambda count: None)
    return outputs._modes[0].__name__


def test_the_sizes_choose_the_mode():
    few_weights = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 9)).double()
    few_weights[1].requires_grad_(False)
    posterior = Vprop(few_weights[0].parameters(), num_data=10).posterior(few_weights)
    assert chosen_mode(posterior, X) == "_by_columns"
    assert chosen_mode(gaussian_over(build("batchnorm"), "diagonal"), X) == "_by_rows"


def test_a_model_that_neither_mode_can_run():
    """Its forward looks at numbers, which vmap has none of."""

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(3)

        def forward(self, x):
            return self.inner(x) if float(x.sum()) > -1e9 else x

    posterior = gaussian_over(Looks(), "diagonal")
    assert chosen_mode(posterior, X) == "_one_by_one"
    plain = gaussian_over(posterior.model.inner, "diagonal").predict(X, method="linearized")
    torch.testing.assert_close(
        posterior.predict(X, method="linearized").output_covariance, plain.output_covariance, rtol=1e-10, atol=1e-12
    )


def test_few_examples_at_a_time(monkeypatch):
    posterior = gaussian_over(build("batchnorm"), "diagonal")
    expected = posterior.predict(X, method="linearized")
    sizes = []
    own = LinearizedOutputs._covariance
    monkeypatch.setattr(
        LinearizedOutputs, "_covariance", lambda self, j: sizes.append(len(j["0.bias"])) or own(self, j)
    )
    monkeypatch.setattr(jacobians, "ELEMENTS", 3 * 4 * posterior.num_parameters)
    for data in (X, iter(X.split(4))):
        sizes.clear()
        prediction = posterior.predict(data, method="linearized")
        assert max(sizes) == 3
        assert sum(sizes) == 7
        torch.testing.assert_close(prediction.output_covariance, expected.output_covariance)


def test_small_variances_are_where_sampling_and_linearising_agree():
    """With σ → 0 the quadratic terms vanish faster than the linear ones: the ratio of variances goes to 1."""
    ratios = []
    for size in (1e-1, 1e-5):
        posterior = gaussian_over(make_model(torch.float64), "diagonal", size, likelihood="gaussian")
        linearized, sampled = posterior.predict(X, method="linearized"), posterior.predict(X, 1000)
        ratios.append(linearized.epistemic_variance / sampled.epistemic_variance)
    assert (ratios[1] - 1).abs().max() < 5 * math.sqrt(2 / 1000)
    assert (ratios[0] - 1).abs().max() > 0.2


@pytest.mark.parametrize("constructor", [Vprop, VONG])
def test_float32_and_trained_posteriors(constructor):
    model, optimizer = train(constructor, steps=3, num_data=200)
    posterior, (x, _) = optimizer.posterior(model, likelihood="categorical"), make_batch()
    prediction = posterior.predict(x, method="linearized", seed=2)
    assert prediction.probs.dtype == prediction.entropy.dtype == prediction.std.dtype == torch.float32
    assert prediction.samples.shape == (32, 12, 3)
    torch.testing.assert_close(prediction.probs, posterior.predict(x, 2000).probs, rtol=0, atol=0.02)
    assert (prediction.mutual_information <= prediction.entropy + 1e-5).all()
    assert repr(prediction) == "LinearizedPrediction(output_mean=(12, 3), likelihood='categorical')"


def test_the_model_is_as_it_was():
    model = build("batchnorm").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    posterior = gaussian_over(model, "diagonal")
    posterior.predict(X, method="linearized")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


# -- what cannot be done -----------------------------------------------------------------------------------------------


def test_a_structure_that_does_not_say_how():
    class Mute(DiagonalPosterior):
        _times_root = Posterior._times_root

    diagonal = gaussian_over(linear(1), "diagonal")
    posterior = Mute(diagonal.model, diagonal.mean, diagonal.variance, diagonal.prior, ess=1.0)
    with pytest.raises(NotImplementedError, match=r"Mute does not say how a Jacobian .* Write _times_root\(\), or use"):
        posterior.predict(X, method="linearized")


def test_a_model_that_changes_its_weights_by_itself():
    class Merging(nn.Linear):
        def train(self, mode=True):
            return super().train(mode)

    model = Merging(4, 2).double()
    with pytest.raises(TypeError, match=r"change their weights when they are put into evaluation mode"):
        gaussian_over(model, "diagonal").predict(X, method="linearized")


@pytest.mark.parametrize("name", ["recurrent", "encoder"])
def test_examples_that_depend_on_each_other(name):
    """Both take the first dimension for time."""
    posterior = gaussian_over(build(name), "diagonal")
    with pytest.raises(ValueError, match=r"something else for an example alone than among others\. .*batch_first=True"):
        posterior.predict(X, method="linearized")


def test_a_sequence_with_the_batch_first():
    encoder = build("encoder")
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prediction = gaussian_over(encoder, "diagonal").predict(x, method="linearized")
    assert prediction.output_covariance.shape == (3, 20, 20)
    jacobian = jacobian_by_differences(build("encoder"), x[:1]).flatten(0, 2)
    expected = jacobian @ covariance_of(gaussian_over(encoder, "diagonal")) @ jacobian.T
    torch.testing.assert_close(prediction.output_covariance[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["_by_columns", "_by_rows"])
def test_threads_may_ask_at_once(mode):
    if mode == "_by_columns":
        model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Tanh(), nn.Linear(1, 9)).double()
        posterior = Vprop(model[0].parameters(), num_data=10).posterior(model)
    else:
        posterior = gaussian_over(build("batchnorm"), "diagonal")
    assert chosen_mode(posterior, X) == mode
    expected = [posterior.predict(X[:rows], method="linearized").output_covariance for rows in range(1, 8)]
    start = threading.Barrier(6)

    def ask(first):
        start.wait()
        rows = [1 + (first + i) % 7 for i in range(30)]
        return [(n, posterior.predict(X[:n], method="linearized").output_covariance) for n in rows]

    with ThreadPoolExecutor(6) as pool:
        for answers in pool.map(ask, range(6)):
            for rows, covariance in answers:
                torch.testing.assert_close(covariance, expected[rows - 1])


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_no_examples_have_an_empty_prediction(likelihood):
    model = nn.Linear(2, 3)
    posterior = Vprop(model.parameters(), num_data=10).posterior(model, likelihood=likelihood)
    prediction = posterior.predict(torch.zeros(0, 2), method="linearized")
    assert prediction.output_covariance.shape == (0, 3, 3)
    values = ["mean"] if likelihood == "gaussian" else ["probs", "entropy", "confidence", "mutual_information"]
    for value in (*values, "std"):
        expected = () if likelihood == "categorical" and value not in ("probs", "std") else (3,)
        assert getattr(prediction, value).shape == (0, *expected)


def test_autocast_is_for_the_model_and_not_for_the_covariance():
    model = nn.Linear(3, 2)
    posterior = Vprop(model.parameters(), num_data=10).posterior(model, likelihood="gaussian")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # what the model then sees
    expected = posterior.predict(x, method="linearized").output_covariance
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = posterior.predict(x, method="linearized").output_covariance
    assert torch.equal(found, expected)


@pytest.mark.parametrize("where", ["weights", "frozen weights", "autocast"])
def test_a_model_that_is_partly_in_16_bits(where):
    """Alone and among others an example is rounded otherwise, as in a model that is all in 16 bits."""
    dtype = torch.float32 if where == "autocast" else torch.bfloat16

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 64).to(dtype), nn.Linear(64, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x.to(dtype))).float()).float()

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Mixed(), torch.randn(64, 16)
    model.first.requires_grad_(where != "frozen weights")
    learned = [p for p in model.parameters() if p.requires_grad]
    posterior = Vprop(learned, num_data=10).posterior(model, likelihood="categorical")
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        assert posterior.predict(x, method="linearized").output_mean.shape == (64, 3)

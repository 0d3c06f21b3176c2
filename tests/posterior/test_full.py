"""The Gaussian with a full covariance against torch.distributions, closed forms, and itself through a file."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

import vprop
from tests.harness import make_batch, make_model, train
from vprop import VON, VONG, Objective

ROWS, COLUMNS, NOISE_VARIANCE = 30, 4, 0.25


def flat(values):
    return torch.cat([value.detach().flatten().double() for value in values])


def random_spd(size, seed=0):
    factor = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T / size + torch.eye(size, dtype=torch.float64)


def prior_of(kind, model, seed=5):
    """A prior as arguments of the optimizer, and the (mean, precision matrix) that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in model.parameters())
    if kind == "number":
        return {"prior_precision": 2.5}, torch.zeros(size).double(), 2.5 * torch.eye(size).double()
    means = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    if kind == "matrix":
        matrix = random_spd(size)
        return {"prior_mean": means, "prior_precision": matrix}, flat(means), matrix
    precisions = [torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.5 for p in model.parameters()]
    return {"prior_mean": means, "prior_precision": precisions}, flat(means), torch.diag(flat(precisions))


PRIORS = ["number", "per weight", "matrix"]


def train_with(kind="number", dtype=torch.float64, **arguments):
    model = make_model(dtype)
    prior, mean, precision = prior_of(kind, model)
    model, optimizer = train(VONG, model=model, num_data=200, betas=(0.0, 0.7), lr=0.1, **prior, **arguments)
    return model, optimizer, D.MultivariateNormal(mean, precision_matrix=precision)


def distribution_of(posterior):
    """The same Gaussian as torch has it, from mean and covariance."""
    return D.MultivariateNormal(flat(posterior.mean.values()), covariance_matrix=posterior.covariance)


@pytest.mark.parametrize("kind", PRIORS)
def test_mean_covariance_and_variance_are_those_of_the_optimizer(kind):
    model, optimizer, prior = train_with(kind)
    posterior = optimizer.posterior(model)
    hess = optimizer.state[model[0].weight]["hess"]
    assert (hess - torch.diag(hess.diagonal())).abs().max() > 0.1  # there are correlations to get wrong
    expected = torch.linalg.inv(200 * hess + prior.precision_matrix)
    torch.testing.assert_close(posterior.covariance, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(posterior.precision @ posterior.covariance, torch.eye(67).double())
    for name, p in model.named_parameters():
        assert torch.equal(posterior.mean[name], p)
        assert posterior.variance[name].shape == p.shape
    torch.testing.assert_close(flat(posterior.variance.values()), posterior.covariance.diagonal())
    assert posterior.num_parameters == 67


@pytest.mark.parametrize("kind", PRIORS)
def test_log_prob_entropy_and_kl_are_those_of_torch(kind):
    model, optimizer, prior = train_with(kind)
    posterior = optimizer.posterior(model)
    q, weights = distribution_of(posterior), posterior.sample(seed=1)
    torch.testing.assert_close(posterior.log_prob(weights), q.log_prob(flat(weights.values())), rtol=1e-10, atol=0)
    torch.testing.assert_close(posterior.entropy(), q.entropy(), rtol=1e-10, atol=0)
    torch.testing.assert_close(posterior.kl(), D.kl_divergence(q, prior), rtol=1e-10, atol=0)
    for value in (posterior.log_prob(weights), posterior.entropy(), posterior.kl()):
        assert value.dtype == torch.float64
        assert value.dim() == 0


def test_log_prob_takes_the_weights_by_name():
    """In any order; and one that is missing is named."""
    model, optimizer, _ = train_with()
    posterior = optimizer.posterior(model)
    weights = posterior.sample(seed=2)
    turned_round = dict(reversed(weights.items()))
    assert posterior.log_prob(turned_round) == posterior.log_prob(weights)
    with pytest.raises(ValueError, match=r"weights lack \['0\.bias', '2\.bias', '2\.weight'\]"):
        posterior.log_prob({"0.weight": posterior.mean["0.weight"]})


def test_a_flat_prior_has_no_kl():
    model = make_model()
    with pytest.raises(ValueError, match=r"flat prior is infinite.*prior_precision > 0"):
        VON(model.parameters(), num_data=10, prior_precision=0.0).posterior(model).kl()


def test_samples_have_the_posteriors_mean_and_covariance():
    """2000 draws of 5 weights. The largest of 5 + 15 z-scores stays below 5: a false alarm in 90,000 runs."""
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, -0.3)
    matrix = 4 * torch.ones(5, 5).double() + torch.diag(torch.tensor([0.1, 0.5, 2.0, 8.0, 30.0])).double()
    optimizer = VON(model.parameters(), num_data=1, prior_precision=matrix)
    posterior = optimizer.posterior(model)
    count, covariance = 2000, torch.linalg.inv(matrix + torch.eye(5).double())
    draws = torch.stack([flat(posterior.sample(seed=seed).values()) for seed in range(count)])
    mean_error = draws.mean(0) - flat(model.parameters())
    assert (mean_error.abs() / (covariance.diagonal() / count).sqrt()).max() < 5
    spread = torch.outer(covariance.diagonal(), covariance.diagonal()) + covariance.square()
    assert ((draws.T.cov() - covariance).abs() / (spread / count).sqrt()).max() < 5


def test_seeds_of_samples():
    model, optimizer, _ = train_with()
    posterior = optimizer.posterior(model)
    assert torch.equal(posterior.sample(seed=4)["0.weight"], posterior.sample(seed=4)["0.weight"])
    assert torch.equal(optimizer.posterior(model).sample(seed=4)["2.bias"], posterior.sample(seed=4)["2.bias"])
    draws = [posterior.sample(seed=4), posterior.sample(seed=5), posterior.sample(), posterior.sample()]
    draws.append(optimizer.posterior(model).sample())
    assert len({float(weights["0.bias"][0]) for weights in draws}) == len(draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_fit_functional_call(dtype):
    model, optimizer = train(VONG, model=make_model(dtype), num_data=200)
    posterior = optimizer.posterior(model, likelihood="categorical")
    weights = posterior.sample(seed=0)
    assert all(value.dtype == torch.float32 for value in posterior.mean.values())
    assert posterior.precision.dtype == torch.float64
    assert all(weights[name].dtype == dtype for name, _ in model.named_parameters())
    x, _ = make_batch(dtype=dtype)
    with torch.no_grad():
        output = torch.func.functional_call(model, weights, x)
    assert torch.equal(posterior.predict(x, num_samples=1, seed=0).samples[0], output)


def test_it_is_a_snapshot():
    """Also where the covariance is asked for only after training has gone on, and where what it gives is edited."""
    model, optimizer, _ = train_with("matrix")
    posterior, twin = optimizer.posterior(model), optimizer.posterior(model)
    expected = [t.clone() for t in (*twin.mean.values(), twin.precision, twin.covariance, twin.kl())]
    train(VONG, model=model, optimizer=optimizer, steps=2)
    optimizer.param_groups[0]["prior_precision"].mul_(3)
    prior = posterior.as_prior()
    prior["prior_precision"].zero_()
    prior["prior_mean"][0].zero_()
    after = [*posterior.mean.values(), posterior.precision, posterior.covariance, posterior.kl()]
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


def test_as_prior_is_the_next_optimizers_prior():
    model, optimizer, _ = train_with()
    posterior = optimizer.posterior(model)
    following = VON(model.parameters(), num_data=10, **posterior.as_prior())
    prior = following.posterior(model).prior
    torch.testing.assert_close(prior.precision_matrix, posterior.precision, rtol=1e-14, atol=0)
    torch.testing.assert_close(flat(prior.precision.values()), posterior.precision.diagonal(), rtol=1e-14, atol=0)
    assert all(torch.equal(prior.mean[name], posterior.mean[name]) for name in posterior.mean)
    # With H = 0 the posterior is the prior: no divergence.
    nothing = VON(model.parameters(), num_data=10, hess_init=0.0, **posterior.as_prior()).posterior(model)
    torch.testing.assert_close(nothing.covariance, posterior.covariance, rtol=1e-10, atol=1e-16)
    assert abs(float(nothing.kl())) < 1e-9


@pytest.mark.parametrize("kind", PRIORS)
def test_the_nearest_diagonal(kind):
    """1/σ² is the diagonal of the precision, of posterior and prior: no other diagonal has a smaller divergence."""
    model, optimizer, _ = train_with(kind)
    posterior = optimizer.posterior(model)
    diagonal = posterior.as_diagonal()
    variance = flat(diagonal.variance.values())
    torch.testing.assert_close(variance, 1 / posterior.precision.diagonal(), rtol=1e-14, atol=0)
    target = distribution_of(posterior)

    def divergence(variance):
        return D.kl_divergence(D.MultivariateNormal(target.mean, variance.diag()), target)

    nudge = 1.01 ** torch.randn(len(variance), generator=torch.Generator().manual_seed(0), dtype=variance.dtype)
    assert divergence(variance) < min(divergence(variance * nudge), divergence(variance / nudge))
    prior_variance = 1 / flat([posterior.prior.precision[n].expand_as(m) for n, m in posterior.mean.items()])
    prior_mean = flat([posterior.prior.mean[n].expand_as(m) for n, m in posterior.mean.items()])
    prior = D.MultivariateNormal(prior_mean, prior_variance.diag())
    expected = D.kl_divergence(D.MultivariateNormal(target.mean, variance.diag()), prior)
    torch.testing.assert_close(diagonal.kl(), expected, rtol=1e-9, atol=0)
    vprop.Vprop(model.parameters(), num_data=10, **diagonal.as_prior())


def test_parameters_in_the_order_of_the_model():
    """An optimizer may hold them in another order: rows and columns go with the names of the model."""
    model = make_model(torch.float64)
    matrix = random_spd(67)
    turned = list(reversed(list(model.parameters())))
    posterior = VON(turned, num_data=1, prior_precision=matrix, hess_init=0.0).posterior(model)
    assert list(posterior.mean) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    starts = {"2.bias": 0, "2.weight": 3, "0.bias": 27, "0.weight": 35}
    rows = torch.cat([torch.arange(starts[n], starts[n] + m.numel()) for n, m in posterior.mean.items()])
    torch.testing.assert_close(posterior.precision, matrix[rows[:, None], rows])
    torch.testing.assert_close(posterior.prior.precision_matrix, matrix[rows[:, None], rows])


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PRIORS)
def test_round_trip(tmp_path, kind):
    model, optimizer, _ = train_with(kind, temperature=0.5)
    posterior = optimizer.posterior(model, likelihood="categorical")
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", make_model(torch.float64, seed=9))
    assert torch.equal(loaded.precision, posterior.precision)
    assert all(torch.equal(loaded.mean[name], posterior.mean[name]) for name in posterior.mean)
    assert list(loaded.mean) == list(posterior.mean)
    x, _ = make_batch(dtype=torch.float64)
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    assert torch.equal(loaded.sample()["0.bias"], posterior.sample()["0.bias"])
    assert loaded.kl() == posterior.kl()
    assert loaded.ess == posterior.ess == 400.0


class Pair(nn.Module):
    """Two parameters, registered in one of two orders."""

    def __init__(self, first, second):
        super().__init__()
        for name in (first, second):
            self.register_parameter(name, nn.Parameter(torch.zeros({"w": 3, "v": 2}[name], dtype=torch.float64)))

    def forward(self, x):
        return x @ torch.cat([self.w, self.v])


def test_a_model_whose_parameters_are_in_another_order(tmp_path):
    model, turned = Pair("w", "v"), Pair("v", "w")
    means = [torch.arange(3.0).double(), torch.ones(2).double()]
    optimizer = VON(model.parameters(), num_data=1, prior_precision=random_spd(5), prior_mean=means, hess_init=0.3)
    posterior = optimizer.posterior(model)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", turned)
    assert list(loaded.mean) == ["v", "w"]
    rows = torch.tensor([3, 4, 0, 1, 2])
    assert torch.equal(loaded.precision, posterior.precision[rows[:, None], rows])
    weights = posterior.sample(seed=3)
    torch.testing.assert_close(loaded.log_prob(weights), posterior.log_prob(weights), rtol=1e-12, atol=0)
    torch.testing.assert_close(loaded.kl(), posterior.kl(), rtol=1e-12, atol=0)
    for name in ("w", "v"):
        torch.testing.assert_close(loaded.variance[name], posterior.variance[name])
    # What it says to the next optimizer fits the order of the next model.
    following = VON(turned.parameters(), num_data=1, hess_init=0.0, **loaded.as_prior()).posterior(turned)
    torch.testing.assert_close(following.variance["w"], posterior.variance["w"])


def test_an_unknown_structure_is_an_error(tmp_path):
    import safetensors
    import safetensors.torch

    path, model = tmp_path / "posterior.safetensors", nn.Linear(2, 1)
    VON(model.parameters(), num_data=5).posterior(model).save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["checksum"]
    metadata["settings"] = json.dumps(json.loads(metadata["settings"]) | {"structure": "banded"})
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata=metadata)
    with pytest.raises(ValueError, match=r"unknown structure 'banded': this version reads 'composed', .*'full'"):
        vprop.load_posterior(path, model)


# -- linear regression, where everything is known ----------------------------------------------------------------


def negative_log_likelihood(output, y):
    return 0.5 * ((y - output) ** 2 / NOISE_VARIANCE + math.log(2 * math.pi * NOISE_VARIANCE)).mean()


def make_problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    noise = math.sqrt(NOISE_VARIANCE) * torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(COLUMNS, 1, generator=generator, dtype=torch.float64) + noise


def test_bayes_rule_holds_at_every_draw():
    """log p(y|θ) + log p(θ) − log q(θ) is the log evidence for the exact posterior, whatever θ: no Monte Carlo."""
    x, y = make_problem()
    model = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    prior = random_spd(COLUMNS)
    optimizer = VON(model.parameters(), 1.0, num_data=ROWS, prior_precision=prior, mc_samples=0, betas=(0.0, 0.0))
    optimizer.step(Objective(model, negative_log_likelihood, x, y))
    posterior = optimizer.posterior(model)
    marginal = NOISE_VARIANCE * torch.eye(ROWS).double() + x @ torch.linalg.inv(prior) @ x.T
    evidence = D.MultivariateNormal(torch.zeros(ROWS).double(), marginal).log_prob(y[:, 0])
    prior = D.MultivariateNormal(torch.zeros(COLUMNS).double(), precision_matrix=prior)
    for seed in range(5):
        weights = posterior.sample(seed)
        likelihood = -ROWS * negative_log_likelihood(x @ weights["weight"].T, y)
        joint = likelihood + prior.log_prob(weights["weight"][0])
        torch.testing.assert_close(joint - posterior.log_prob(weights), evidence, rtol=1e-10, atol=0)
    estimate = posterior.elbo_estimate(Objective(model, negative_log_likelihood, x, y), num_samples=200)
    assert abs(estimate.value - float(evidence)) < 4 * estimate.standard_error


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_elbo_is_the_closed_form(temperature):
    """Away from the optimum, within 4 standard errors of 800 samples (6e-5 false alarms a case)."""
    x, y = make_problem()
    model = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.3)
    optimizer = VON(model.parameters(), num_data=50, temperature=temperature, prior_precision=random_spd(COLUMNS))
    posterior = optimizer.posterior(model)
    estimate = posterior.elbo_estimate(Objective(model, negative_log_likelihood, x, y), num_samples=800)
    spread = (x @ posterior.covariance @ x.T).diagonal().mean()  # E_q[(y − xᵀw)²] = (y − xᵀμ)² + xᵀΣx
    with torch.no_grad():
        expected = -50 / temperature * (negative_log_likelihood(model(x), y) + 0.5 * spread / NOISE_VARIANCE)
    prior = D.MultivariateNormal(torch.zeros(COLUMNS).double(), precision_matrix=random_spd(COLUMNS))
    kl = D.kl_divergence(distribution_of(posterior), prior)
    assert estimate.kl == pytest.approx(float(kl), rel=1e-10)
    assert estimate.standard_error < 0.02 * abs(float(expected))
    assert abs(estimate.value - float(expected - kl)) < 4 * estimate.standard_error


def test_a_model_without_the_optimizers_parameters_is_an_error():
    optimizer = VON(make_model().parameters(), num_data=10)
    with pytest.raises(ValueError, match=r"posterior\(model\): 4 of the optimizer's parameters are not"):
        optimizer.posterior(make_model())
    frozen = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="none of the optimizer's parameters requires a gradient"):
        VON(frozen.parameters(), num_data=10).posterior(frozen)


def test_a_posterior_that_is_not_finite_is_an_error():
    model = make_model()
    optimizer = VON(model.parameters(), num_data=10)
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    with torch.no_grad():
        model[2].bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"The posterior of '2\.bias' is not finite.*earlier checkpoint"):
        optimizer.posterior(model)

"""The posterior in an eigenbasis against the multivariate normal that it is."""

import math

import pytest
import torch
from torch import nn

import vprop
from tests.random_matrices import DOUBLE, orthogonal, random
from vprop.posterior import EigenbasisPosterior, GaussianPrior


def make(dtype=DOUBLE):
    """A weight with both bases, a bias with none."""
    model = nn.Linear(4, 3).to(dtype)
    mean = {"weight": random(3, 4, seed=1).to(dtype), "bias": random(3, seed=2).to(dtype)}
    rotated = {"weight": random(3, 4, seed=3).to(dtype).square() + 0.1, "bias": torch.full((3,), 0.3, dtype=dtype)}
    left, right = {"weight": orthogonal(3, 4).to(dtype)}, {"weight": orthogonal(4, 5).to(dtype)}
    prior = GaussianPrior(
        {"weight": torch.tensor(0.5, dtype=dtype), "bias": torch.tensor(0.0, dtype=dtype)},
        {"weight": torch.tensor(2.0, dtype=dtype), "bias": torch.tensor(1.0, dtype=dtype)},
    )
    return EigenbasisPosterior(model, mean, rotated, left, right, prior, ess=20.0)


def normals(posterior):
    found = {}
    for name, mean in posterior.mean.items():
        covariance = posterior.covariance_of(name)
        found[name] = torch.distributions.MultivariateNormal(mean.flatten().double(), covariance)
    return found


def test_its_covariance_is_that_of_the_rotation():
    posterior = make()
    directions = torch.kron(posterior.left_basis["weight"], posterior.right_basis["weight"])
    expected = directions @ posterior.rotated_variance["weight"].flatten().diag() @ directions.mT
    torch.testing.assert_close(posterior.covariance_of("weight"), expected)
    torch.testing.assert_close(posterior.variance["weight"].flatten(), expected.diagonal())
    torch.testing.assert_close(posterior.variance["bias"], torch.full((3,), 0.3, dtype=DOUBLE))
    with pytest.raises(ValueError, match=r"covariance_of\(name\): there is no parameter 'wait', must be one of"):
        posterior.covariance_of("wait")


def test_density_entropy_and_divergence():
    posterior = make()
    weights = posterior.sample(seed=3)
    expected = {"log_prob": 0.0, "entropy": 0.0, "kl": 0.0}
    for name, normal in normals(posterior).items():
        size = posterior.mean[name].numel()
        prior_mean = posterior.prior.mean[name].expand(size)
        prior_covariance = torch.eye(size, dtype=DOUBLE) / posterior.prior.precision[name]
        prior = torch.distributions.MultivariateNormal(prior_mean, prior_covariance)
        expected["log_prob"] += normal.log_prob(weights[name].flatten())
        expected["entropy"] += normal.entropy()
        expected["kl"] += torch.distributions.kl_divergence(normal, prior)
    torch.testing.assert_close(posterior.log_prob(weights), expected["log_prob"])
    torch.testing.assert_close(posterior.entropy(), expected["entropy"])
    torch.testing.assert_close(posterior.kl(), expected["kl"])


def test_samples_have_its_covariance():
    """4,000 draws: the standard error of a covariance is √((cᵢⱼ²+cᵢᵢcⱼⱼ)/n); 5 of them, over 78 pairs: 10⁻⁴ in all."""
    posterior, count = make(), 4000
    drawn = torch.stack([posterior.sample(seed)["weight"].flatten() for seed in range(count)])
    covariance = posterior.covariance_of("weight")
    variances = covariance.diagonal()
    error = ((covariance.square() + variances[:, None] * variances) / count).sqrt()
    assert bool(((torch.cov(drawn.T) - covariance).abs() < 5 * error).all())
    mean_error = (variances / count).sqrt()
    assert bool(((drawn.mean(0) - posterior.mean["weight"].flatten()).abs() < 5 * mean_error).all())


def test_a_flat_prior_has_no_divergence():
    posterior = make()
    posterior.prior.precision["bias"].zero_()
    with pytest.raises(ValueError, match="The KL divergence to a flat prior is infinite: 'bias' has prior_precision 0"):
        posterior.kl()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_files(tmp_path, dtype):
    posterior = make(dtype)
    posterior.save(tmp_path / "q.safetensors")
    loaded = vprop.load_posterior(tmp_path / "q.safetensors", posterior.model)
    assert type(loaded) is EigenbasisPosterior
    x = random(5, 4, seed=8).to(dtype)
    assert torch.equal(loaded.predict(x, 4).samples, posterior.predict(x, 4).samples)
    assert torch.equal(loaded.kl(), posterior.kl())
    assert loaded.ess == 20.0


def test_a_file_with_other_bases_is_refused(tmp_path):
    posterior = make()
    posterior.left_basis["weight"] = torch.eye(2, dtype=DOUBLE)
    posterior.save(tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=r"left_basis of 'weight' has shape \(2, 2\), must be \(3, 3\)"):
        vprop.load_posterior(tmp_path / "q.safetensors", posterior.model)


def test_the_nearest_diagonal():
    """Its precision is the diagonal of the precision, which no neighbour is nearer with."""
    posterior = make()
    diagonal = posterior.as_diagonal()
    precision = torch.linalg.inv(posterior.covariance_of("weight"))
    torch.testing.assert_close(1 / diagonal.variance["weight"].flatten(), precision.diagonal())
    target = normals(posterior)["weight"]

    def divergence(variance):
        return torch.distributions.kl_divergence(
            torch.distributions.MultivariateNormal(target.mean, variance.flatten().diag()), target
        )

    best = divergence(diagonal.variance["weight"])
    for seed in range(10):
        assert divergence(diagonal.variance["weight"] * torch.exp(0.1 * random(3, 4, seed=seed))) > best
    assert diagonal.ess == posterior.ess
    prior = diagonal.as_prior()
    vprop.Vprop(posterior.model.parameters(), num_data=10, **prior)


def test_what_it_cannot_do():
    posterior = make()
    with pytest.raises(TypeError, match=r"as_prior\(\): an EigenbasisPosterior has correlations.*as_diagonal\(\)"):
        posterior.as_prior()
    with pytest.raises(TypeError, match=r"a EigenbasisPosterior cannot be merged, .* Merge \[p.as_diagonal\(\)"):
        vprop.merge([posterior, posterior])


def test_the_elbo_of_a_linear_model_is_exact():
    """E over q of a quadratic loss is known: the loss at the mean and half the trace of HΣ."""
    model = nn.Linear(4, 1, bias=False).to(DOUBLE)
    x, y = random(30, 4, seed=1), random(30, 1, seed=2)
    basis = orthogonal(4, 3)
    mean, rotated = {"weight": random(1, 4, seed=4)}, {"weight": random(1, 4, seed=5).square() + 0.1}
    prior = GaussianPrior({"weight": torch.tensor(0.0, dtype=DOUBLE)}, {"weight": torch.tensor(1.0, dtype=DOUBLE)})
    posterior = EigenbasisPosterior(model, mean, rotated, {}, {"weight": basis}, prior, ess=30.0)
    estimate = posterior.elbo_estimate(vprop.Objective(model, nn.functional.mse_loss, x, y), 2000)
    at_mean = (x @ mean["weight"].T - y).square().mean()
    trace = ((x @ posterior.covariance_of("weight")) * x).sum(-1).mean()
    exact = -30.0 * float(at_mean + trace) - float(posterior.kl())
    assert abs(estimate.value - exact) < 5 * estimate.standard_error
    assert math.isfinite(estimate.value)

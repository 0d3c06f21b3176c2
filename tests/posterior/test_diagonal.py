"""The diagonal Gaussian against torch.distributions and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from tests.harness import make_batch, make_model, train
from vprop import VON, Objective, Vprop


@pytest.fixture
def trained():
    return train(Vprop, num_data=200, prior_precision=2.5, steps=5)


def test_mean_and_variance(trained):
    model, optimizer = trained
    posterior = optimizer.posterior(model)
    assert list(posterior.mean) == list(posterior.variance) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(posterior.mean[name], p)
        hess = optimizer.state[p]["hess"]
        torch.testing.assert_close(posterior.variance[name], 1 / (200 * hess + 2.5))
    assert posterior.num_parameters == sum(p.numel() for p in model.parameters())


def test_it_is_a_snapshot(trained):
    model, optimizer = trained
    posterior = optimizer.posterior(model)
    mean = {name: value.clone() for name, value in posterior.mean.items()}
    train(Vprop, model=model, optimizer=optimizer, steps=2)
    assert all(torch.equal(posterior.mean[name], mean[name]) for name in mean)


def test_log_prob_entropy_and_kl_are_those_of_torch(trained):
    model, optimizer = trained
    posterior = optimizer.posterior(model)
    weights = posterior.sample(seed=1)
    log_prob = entropy = kl = 0.0
    for name in posterior.mean:
        q = D.Normal(posterior.mean[name].double(), posterior.variance[name].double().sqrt())
        p = D.Normal(torch.zeros((), dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64).rsqrt())
        log_prob += q.log_prob(weights[name].double()).sum()
        entropy += q.entropy().sum()
        kl += D.kl_divergence(q, p).sum()
    torch.testing.assert_close(posterior.log_prob(weights), log_prob, rtol=1e-5, atol=0)
    torch.testing.assert_close(posterior.entropy(), entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(posterior.kl(), kl, rtol=1e-5, atol=0)


def test_kl_with_a_prior_per_weight():
    model = make_model(torch.float64)
    means = [torch.randn_like(p) for p in model.parameters()]
    precisions = [p.detach().abs() + 0.5 for p in model.parameters()]
    optimizer = Vprop(model.parameters(), num_data=50, prior_mean=means, prior_precision=precisions)
    posterior = optimizer.posterior(model)
    expected = sum(
        D.kl_divergence(D.Normal(p, (50 * 1.0 + precision).rsqrt()), D.Normal(mean, precision.rsqrt())).sum()
        for p, mean, precision in zip(model.parameters(), means, precisions, strict=True)
    )
    torch.testing.assert_close(posterior.kl(), expected.detach())


def test_samples_have_the_posteriors_moments():
    """2000 draws; the largest of 59 z-scores of means and of variances stays below 5 (about 3e-5 false alarms)."""
    model, optimizer = train(Vprop, num_data=50)
    posterior = optimizer.posterior(model)
    draws = [torch.cat([w.flatten() for w in posterior.sample(seed=seed).values()]) for seed in range(2000)]
    draws = torch.stack(draws).double()
    mean = torch.cat([value.flatten() for value in posterior.mean.values()]).double()
    variance = torch.cat([value.flatten() for value in posterior.variance.values()]).double()
    assert ((draws.mean(0) - mean).abs() / (variance / 2000).sqrt()).max() < 5
    assert ((draws.var(0) / variance - 1).abs() / math.sqrt(2 / 2000)).max() < 5


def test_seeds_of_samples(trained):
    posterior = trained[1].posterior(trained[0])
    assert torch.equal(posterior.sample(seed=4)["0.weight"], posterior.sample(seed=4)["0.weight"])
    assert not torch.equal(posterior.sample(seed=4)["0.weight"], posterior.sample(seed=5)["0.weight"])
    unseeded = [posterior.sample(), posterior.sample(), trained[1].posterior(trained[0]).sample()]
    seeded = [posterior.sample(seed=0), trained[1].posterior(trained[0]).sample(seed=0)]
    assert len({float(weights["0.bias"][0]) for weights in unseeded + seeded}) == 4


def test_samples_have_the_models_dtypes():
    model, optimizer = train(Vprop, model=make_model(torch.bfloat16), num_data=50)
    posterior = optimizer.posterior(model)
    assert posterior.mean["0.weight"].dtype == torch.float32
    assert posterior.sample()["0.weight"].dtype == torch.bfloat16
    assert posterior.predict(make_batch(dtype=torch.bfloat16)[0], likelihood="categorical").probs.dtype == torch.float32


def test_as_prior_is_the_next_optimizers_prior(trained):
    model, optimizer = trained
    posterior = optimizer.posterior(model)
    following = Vprop(model.parameters(), num_data=10, **posterior.as_prior())
    prior = following.posterior(model).prior
    for name in posterior.mean:
        torch.testing.assert_close(prior.mean[name], posterior.mean[name])
        torch.testing.assert_close(1 / prior.precision[name], posterior.variance[name])


def test_as_prior_and_frozen_parameters():
    model = make_model()
    model[0].weight.requires_grad_(False)
    prior = Vprop(model.parameters(), num_data=10).posterior(model).as_prior()
    with pytest.raises(ValueError, match=r"has 3 tensors, must have one for each of the group's 4.*require a gradient"):
        Vprop(model.parameters(), num_data=10, **prior)
    Vprop([p for p in model.parameters() if p.requires_grad], num_data=10, **prior)


def test_nothing_to_have_a_posterior_is_an_error():
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"none of the optimizer's parameters requires a gradient"):
        Vprop(model.parameters(), num_data=10).posterior(model)


def test_a_flat_prior_has_no_kl():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=10, prior_precision=0.0)
    with pytest.raises(ValueError, match=r"flat prior is infinite: '0\.weight' has prior_precision 0"):
        optimizer.posterior(model).kl()


def test_a_model_without_the_optimizers_parameters_is_an_error(trained):
    with pytest.raises(ValueError, match=r"posterior\(model\): 4 of the optimizer's parameters are not"):
        trained[1].posterior(make_model())


def test_log_prob_of_incomplete_weights_is_an_error(trained):
    posterior = trained[1].posterior(trained[0])
    with pytest.raises(ValueError, match=r"weights lack \['0\.bias', '2\.bias', '2\.weight'\]"):
        posterior.log_prob({"0.weight": posterior.mean["0.weight"]})


def test_parameters_of_the_model_that_the_optimizer_does_not_hold_are_constants():
    model = make_model()
    optimizer = Vprop(model[2].parameters(), num_data=50)
    optimizer.step(Objective(model, F.cross_entropy, *make_batch()))
    posterior = optimizer.posterior(model)
    assert list(posterior.mean) == ["2.weight", "2.bias"]
    assert posterior.predict(make_batch()[0], num_samples=3).samples.shape == (3, 12, 3)


def test_a_model_with_several_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, left, right):
            return self.linear(left - right)

    model, (x, _) = Pair(), make_batch()
    posterior = Vprop(model.parameters(), num_data=50).posterior(model)
    as_tuple, as_dict = posterior.predict((x, 2 * x)), posterior.predict({"left": x, "right": 2 * x})
    assert torch.equal(as_tuple.samples, as_dict.samples)


@pytest.mark.parametrize("make", [Vprop, VON])
def test_the_prior_of_float64_weights_keeps_its_digits(make):
    """0.7 as a float32 number is 1.7e-8 off, which a merge of shards would count again for each of them."""
    model = nn.Linear(2, 1).double()
    prior = make(model.parameters(), num_data=10, prior_precision=0.7).posterior(model).prior
    assert float(prior.precision["weight"].flatten()[0]) == 0.7

"""The losses in an objective: recognised, live, and with a Fisher and a Hessian that are the exact ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

from vprop import CVI, VOGN, VON, VONG, Objective, Vprop
from vprop.curvature import SampledFisher
from vprop.likelihood import (
    GaussianLikelihood,
    HeteroscedasticGaussianLikelihood,
    draw_labels,
    likelihood_of,
    snapshot_likelihood,
)
from vprop.noise import Draw, Stream

DRAW = Draw(3, 0, 0, stream=Stream.LABELS)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_network(outputs, hidden=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def gaussian(**arguments):
    return GaussianLikelihood(torch.tensor([0.3, 0.7]).double(), **arguments)


LOSSES = {
    "scalar": lambda: GaussianLikelihood(torch.tensor(0.3).double()),
    "vector": gaussian,
    "fixed": lambda: gaussian(learnable=False),
    "heteroscedastic": HeteroscedasticGaussianLikelihood,
}


def make_objective(name, **arguments):
    model = make_network(4 if name == "heteroscedastic" else 2)
    return Objective(model, LOSSES[name](), randn(6, 4), randn(6, 2, seed=1), **arguments)


def test_what_the_losses_stand_for():
    assert likelihood_of(GaussianLikelihood(0.25)) == ("gaussian", 0.25)
    kind, noise = likelihood_of(gaussian())
    assert kind == "gaussian"
    torch.testing.assert_close(noise, torch.tensor([0.3, 0.7]).double())
    assert not noise.requires_grad
    assert likelihood_of(HeteroscedasticGaussianLikelihood()) == ("heteroscedastic", 1.0)
    assert likelihood_of(F.mse_loss) == ("gaussian", 0.5)
    assert likelihood_of(lambda output, y: 0.0) is None


def test_the_noise_of_an_objective_is_live():
    likelihood = GaussianLikelihood(0.25)
    objectives = [
        Objective(nn.Linear(4, 1), likelihood, randn(6, 4), randn(6, 1)),
        Objective(nn.Linear(4, 1), lambda output, y: likelihood(output, y), None, None, likelihood=likelihood),
    ]
    for objective in objectives:
        assert (objective.likelihood, objective.noise_variance) == ("gaussian", 0.25)
    nn.init.constant_(likelihood.log_noise_variance, math.log(2.0))
    for objective in objectives:
        assert objective.noise_variance == pytest.approx(2.0)


def test_arguments_beside_the_loss():
    model, x, y = nn.Linear(4, 1), randn(6, 4), randn(6, 1)
    likelihood = GaussianLikelihood(0.25)
    for same in ("gaussian", likelihood):
        assert Objective(model, likelihood, x, y, likelihood=same).noise_variance == 0.25
    for other in ("categorical", GaussianLikelihood(0.5), HeteroscedasticGaussianLikelihood()):
        with pytest.raises(ValueError, match=r"Invalid likelihood=.* must be left out where the loss is a GaussianL"):
            Objective(model, likelihood, x, y, likelihood=other)
    for arguments in ({"noise_variance": 1.0}, {"noise_variance": 0.3, "likelihood": "gaussian"}):
        with pytest.raises(ValueError, match=r"Invalid noise_variance=.* must be left out with a GaussianLikelihood"):
            Objective(model, likelihood, x, y, **arguments)
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.3: must be left out with a Heteroscedastic"):
        Objective(model, F.mse_loss, x, y, likelihood=HeteroscedasticGaussianLikelihood(), noise_variance=0.3)
    with pytest.raises(ValueError, match=r"must be left out with likelihood='heteroscedastic'\. The noise is in the"):
        Objective(model, lambda output, y: 0.0, x, y, likelihood="heteroscedastic", noise_variance=0.3)
    for kind in ("categorical", "bernoulli"):
        with pytest.raises(
            ValueError, match=rf"Invalid noise_variance=0\.3: must be left out with likelihood='{kind}'"
        ):
            Objective(model, lambda output, y: 0.0, x, y, likelihood=kind, noise_variance=0.3)


def test_snapshots():
    likelihood = gaussian()
    kind, noise = snapshot_likelihood(likelihood)
    nn.init.zeros_(likelihood.log_noise_variance)
    torch.testing.assert_close(noise, torch.tensor([0.3, 0.7]).double())
    assert snapshot_likelihood(likelihood, 1.0)[0] == kind == "gaussian"  # what an optimizer passes on by default
    own = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not snapshot_likelihood("gaussian", own)[1].requires_grad
    assert snapshot_likelihood(None) == (None, 1.0)
    with pytest.raises(ValueError, match=r"Invalid noise_variance=0\.5: must be left out with a GaussianLikeli"):
        snapshot_likelihood(likelihood, 0.5)
    with pytest.raises(ValueError, match=r"Invalid likelihood=MSELoss\(\): must be one of .*'heteroscedastic'"):
        snapshot_likelihood(nn.MSELoss())


# -- the Fisher --------------------------------------------------------------------------------------------------


def exact_fisher(objective):
    """JᵀFJ, mean over examples: F is 1/v for a mean and ½ for a log-variance, and has no entry between the two."""
    weights = {name: p.detach() for name, p in objective.model.named_parameters()}
    output = functional_call(objective.model, weights, objective.x)
    blocks = jacrev(lambda weights: functional_call(objective.model, weights, objective.x))(weights)
    jacobian = torch.cat([block.reshape(output.numel(), -1) for block in blocks.values()], dim=1)
    if objective.likelihood == "heteroscedastic":
        f, s = output.chunk(2, -1)
        information = torch.cat([(-s).exp(), torch.full_like(f, 0.5)], -1)
    else:
        information = (1 / torch.as_tensor(objective.noise_variance)).expand_as(output)
    return jacobian.T @ (information.reshape(-1, 1) * jacobian) / len(output)


@pytest.mark.parametrize("name", LOSSES)
def test_the_sampled_fisher_is_unbiased(name):
    """The mean over 600 draws of labels: 5 standard errors for each of at most 961 elements of the matrix (496 of them
    different). About one false alarm in 3,500 runs; the seed is fixed."""
    objective = make_objective(name)
    parameters, estimator = dict(objective.model.named_parameters()), SampledFisher(torch.outer)
    values = torch.stack(
        [
            estimator.curvature_of(
                torch.cat([g.flatten() for g in estimator.observe(objective, parameters, DRAW._replace(step=k))])
            )
            for k in range(600)
        ]
    )
    error = (values.mean(0) - exact_fisher(objective)).abs()
    assert (error <= 5 * values.std(0) / math.sqrt(len(values)) + 1e-12).all()
    assert objective.loss_fn(objective.model(objective.x), objective.y).requires_grad
    assert all(p.grad is None for p in objective.loss_fn.parameters())


def test_the_factor_is_the_number_of_examples():
    """The loss is a mean over 6 examples of a sum over 2 dimensions, so M = 6; of a mean over both, M = 12."""
    for name in LOSSES:
        objective = make_objective(name)
        (scaled,) = SampledFisher().observe(objective, {"2.bias": objective.model[2].bias}, DRAW)
        labels = draw_labels(
            objective.model(objective.x).detach(), objective.y, objective.likelihood, objective.noise_variance, DRAW
        )
        plain = torch.autograd.grad(objective.loss_fn(objective.model(objective.x), labels), objective.model[2].bias)[0]
        torch.testing.assert_close(scaled, math.sqrt(6) * plain)
        halved = Objective(
            objective.model,
            lambda output, y, loss=objective.loss_fn: loss(output, y) / 2,
            objective.x,
            objective.y,
            likelihood=objective.loss_fn,
        )
        (scaled,) = SampledFisher().observe(halved, {"2.bias": objective.model[2].bias}, DRAW)
        torch.testing.assert_close(scaled, math.sqrt(12) * plain / 2)


def test_drawn_labels_have_the_noise_that_the_outputs_say():
    """20,000 labels a column; 5 standard errors of mean and variance (2e-6 false alarms)."""
    count = 20_000
    output = torch.tensor([1.0, -2.0, math.log(0.25), math.log(4.0)]).expand(count, 4)
    labels = draw_labels(output, torch.zeros(count, 2, dtype=torch.float64), "heteroscedastic", 1.0, DRAW)
    assert labels.dtype == torch.float64
    variance = torch.tensor([0.25, 4.0])
    assert ((labels.mean(0) - torch.tensor([1.0, -2.0])).abs() < 5 * (variance / count).sqrt()).all()
    assert ((labels.var(0) / variance - 1).abs() < 5 * math.sqrt(2 / count)).all()


# -- the optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("constructor", [CVI, VON, VOGN])
def test_the_fast_hessian_is_the_general_one(constructor, name):
    """A recognised loss is a mean over examples, so chains of linear layers take the fast way; a plain function with
    the same value takes the general one. (VOGN, which has only one way, is here to see that it accepts the losses.)"""
    states = []
    for known in (True, False):
        objective = make_objective(name)
        if not known:
            objective = Objective(
                objective.model, lambda f, y, loss=objective.loss_fn: loss(f, y), objective.x, objective.y
            )
        assert (objective.likelihood is None) is not known
        settings = {"num_data": 60, "mc_samples": 0, "betas": (0.0, 0.0), "lr": 0.1}
        constructor(objective.model.parameters(), **settings).step(objective)
        states.append(torch.cat([p.detach().flatten() for p in objective.model.parameters()]))
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: VON(params, num_data=60, mc_samples=3),
        lambda params: CVI(params, num_data=60, mc_samples=3),
        lambda params: VOGN(params, num_data=60, mc_samples=3),
        lambda params: Vprop(params, num_data=60, mc_samples=3, sampled_fisher=True),
        lambda params: VONG(params, num_data=60, mc_samples=3, sampled_fisher=True),
    ],
    ids=["VON", "CVI", "VOGN", "Vprop", "VONG"],
)
def test_the_gradient_of_the_noise_is_summed_over_the_samples(make):
    """… and nothing that looks at the objective adds to it."""
    outputs = []

    class Recording(Objective):
        def __call__(self):
            loss = super().__call__()
            outputs.append(self.model(self.x).detach())
            return loss

    likelihood, y = gaussian(), randn(6, 2, seed=1)
    objective = Recording(make_network(2), likelihood, randn(6, 4), y)
    make(objective.model.parameters()).step(objective)
    assert len(outputs) == 3
    expected = torch.autograd.grad(sum(likelihood(output, y) for output in outputs), likelihood.log_noise_variance)
    torch.testing.assert_close(likelihood.log_noise_variance.grad, expected[0])


def test_the_elbo_has_the_constants():
    """The loss is a true negative log-likelihood: the expected log-likelihood at a certain posterior is that of
    torch.distributions."""
    likelihood, (x, y) = GaussianLikelihood(torch.tensor(0.3).double()), (randn(6, 4), randn(6, 1, seed=1))
    model = nn.Linear(4, 1).double()
    posterior = Vprop(model.parameters(), num_data=6, hess_init=1e20).posterior(model, likelihood=likelihood)
    estimate = posterior.elbo_estimate(Objective(model, likelihood, x, y), num_samples=2)
    exact = torch.distributions.Normal(model(x), math.sqrt(0.3)).log_prob(y).sum()
    assert estimate.expected_log_likelihood == pytest.approx(exact.item(), rel=1e-6)

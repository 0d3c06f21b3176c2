"""What merged posteriors must have in common, what is averaged, and every error that says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vprop import VON, Vprop
from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from vprop.posterior import DiagonalPosterior, FullPosterior, GaussianPrior, merge


def make_model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def make_posterior(constructor=Vprop, model=None, num_data=10, likelihood=None, noise_variance=1.0, **arguments):
    model = make_model() if model is None else model
    optimizer = constructor(model.parameters(), num_data=num_data, **arguments)
    return optimizer.posterior(model, likelihood=likelihood, noise_variance=noise_variance)


def diagonal(precision, prior_precision=1.0, mean=0.0):
    """A posterior over two weights."""
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(prior_precision)})
    variance = 1 / torch.tensor([precision])
    return DiagonalPosterior(
        nn.Linear(2, 1, bias=False), {"weight": torch.full((1, 2), mean)}, {"weight": variance}, prior, ess=10.0
    )


def full(precision, prior_precision=1.0):
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(prior_precision)})
    mean, matrix = {"weight": torch.zeros(1, 2)}, torch.tensor(precision, dtype=torch.float64)
    return FullPosterior(nn.Linear(2, 1, bias=False), mean, matrix, prior, ess=10.0)


# -- what is added up or averaged --------------------------------------------------------------------------------


def test_ess_is_known_if_all_are():
    known, unknown = make_posterior(num_data=10), make_posterior(num_data=30)
    assert merge([known, unknown]).ess == 40.0
    unknown.ess = None
    assert merge([known, unknown]).ess is None


@pytest.mark.parametrize("known", [True, False])
def test_buffers(known):
    """Running statistics are averaged with weights ess (equally where one is not known), counts of batches add up."""
    posteriors = [make_posterior(num_data=10), make_posterior(num_data=30)]
    if not known:
        posteriors[1].ess = None
    for posterior, value in zip(posteriors, (1.0, 2.0), strict=True):
        posterior.buffers["1.running_mean"].fill_(value)
        posterior.buffers["1.num_batches_tracked"].fill_(int(10 * value))
    merged = merge(posteriors)
    assert merged.buffers["1.running_mean"].tolist() == [1.75 if known else 1.5] * 3
    assert merged.buffers["1.running_mean"].dtype == torch.float32
    assert merged.buffers["1.num_batches_tracked"].item() == 30
    merged.buffers["1.running_var"].zero_()
    assert posteriors[0].buffers["1.running_var"].tolist() == [1.0] * 3


def test_other_integers_must_be_the_same():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    for model, last in zip(models, (2, 3), strict=True):
        model.register_buffer("columns", torch.tensor([1, last]))
    same = [make_posterior(model=models[0]) for _ in range(2)]
    assert merge(same).buffers["columns"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"buffer 'columns' of dtype torch.int64 differs between them; integers are n"):
        merge([make_posterior(model=model) for model in models])
    del models[1].columns
    with pytest.raises(ValueError, match=r"the buffer 'columns' is not in all of them with shape \(2,\)\. Train all"):
        merge([make_posterior(model=model) for model in models])


# -- likelihoods -------------------------------------------------------------------------------------------------


def test_likelihoods():
    categorical, gaussian = make_posterior(likelihood="categorical"), make_posterior(likelihood="gaussian")
    assert merge([categorical, categorical]).likelihood == "categorical"
    with pytest.raises(ValueError, match=r"likelihoods differ \('categorical', 'gaussian'\), must agree\. Pass merge"):
        merge([categorical, gaussian])
    assert merge([categorical, gaussian], likelihood="bernoulli").likelihood == "bernoulli"
    heteroscedastic = make_posterior(likelihood=HeteroscedasticGaussianLikelihood())
    assert merge([heteroscedastic, heteroscedastic]).likelihood == "heteroscedastic"


def test_noises():
    """Shards that learned their noise have each another: the whole must be told its own."""
    noises = (0.25, 0.5)
    posteriors = [make_posterior(likelihood=GaussianLikelihood(noise)) for noise in noises]
    with pytest.raises(ValueError, match=r"noise variances differ \(0\.25, 0\.5\), must agree\. Pass merge\("):
        merge(posteriors)
    with pytest.raises(ValueError, match="noise variances differ"):
        merge(posteriors, likelihood="gaussian")
    assert merge(posteriors, noise_variance=0.3).noise_variance == 0.3
    merged = merge(posteriors, likelihood=GaussianLikelihood(2.0))
    assert (merged.likelihood, merged.noise_variance) == ("gaussian", 2.0)
    vectors = [make_posterior(likelihood=GaussianLikelihood(noise, shape=(2,))) for noise in (0.25, 0.25)]
    assert merge(vectors).noise_variance.tolist() == [0.25, 0.25]
    with pytest.raises(ValueError, match="noise variances differ"):
        merge([vectors[0], posteriors[0]])


# -- priors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constructor", [Vprop, VON])
def test_different_priors(constructor):
    first = make_posterior(constructor, prior_precision=1.0)
    other = make_posterior(constructor, prior_precision=1.1)
    message = r"posteriors 0 and 2 differ: '0\.weight' has another prior precision\. Train .* prior='product' .* Gauss"
    with pytest.raises(ValueError, match=message):
        merge([first, first, other])
    means = [torch.full_like(p, 0.1) for p in make_model().parameters()]
    with pytest.raises(ValueError, match=r"posteriors 0 and 1 differ: '0\.weight' has another prior mean"):
        merge([first, make_posterior(constructor, prior_mean=means)])


def test_the_same_prior_in_two_ways():
    """A number, and that number for each weight."""
    each = [torch.full_like(p, 2.0) for p in make_model().parameters()]
    merged = merge([make_posterior(prior_precision=2.0), make_posterior(prior_precision=each)])
    assert merged.prior.precision["0.weight"].shape == ()


def test_priors_that_differ_in_their_correlations_only():
    matrices = [torch.tensor([[2.0, rho], [rho, 2.0]]).double() for rho in (0.5, 0.6)]
    posteriors = []
    for matrix in [*matrices, None]:
        posterior = full([[4.0, 1.0], [1.0, 4.0]], 2.0)
        posterior.prior = posterior.prior._replace(precision_matrix=matrix)
        posteriors.append(posterior)
    for pair in (posteriors[:2], posteriors[1:], posteriors[:0:-1]):
        with pytest.raises(ValueError, match=r"differ: the matrices of the prior precision differ\. Train all shards"):
            merge(pair)
    assert merge([posteriors[0], posteriors[0]]).precision.tolist() == [[6.0, 1.5], [1.5, 6.0]]


def test_bad_priors():
    posterior = make_posterior()
    for prior in ("sum", 2.0):
        with pytest.raises(ValueError, match=r"Invalid prior=.*: must be None \(all shards have the same\), 'product'"):
            merge([posterior], prior=prior)
    mean, precision = posterior.prior.mean, posterior.prior.precision
    with pytest.raises(ValueError, match=r"its mean of '0\.weight' has shape None, must be \(\) or \(3, 2\)"):
        merge([posterior], prior=GaussianPrior({}, precision))
    wrong = precision | {"2.bias": torch.ones(4)}
    with pytest.raises(ValueError, match=r"its precision of '2\.bias' has shape \(4,\), must be \(\) or \(1,\)\. Give"):
        merge([posterior], prior=GaussianPrior(mean, wrong))
    with pytest.raises(ValueError, match=r"precision_matrix has shape \(2, 2\), must be \(19, 19\) for a full and No"):
        merge([posterior], prior=GaussianPrior(mean, precision, torch.eye(2)))
    with pytest.raises(ValueError, match=r"precision_matrix has shape \(2, 2\), must be \(19, 19\) for a full and No"):
        merge([make_posterior(VON)], prior=GaussianPrior(mean, precision, torch.eye(2)))


# -- precisions that are not positive ----------------------------------------------------------------------------


def test_a_diagonal_precision_that_is_not_positive():
    """1.2 and 0.4 beyond a prior of 3 each: 0.4 + 1.2 − 3 = −1.4 in one of two elements."""
    shards = [diagonal([1.2, 9.0], 3.0), diagonal([0.4, 9.0], 3.0), diagonal([3.5, 9.0], 3.0)]
    message = (
        r"The merged precision of 'weight' is not positive: 1 of 2 elements, the lowest -1\.4\. A shard is less "
        r"certain there than its prior \(number 0, 1, counted from 0\)\. Leave that shard out .* prior='product'"
    )
    with pytest.raises(ValueError, match=message):
        merge(shards[:2])
    assert (1 / merge(shards[:2], prior="product").variance["weight"]).tolist()[0] == pytest.approx([1.6, 18.0])
    # A shard that is less certain than its prior is welcome while the whole is not.
    assert 1 / merge([shards[0], shards[2]]).variance["weight"][0, 0] == pytest.approx(1.7)


def test_a_matrix_that_is_not_positive_definite():
    """All diagonals are positive: it is a direction between the two weights."""
    message = (
        r"not positive definite: its lowest eigenvalue is -1, in a direction that is mostly 'weight'\. A shard is less "
        r"certain there than its prior \(number 0, 1"
    )
    with pytest.raises(ValueError, match=message):
        merge([full([[3.0, 2.0], [2.0, 3.0]], 3.0), full([[3.0, 2.0], [2.0, 3.0]], 3.0)])


@pytest.mark.parametrize("make", [lambda: diagonal([2.0, 3.0], 2.0), lambda: full([[2.0, 0.0], [0.0, 3.0]], 2.0)])
def test_neither_data_nor_prior(make):
    flat = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(0.0)})
    with pytest.raises(ValueError, match=r"The shards' data say nothing there, and the prior of the whole does not"):
        merge([make(), make()], prior=flat)


# -- structures, parameters, models ------------------------------------------------------------------------------


def test_no_posteriors():
    with pytest.raises(ValueError, match=r"merge\(posteriors\): there are none, must be at least one\. Pass a list"):
        merge([])
    with pytest.raises(TypeError, match=r"merge\(posteriors\): is one posterior, must be a list of them"):
        merge(make_posterior())
    with pytest.raises(TypeError, match=r"number 1 is a Sequential, must be a DiagonalPosterior or FullPosterior\. "):
        merge([make_posterior(), make_model()])


def test_mixed_structures():
    with pytest.raises(ValueError, match=r"number 0 is a DiagonalPosterior, number 1 a FullPosterior; must be of one"):
        merge([make_posterior(), make_posterior(VON)])


def test_other_parameters():
    first = make_posterior()
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(3, 2\) in number 0 and \(3, 5\) in number 1 \(None"):
        merge([first, make_posterior(model=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))])
    with pytest.raises(ValueError, match=r"'2\.weight' has shape \(1, 3\) in number 0 and None in number 1"):
        merge([first, make_posterior(model=make_model()[:2])])
    with pytest.raises(ValueError, match=r"'2\.weight' has shape None in number 0 and \(1, 3\) in number 1"):
        merge([make_posterior(model=make_model()[:2]), first])


def test_frozen_parameters_must_be_the_same():
    posteriors = []
    for seed in (0, 0, 1):
        model = make_model(seed)
        model[0].requires_grad_(False)
        optimizer = Vprop([p for p in model.parameters() if p.requires_grad], num_data=10)
        posteriors.append(optimizer.posterior(model))
    assert "0.weight" not in merge(posteriors[:2]).mean
    with pytest.raises(ValueError, match=r"'0\.weight' has no posterior and is not the same in the models of numbers"):
        merge(posteriors)


# -- last layers -------------------------------------------------------------------------------------------------


def test_last_layers_are_merged_with_the_rest_of_their_snapshot():
    model = make_model()
    whole = make_posterior(model=model)
    shards = [whole.last_layer("2"), whole.last_layer("2")]
    x = torch.ones(3, 2)
    expected = merge(shards).predict(x, 4).samples
    with torch.no_grad():
        model[0].weight.zero_()  # training went on
    merged = merge(shards)
    assert merged.head == "2"
    assert set(merged.constants) == set(shards[0].constants) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    torch.testing.assert_close(merged.predict(x, 4).samples, expected)


def test_last_layers_on_bodies_that_differ():
    """Also of one model object: each snapshot has its own body."""
    model = make_model()
    first = make_posterior(model=model).last_layer("2")
    with torch.no_grad():
        model[0].weight.add_(1.0)
    later = make_posterior(model=model).last_layer("2")
    with pytest.raises(ValueError, match=r"'0\.weight' has no posterior and is not the same .* call last_layer\(\) of"):
        merge([first, later])

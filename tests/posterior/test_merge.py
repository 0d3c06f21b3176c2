"""Posteriors of shards, merged: on a conjugate model exactly the posterior of all data."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import vprop
from tests.reference import conjugate_regression_posterior
from vprop import CVI, VON, Objective, Vprop
from vprop.likelihood import GaussianLikelihood
from vprop.posterior import FullPosterior, GaussianPrior, merge

NOISE, PRIOR, COLUMNS = 0.25, 2.0, 4
SIZES = {"equal": (20, 20, 20), "unequal": (5, 37, 18), "one": (60,)}
LIKELIHOOD = GaussianLikelihood(torch.tensor(NOISE).double(), learnable=False)
EXACT = {"mc_samples": 0, "lr": 1.0, "betas": (0.0, 0.0)}  # one Newton step


def make_shards(sizes, orthogonal=False, seed=0):
    """(features, targets) of each shard; orthogonal: without correlations within each."""
    random = np.random.RandomState(seed)
    weights, shards = random.randn(COLUMNS), []
    for rows in sizes:
        features = random.randn(rows, COLUMNS)
        features[:, 1] += 0.9 * features[:, 0]
        if orthogonal:
            features = np.linalg.qr(features)[0] * math.sqrt(rows) * [1.0, 2.0, 0.5, 3.0]
        shards.append((features, features @ weights + math.sqrt(NOISE) * random.randn(rows)))
    return shards


def together(shards):
    return tuple(np.concatenate(parts) for parts in zip(*shards, strict=True))


def train(constructor, features, targets, **arguments):
    model = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    settings = {"num_data": len(targets), "prior_precision": PRIOR, **EXACT}
    optimizer = constructor(model.parameters(), **(settings | arguments))
    optimizer.step(Objective(model, LIKELIHOOD, torch.tensor(features), torch.tensor(targets)[:, None]))
    return optimizer.posterior(model, likelihood=LIKELIHOOD)


def assert_same(actual, expected, tolerance=1e-8):
    close = {"rtol": tolerance, "atol": tolerance}
    for name, mean in expected.mean.items():
        torch.testing.assert_close(actual.mean[name], mean, **close)
        torch.testing.assert_close(actual.variance[name], expected.variance[name], **close)
    if isinstance(expected, FullPosterior):
        torch.testing.assert_close(actual.covariance, expected.covariance, **close)
    torch.testing.assert_close(actual.kl(), expected.kl(), **close)


STRUCTURES = {"full": (VON, False), "diagonal": (CVI, True)}


@pytest.fixture(params=STRUCTURES)
def structure(request):
    return STRUCTURES[request.param]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_merged_shards_are_the_whole(structure, sizes):
    """… which is the closed form. Each shard was trained with num_data its own size, and the whole prior."""
    constructor, orthogonal = structure
    shards = make_shards(sizes, orthogonal)
    merged = merge([train(constructor, *shard) for shard in shards])
    whole = train(constructor, *together(shards))
    assert type(merged) is type(whole)
    assert (merged.ess, merged.likelihood, merged.noise_variance) == (60.0, "gaussian", whole.noise_variance)
    assert_same(merged, whole)
    mean, covariance = conjugate_regression_posterior(*together(shards), NOISE, PRIOR)
    np.testing.assert_allclose(merged.mean["weight"].numpy()[0], mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(merged.variance["weight"].numpy()[0], np.diag(covariance), rtol=1e-8)


def test_counting_the_prior_of_every_shard_would_show(structure):
    """The test above can fail: without correction the prior would count three times."""
    constructor, orthogonal = structure
    shards = make_shards(SIZES["unequal"], orthogonal)
    posteriors, whole = [train(constructor, *shard) for shard in shards], train(constructor, *together(shards))
    wrong = merge(posteriors, prior="product")
    assert (wrong.mean["weight"] - whole.mean["weight"]).abs().max() > 1e-3
    assert wrong.prior.precision["weight"].item() == pytest.approx(3 * PRIOR)


def test_the_order_of_the_shards_does_not_matter(structure):
    constructor, orthogonal = structure
    posteriors = [train(constructor, *shard) for shard in make_shards(SIZES["unequal"], orthogonal)]
    expected = merge(posteriors)
    for order in ([2, 0, 1], [1, 0, 2]):
        assert_same(merge(posteriors[i] for i in order), expected, tolerance=1e-13)


def test_shards_can_be_merged_by_and_by(structure):
    constructor, orthogonal = structure
    a, b, c = (train(constructor, *shard) for shard in make_shards(SIZES["unequal"], orthogonal))
    assert_same(merge([merge([a, b]), c]), merge([a, b, c]), tolerance=1e-13)


def test_one_shard_is_itself(structure):
    constructor, orthogonal = structure
    posterior = train(constructor, *make_shards([30], orthogonal)[0])
    assert_same(merge([posterior]), posterior, tolerance=1e-14)
    x = torch.ones(3, COLUMNS).double()
    torch.testing.assert_close(merge([posterior]).predict(x).samples, posterior.predict(x).samples)
    assert_same(merge([posterior], prior="product"), posterior, tolerance=1e-14)


@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.2, 0.3, 0.5)])
def test_shares_of_the_prior(structure, shares):
    """prior="product": the shares add up to λ, and their means, weighted with them, to m₀."""
    constructor, orthogonal = structure
    shards = make_shards(SIZES["unequal"], orthogonal)
    prior_means = [torch.full((1, COLUMNS), value).double() for value in (0.3, -0.1, 0.7)]
    posteriors = [
        train(constructor, *shard, prior_precision=PRIOR * share, prior_mean=[mean])
        for shard, share, mean in zip(shards, shares, prior_means, strict=True)
    ]
    mean = sum(share * mean for share, mean in zip(shares, prior_means, strict=True))
    whole = train(constructor, *together(shards), prior_mean=[mean])
    assert_same(merge(posteriors, prior="product"), whole)


def test_another_prior_for_the_whole(structure):
    """A prior that is given replaces those of the shards, whatever they were: even none in one of them."""
    constructor, orthogonal = structure
    shards = make_shards(SIZES["unequal"], orthogonal)
    posteriors = [
        train(constructor, *shard, prior_precision=precision)
        for shard, precision in zip(shards, (1.0, 0.0, 7.0), strict=True)
    ]
    mean = torch.full((1, COLUMNS), 0.4).double()
    whole = train(constructor, *together(shards), prior_precision=3.0, prior_mean=[mean])
    merged = merge(posteriors, prior=GaussianPrior({"weight": mean}, {"weight": torch.tensor(3.0)}))
    assert_same(merged, whole)
    assert_same(merge(posteriors, prior=whole.prior), whole)


def test_flat_priors():
    """λ = 0 in every shard: precisions add up, and no prior mean matters."""
    shards = make_shards((20, 30))
    posteriors = [train(VON, *shard, prior_precision=0.0) for shard in shards]
    whole = train(VON, *together(shards), prior_precision=0.0)
    for prior in (None, "product"):
        merged = merge(posteriors, prior=prior)
        torch.testing.assert_close(merged.precision, whole.precision, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.mean["weight"], whole.mean["weight"], rtol=1e-8, atol=1e-8)


def test_a_prior_with_correlations():
    """A posterior is the prior of two further shards, counted once; as_prior() divides by each shard's ess."""
    shards = make_shards((15, 5, 40))
    first = train(VON, *shards[0])
    posteriors = [train(VON, *shard, **first.as_prior()) for shard in shards[1:]]
    whole = train(VON, *together(shards))
    merged = merge(posteriors)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(merged.mean["weight"], whole.mean["weight"], rtol=1e-8, atol=1e-8)
    # One with a matrix for a prior and one without, each with its share.
    shares = [train(VON, *together(shards[1:]), **first.as_prior()), train(VON, *shards[0], prior_precision=1.0)]
    product = merge(shares, prior="product")
    expected = first.precision + torch.eye(COLUMNS).double()
    torch.testing.assert_close(product.prior.precision_matrix, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product.precision, shares[0].precision + shares[1].precision)
    torch.testing.assert_close(expected @ product.prior.mean["weight"][0], first.precision @ first.mean["weight"][0])
    assert_same(merge(posteriors, prior=posteriors[0].prior), merged, tolerance=1e-12)


def test_temperatures():
    """A shard at temperature τ counts as 1/τ of its data."""
    shards = make_shards((20, 30))
    posteriors = [train(VON, *shard, temperature=t) for shard, t in zip(shards, (0.5, 2.0), strict=True)]
    merged = merge(posteriors)
    assert merged.ess == 20 / 0.5 + 30 / 2.0
    hessians = [X.T @ X / NOISE for X, _ in shards]
    expected = hessians[0] / 0.5 + hessians[1] / 2.0 + PRIOR * np.eye(COLUMNS)
    np.testing.assert_allclose(merged.precision.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_several_parameters_in_another_order():
    """Matrices are over the parameters in the order of each model: here they differ."""
    names = ("a", "b")

    class Model(nn.Module):
        def __init__(self, order):
            super().__init__()
            for name in order:
                self.register_parameter(name, nn.Parameter(torch.full((2,), 0.5).double()))

        def forward(self, x):
            return x[:, :2] @ self.a[:, None] + x[:, 2:] @ self.b[:, None]

    def posterior_of(shard, order):
        model, (x, y) = Model(order), shard
        optimizer = VON(model.parameters(), num_data=len(y), prior_precision=PRIOR, **EXACT)
        optimizer.step(Objective(model, LIKELIHOOD, torch.tensor(x), torch.tensor(y)[:, None]))
        return optimizer.posterior(model)

    shards = make_shards((20, 30))
    merged = merge([posterior_of(shards[0], names), posterior_of(shards[1], names[::-1])])
    assert_same(merged, posterior_of(together(shards), names))


def test_what_comes_out_is_a_posterior_like_any_other(structure, tmp_path):
    """Saved and loaded, sampled, the prior of the next; and it belongs to the model of the first."""
    constructor, orthogonal = structure
    posteriors = [train(constructor, *shard) for shard in make_shards(SIZES["unequal"], orthogonal)]
    merged = merge(posteriors)
    assert merged.model is posteriors[0].model
    merged.save(tmp_path / "merged.safetensors")
    loaded = vprop.load_posterior(tmp_path / "merged.safetensors", nn.Linear(COLUMNS, 1, bias=False).double())
    assert_same(loaded, merged, tolerance=0.0)
    x = torch.ones(3, COLUMNS).double()
    assert torch.equal(loaded.predict(x).variance, merged.predict(x).variance)
    assert loaded.ess == merged.ess == 60.0
    extra = make_shards([10], orthogonal, seed=5)[0]
    assert train(constructor, *extra, **merged.as_prior()).mean["weight"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_the_posteriors(dtype):
    """Half-precision models have float32 posteriors; the differences are taken in float64."""
    model = nn.Linear(3, 2).to(dtype)
    posteriors = [
        Vprop(model.parameters(), num_data=n, prior_precision=1e4, hess_init=1e-6).posterior(model) for n in (10, 20)
    ]
    merged = merge(posteriors)
    assert merged.mean["weight"].dtype == merged.variance["weight"].dtype == torch.float32
    assert (merged.variance["weight"] > 0).all()
    assert merged.sample(seed=0)["weight"].dtype == dtype


def test_the_shards_are_not_changed(structure):
    constructor, orthogonal = structure
    posteriors = [train(constructor, *shard) for shard in make_shards((20, 30), orthogonal)]
    copies = [copy.deepcopy(posterior) for posterior in posteriors]
    merge(posteriors)
    for posterior, before in zip(posteriors, copies, strict=True):
        assert_same(posterior, before, tolerance=0.0)
        assert torch.equal(posterior.model.weight, before.model.weight)

"""A mixture of posteriors: densities and moments against torch's, stratified samples, files, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vprop
from vprop.posterior import DiagonalPosterior, FullPosterior, GaussianPrior, Mixture

MEANS = [[0.0, 1.0], [4.0, -2.0], [1.0, 0.0]]
STDS = [[1.0, 0.5], [0.3, 2.0], [1.0, 1.0]]
SHARES = [0.5, 0.3, 0.2]


def gaussian(mean, std, *, model=None, **rest):
    model = nn.Linear(2, 1, bias=False).double() if model is None else model
    values = [torch.tensor([value], dtype=torch.float64) for value in (mean, std)]
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    return DiagonalPosterior(
        model, {"weight": values[0]}, {"weight": values[1].square()}, prior, **{"ess": 5.0, **rest}
    )


def make(weights=None, **rest):
    return Mixture([gaussian(mean, std, **rest) for mean, std in zip(MEANS, STDS, strict=True)], weights)


def torch_mixture():
    components = torch.distributions.Independent(torch.distributions.Normal(torch.tensor(MEANS), torch.tensor(STDS)), 1)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.tensor(SHARES)), components)


# -- moments, densities, bounds -------------------------------------------------------------------------------------


def test_moments_and_density_are_those_of_the_mixture():
    mixture, reference = make(SHARES), torch_mixture()
    torch.testing.assert_close(mixture.mean["weight"][0].float(), reference.mean)
    torch.testing.assert_close(mixture.variance["weight"][0].float(), reference.variance)
    for point in ([0.0, 0.0], [3.0, -1.0], [50.0, 50.0]):
        value = mixture.log_prob({"weight": torch.tensor([point], dtype=torch.float64)})
        assert float(value) == pytest.approx(float(reference.log_prob(torch.tensor(point))), rel=1e-5)


def test_one_member_is_that_posterior():
    single = gaussian(MEANS[0], STDS[0])
    mixture = Mixture([single])
    x = torch.ones(3, 2, dtype=torch.float64)
    assert torch.equal(mixture.predict(x, 7, seed=3).samples, single.predict(x, 7, seed=3).samples)
    assert float(mixture.entropy()) == float(single.entropy())
    assert float(mixture.kl()) == float(single.kl())


def test_the_same_member_twice_changes_no_density():
    single = gaussian(MEANS[0], STDS[0])
    weights = {"weight": torch.tensor([[0.3, 0.4]], dtype=torch.float64)}
    assert float(Mixture([single, single]).log_prob(weights)) == pytest.approx(float(single.log_prob(weights)))


def test_entropy_and_kl_are_bounds():
    """Against 20,000 draws; 5 standard errors on either side, one false alarm in about 10⁶."""
    mixture, reference = make(SHARES), torch_mixture()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = reference.sample((20_000,))
    logs = reference.log_prob(draws)
    error = 5 * float(logs.std()) / math.sqrt(20_000)
    lower, upper = (float(bound) for bound in mixture.entropy_bounds())
    assert lower - error < -float(logs.mean()) < upper + error
    assert upper - lower == pytest.approx(-sum(w * math.log(w) for w in SHARES))
    prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), 1.0), 1)
    gaps = logs - prior.log_prob(draws)
    kl, error = float(gaps.mean()), 5 * float(gaps.std()) / math.sqrt(20_000)
    assert kl - error < float(mixture.kl()) < kl + (upper - lower) + error


def test_members_far_apart_reach_the_upper_bound():
    far = Mixture([gaussian([0.0, 0.0], [1.0, 1.0]), gaussian([1e3, 0.0], [1.0, 1.0])])
    _, upper = far.entropy_bounds()
    draws = [far.log_prob({"weight": far.sample(seed)["weight"]}) for seed in range(400)]
    values = torch.stack(draws)
    # Five standard errors, as above.
    assert abs(float(values.mean()) + float(upper)) < 5 * float(values.std()) / 20


def test_the_elbo_is_the_mean_of_the_members_elbos():
    x, y = torch.ones(5, 2, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    mixture = make()
    objective = vprop.Objective(mixture.model, F.mse_loss, x, y)
    estimate = mixture.elbo_estimate(objective, 3000)
    own = [member.elbo_estimate(objective, 3000) for member in mixture.members]
    error = 5 * math.hypot(estimate.standard_error, *(e.standard_error / 3 for e in own))
    assert estimate.value == pytest.approx(sum(e.value for e in own) / 3, abs=error)
    assert estimate.kl == pytest.approx(sum(e.kl for e in own) / 3)


# -- draws ----------------------------------------------------------------------------------------------------------


def counts(mixture, num_samples, seed=0):
    """How many samples of a prediction each member has: they are told apart by means that are far from each other."""
    outputs = mixture.predict(torch.ones(1, 2, dtype=torch.float64), num_samples, seed).samples.flatten()
    nearest = (outputs[:, None] - torch.tensor([0.0, 1000.0, 2000.0])).abs().argmin(1)
    return [int((nearest == k).sum()) for k in range(3)]


@pytest.mark.parametrize(
    ("weights", "num_samples", "expected"),
    [
        (None, 30, [10, 10, 10]),
        (None, 3, [1, 1, 1]),
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([1.0, 0.0, 1.0], 6, [3, 0, 3]),
        ([2, 6, 4], 12, [2, 6, 4]),
    ],
)
def test_samples_are_shared_out_by_weight(weights, num_samples, expected):
    members = [gaussian([1000.0 * k, 0.0], [1.0, 1.0]) for k in range(3)]
    for seed in range(5):
        assert counts(Mixture(members, weights), num_samples, seed) == expected


def test_single_draws_come_from_all_members():
    members = [gaussian([1000.0 * k, 0.0], [1.0, 1.0]) for k in range(3)]
    mixture = Mixture(members, SHARES)
    for draw in (lambda seed: mixture.sample(seed), lambda seed: mixture.sample()):
        firsts = torch.stack([draw(seed)["weight"][0, 0] for seed in range(600)])
        shares = [float(((firsts - 1000 * k).abs() < 100).double().mean()) for k in range(3)]
        # Five standard errors of a share of 600: one false alarm in about 10⁶.
        assert all(
            abs(share - own) < 5 * math.sqrt(own * (1 - own) / 600) for share, own in zip(shares, SHARES, strict=True)
        )


def test_draws_of_members_differ_in_noise_too():
    mixture = Mixture([gaussian([0.0, 0.0], [1.0, 1.0])] * 2)
    outputs = mixture.predict(torch.eye(2, dtype=torch.float64), 8).samples.flatten(1)
    assert len({tuple(row.tolist()) for row in outputs}) == 8


def test_each_member_has_its_own_model_and_buffers():
    def member(value):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
        model[1].running_mean.fill_(value)
        return vprop.Vprop(model.parameters(), num_data=10).posterior(model)

    mixture = Mixture([member(0.0), member(1e6)])
    outputs = mixture.predict(torch.ones(2, 1), 4).samples[:, 0, 0]
    assert [float(value) < -1e5 for value in outputs] == [False, False, True, True]


# -- mixtures of other things, files -----------------------------------------------------------------------------------


def test_structures_mix_and_mixtures_are_unfolded():
    model = nn.Linear(2, 1, bias=False).double()
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    precision = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    full = FullPosterior(model, {"weight": torch.zeros(1, 2, dtype=torch.float64)}, precision, prior, ess=5.0)
    diagonal = gaussian([1.0, 1.0], [1.0, 1.0])
    whole = Mixture([Mixture([full, diagonal]), diagonal.prune(0.5)], [0.5, 0.5])
    assert [type(member).__name__ for member in whole.members] == [
        "FullPosterior",
        "DiagonalPosterior",
        "PrunedPosterior",
    ]
    assert whole.weights == [0.25, 0.25, 0.5]
    assert len(whole) == 3
    assert whole.predict(torch.ones(4, 2, dtype=torch.float64), 8).samples.shape == (8, 4, 1)


def test_saved_and_loaded(tmp_path):
    def member(seed, optimizer):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(float(seed))
        posterior = optimizer(model.parameters(), num_data=10, seed=seed)
        return posterior.posterior(model, likelihood="gaussian", noise_variance=torch.tensor([0.1, 0.2 + seed]))

    with torch.random.fork_rng():
        members = [member(0, vprop.Vprop), member(1, vprop.VON), member(2, vprop.Vprop)]
        mixture = Mixture(members, np.array([1, 1, 2], dtype=np.float32))  # whose numbers JSON has no form for
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mixture.save(tmp_path / "mixture.safetensors")
    loaded = vprop.load_posterior(tmp_path / "mixture.safetensors", model)
    assert isinstance(loaded, Mixture)
    assert loaded.weights == mixture.weights
    x = torch.ones(3, 2)
    assert torch.equal(loaded.predict(x, 10).samples, mixture.predict(x, 10).samples)
    assert torch.equal(loaded.predict(x, 10).variance, mixture.predict(x, 10).variance)
    torch.testing.assert_close(loaded.noise_variance, torch.tensor([0.1, 0.2 + 0.25 + 1.0]).double())
    assert torch.equal(loaded.log_prob(loaded.sample(1)), mixture.log_prob(mixture.sample(1)))
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="does not fit this model"):
        vprop.load_posterior(tmp_path / "mixture.safetensors", other)


def test_a_calibrated_noise_goes_wherever_the_mixture_goes(tmp_path):
    """fit_noise_scale changes the noise of the whole, and none of the members'."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)

    def member():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizer = vprop.Vprop(model.parameters(), num_data=10**6)
        return optimizer.posterior(model, likelihood="gaussian", noise_variance=1.0)

    with torch.random.fork_rng():
        mixture, model = Mixture([member(), member()]), member().model
    y = model(x).detach() + 0.3 * torch.randn(40, 1, generator=generator)
    calibrated = vprop.calibration.fit_noise_scale(mixture, x, y).posterior
    noise = calibrated.noise_variance
    assert noise < 0.9
    calibrated.save(tmp_path / "mixture.safetensors")
    loaded = vprop.load_posterior(tmp_path / "mixture.safetensors", model)
    scaled = vprop.calibration.fit_variance_scale(calibrated, x, y).posterior
    for other in (loaded, calibrated.last_layer("1"), scaled, Mixture([calibrated, calibrated])):
        assert other.noise_variance == pytest.approx(noise, rel=1e-12)
        assert other.scales.noise == calibrated.scales.noise
    assert Mixture([mixture, mixture.members[0]], [0.5, 0.5]).noise_variance == 1.0


def test_frozen_weights_that_differ_are_not_saved(tmp_path):
    def member(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return vprop.Vprop(model[1].parameters(), num_data=5).posterior(model, likelihood="gaussian")

    with torch.random.fork_rng():
        apart = Mixture([member(0), member(1)])
        alike = Mixture([member(0), member(0)])
    with pytest.raises(ValueError, match=r"'0\.weight' has no posterior and is not the same .* members 0 and 1"):
        apart.save(tmp_path / "apart.safetensors")
    assert not (tmp_path / "apart.safetensors").exists()
    alike.save(tmp_path / "alike.safetensors")
    loaded, x = vprop.load_posterior(tmp_path / "alike.safetensors", alike.model), torch.ones(3, 2)
    assert torch.equal(loaded.predict(x, 6).samples, alike.predict(x, 6).samples)


def regressor(noise):
    """Certain of its outputs, which are 0."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    return vprop.Vprop(model.parameters(), num_data=10**12).posterior(
        model, likelihood="gaussian", noise_variance=noise
    )


def quantile_of(noises, shares, q):
    """Where Σₖ πₖΦ(t/√vₖ) = q, by halving."""
    low, high = -100.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        below = sum(
            share * 0.5 * (1 + math.erf(middle / math.sqrt(2 * v))) for v, share in zip(noises, shares, strict=True)
        )
        low, high = (middle, high) if below < q else (low, middle)
    return low


def test_quantiles_are_of_observations_around_each_member_with_its_own_noise(tmp_path):
    noises, shares, x = (0.01, 1.0), (0.75, 0.25), torch.zeros(3, 1)
    mixture = Mixture([regressor(noise) for noise in noises], shares)
    expected = [quantile_of(noises, shares, q) for q in (0.05, 0.6, 0.995)]
    together = mixture.predict(x, 8)
    for prediction in (together, mixture.predict(x, 8, batch_size=2)):
        found = prediction.quantile([0.05, 0.6, 0.995])
        assert found[:, 2, 1].tolist() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(together.variance, torch.full((3, 2), 0.75 * 0.01 + 0.25))
    y = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    fit = vprop.calibration.fit_noise_scale(mixture, torch.zeros(200, 1), y, num_samples=8)
    fit.posterior.save(tmp_path / "mixture.safetensors")
    loaded = vprop.load_posterior(tmp_path / "mixture.safetensors", nn.Linear(1, 2, bias=False))
    for posterior in (fit.posterior, loaded, Mixture([fit.posterior])):
        found = posterior.predict(x, 8).quantile([0.05, 0.6, 0.995])
        scaled = [end * math.sqrt(fit.value) for end in expected]
        assert found[:, 0, 0].tolist() == pytest.approx(scaled, rel=1e-4)


@pytest.mark.parametrize("num_samples", [9, 10])
def test_draws_of_one_member_alone_have_its_noise(num_samples):
    """Of nine draws at weights of 9:1 all are of the first member."""
    prediction = Mixture([regressor(0.01), regressor(100.0)], [0.9, 0.1]).predict(torch.zeros(1, 1), num_samples)
    share = 1.0 if num_samples == 9 else 0.9
    expected = quantile_of((0.01, 100.0), (share, 1 - share), 0.75)
    assert float(prediction.quantile(0.75)[0, 0]) == pytest.approx(expected, rel=1e-4)


def test_a_noise_of_16_bits_is_scaled_in_full():
    wide = [torch.tensor([0.013, 0.2]).bfloat16().float(), torch.tensor([3.1, 0.7]).bfloat16().float()]
    ends = []
    y = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    for noises in (wide, [noise.bfloat16() for noise in wide]):
        mixture = Mixture([regressor(noise) for noise in noises])
        fit = vprop.calibration.fit_noise_scale(mixture, torch.zeros(200, 1), y, num_samples=8)
        ends.append(float(fit.posterior.predict(torch.zeros(1, 1), 8).quantile(0.9)[0, 0]))
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_a_noise_that_was_given_to_an_inner_mixture_is_that_of_its_draws(tmp_path):
    inner = Mixture([regressor(0.01), regressor(0.02)])
    inner.noise_variance = 0.25
    whole = Mixture([inner, regressor(4.0)])
    whole.save(tmp_path / "mixture.safetensors")
    loaded = vprop.load_posterior(tmp_path / "mixture.safetensors", nn.Linear(1, 2, bias=False))
    expected = quantile_of((0.25, 4.0), (0.5, 0.5), 0.9)
    for mixture in (whole, loaded):
        assert float(mixture.predict(torch.zeros(1, 1), 8).quantile(0.9)[0, 0]) == pytest.approx(expected, rel=1e-4)
    assert inner.members[0].noise_variance == 0.01


def test_a_noise_for_the_whole_is_that_of_every_draw():
    mixture, x = Mixture([regressor(0.01), regressor(1.0)]), torch.zeros(3, 1)
    one = mixture.predict(x, 8, noise_variance=0.25)
    mixture.noise_variance = 0.25
    for prediction in (one, mixture.predict(x, 8)):
        assert float(prediction.quantile(0.975)[0, 0]) == pytest.approx(0.5 * 1.959964, rel=1e-4)


def test_noises_of_members_for_each_output():
    mixture = Mixture([regressor(torch.tensor([0.01, 4.0])), regressor(1.0)])
    found = mixture.predict(torch.zeros(3, 1), 8).quantile(0.9)[0]
    expected = [quantile_of((first, 1.0), (0.5, 0.5), 0.9) for first in (0.01, 4.0)]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals():
    one = gaussian(MEANS[0], STDS[0])
    with pytest.raises(TypeError, match="must be a list of posteriors"):
        Mixture(one)
    with pytest.raises(ValueError, match="there are none"):
        Mixture([])
    with pytest.raises(TypeError, match="number 1 is a Linear"):
        Mixture([one, one.model])
    other = nn.Linear(3, 1, bias=False)
    another = vprop.Vprop(other.parameters(), num_data=5).posterior(other)
    with pytest.raises(ValueError, match=r"'weight' has shape \(1, 2\) in number 0 and \(1, 3\) in number 1"):
        Mixture([one, another])
    models = [nn.Sequential(nn.Linear(2, 2), kind(), nn.Linear(2, 1)) for kind in (nn.ReLU, nn.Tanh)]
    posteriors = [vprop.Vprop(model.parameters(), num_data=5).posterior(model) for model in models]
    with pytest.raises(ValueError, match="differ at '1', a ReLU in number 0"):
        Mixture(posteriors)
    with pytest.raises(ValueError, match="their likelihoods differ"):
        Mixture([one, gaussian(MEANS[0], STDS[0], likelihood="bernoulli")])
    for weights in ([1.0], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [1e308, 1e308], 3, {0: 9, 1: 1}, {3, 1}):
        with pytest.raises(ValueError, match="Invalid weights"):
            Mixture([one, one], weights)
    mixture = Mixture([one, one])
    for weights in (None, [1], torch.ones(2)):
        with pytest.raises(TypeError, match="must be a dict of tensors"):
            mixture.log_prob(weights)
    with pytest.raises(ValueError, match="a mixture is no Gaussian"):
        mixture.as_prior()
    for ask in (lambda: mixture.prune(0.5), lambda: mixture.sensitivity((torch.ones(1, 2), torch.ones(1, 1)))):
        with pytest.raises(TypeError, match="Ask the members of a mixture one by one"):
            ask()
    shifted = gaussian(MEANS[0], STDS[0])
    shifted.prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(3.0)})
    with pytest.raises(ValueError, match="another prior precision of 'weight'"):
        Mixture([one, shifted]).kl()
    correlated = gaussian(MEANS[0], STDS[0])
    correlated.prior = one.prior._replace(precision_matrix=torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
    with pytest.raises(ValueError, match="another prior precision matrix"):
        Mixture([one, correlated]).kl()


def test_sizes_that_differ_leave_no_elbo():
    mixture = Mixture([gaussian(MEANS[0], STDS[0]), gaussian(MEANS[0], STDS[0], ess=9.0)])
    assert mixture.ess is None
    objective = vprop.Objective(
        mixture.model, F.mse_loss, torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    )
    with pytest.raises(ValueError, match="or a mixture's members, have different num_data"):
        mixture.elbo(objective)

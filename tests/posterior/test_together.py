"""What can be asked of a posterior goes together: calibrated, pruned, mixed, of a last layer, linearised, saved."""

import pytest
import torch
from torch import nn

import vprop
from vprop.calibration import fit_temperature, fit_variance_scale
from vprop.posterior import Scales


def posterior(seed=0, full=False, classes=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (60,), generator=generator)
    make = vprop.VONG if full else vprop.Vprop
    optimizer = make(model.parameters(), lr=0.1, num_data=60, batch_size=60)
    objective = vprop.Objective(model, nn.functional.cross_entropy, x, y)
    for _ in range(5):
        optimizer.step(objective)
    return optimizer.posterior(model, likelihood="categorical")


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(9)
    return torch.randn(40, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (40,), generator=generator)


def with_temperature(q, temperature):
    """Logits divided by it, and nothing else."""
    import copy

    other = copy.copy(q)
    other.scales = Scales(temperature=temperature)
    return other


KINDS = {
    "diagonal": lambda: posterior(),
    "full": lambda: posterior(full=True),
    "pruned": lambda: posterior().prune(0.5),
    "pruned full": lambda: posterior(full=True).prune(0.3),
    "last layer": lambda: posterior().last_layer(),
    "pruned last layer": lambda: posterior().last_layer().prune(0.5),
    "mixture": lambda: vprop.Mixture([posterior(0), posterior(1, full=True)]),
    "mixture of last layers": lambda: vprop.Mixture([posterior(0), posterior(1)]).last_layer(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_divides_logits_however_they_are_predicted(kind, data):
    x, _ = data
    q = KINDS[kind]()
    calibrated = with_temperature(q, 2.0)
    loader = torch.utils.data.DataLoader(x, batch_size=16)
    plain = q.predict(x, 8).samples
    torch.testing.assert_close(calibrated.predict(x, 8).samples, plain / 2)
    torch.testing.assert_close(calibrated.predict(loader, 8).samples, plain / 2)
    if "mixture" not in kind:
        before, after = (each.predict(x, method="linearized") for each in (q, calibrated))
        torch.testing.assert_close(after.output_mean, before.output_mean / 2)
        torch.testing.assert_close(after.output_covariance, before.output_covariance / 4)


@pytest.mark.parametrize("kind", ["diagonal", "pruned", "pruned full", "mixture"])
def test_what_was_calibrated_is_saved(kind, data, tmp_path):
    x, y = data
    fit = fit_temperature(KINDS[kind](), x, y)
    assert fit.value != 1
    fit.posterior.save(tmp_path / "q.safetensors")
    loaded = vprop.load_posterior(tmp_path / "q.safetensors", fit.posterior.model)
    assert loaded.scales == fit.posterior.scales
    torch.testing.assert_close(loaded.predict(x, 8).samples, fit.posterior.predict(x, 8).samples)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixture of last layers"])
def test_a_scaled_variance_is_that_of_every_part(kind, data):
    q = KINDS[kind]()
    wider = q._with_variance_times(4.0)
    if kind == "mixture":
        for before, after in zip(q.members, wider.members, strict=True):
            for name, variance in before.variance.items():
                torch.testing.assert_close(after.variance[name], 4 * variance)
    else:
        for name, variance in q.variance.items():
            torch.testing.assert_close(wider.variance[name], 4 * variance)
    assert isinstance(fit_variance_scale(q, *data).value, float)


def test_a_mixture_of_calibrated_members_is_calibrated_alike_or_refused(data):
    x, _ = data
    members = [with_temperature(posterior(seed), 2.0) for seed in (0, 1)]
    plain = vprop.Mixture([posterior(seed) for seed in (0, 1)])
    mixed = vprop.Mixture(members)
    torch.testing.assert_close(mixed.predict(x, 8).samples, plain.predict(x, 8).samples / 2)
    assert vprop.Mixture([mixed, members[0]]).scales == Scales(temperature=2.0)
    with pytest.raises(ValueError, match=r"number 0 is calibrated with .*Calibrate the mixture"):
        vprop.Mixture([members[0], posterior(1)])
    with pytest.raises(ValueError, match="Calibrate the mixture"):
        vprop.Mixture([mixed, posterior(2)])


@pytest.mark.parametrize("full", [False, True])
def test_linearised_predictions_of_pruned_weights_have_their_covariance(full, data):
    x, _ = data
    q = posterior(full=full).prune(0.4)
    parameters = {name: mean.clone() for name, mean in q.mean.items()}
    jacobian = torch.func.jacrev(lambda weights: torch.func.functional_call(q.model, weights, x[:3]))(parameters)
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], -1)
    expected = rows @ q._covariance_times(rows.flatten(0, 1)).view_as(rows).mT
    torch.testing.assert_close(q.predict(x[:3], method="linearized").output_covariance, expected)


def test_what_has_no_answer_says_what_to_do_instead(data, tmp_path):
    mixture = vprop.Mixture([posterior(0), posterior(1)])
    with pytest.raises(ValueError, match=r"Linearise each of mixture\.members"):
        mixture.predict(data[0], method="linearized")
    with pytest.raises(ValueError, match=r"posterior.last_layer\(\).prune"):
        posterior().prune(0.5).last_layer()
    with pytest.raises(ValueError, match="Save that one, load it, and call last_layer"):
        mixture.last_layer().save(tmp_path / "q.safetensors")


def test_draws_of_a_mixture_are_those_of_its_models(data):
    x, _ = data
    mixture = vprop.Mixture([posterior(0), posterior(1), posterior(2)], [1, 2, 5])
    with torch.no_grad():
        apart = torch.stack([model(x) for model in mixture.sampled_models(7, seed=3)])
    torch.testing.assert_close(mixture.predict(x, 7, seed=3).samples, apart)
    assert [len(samples) for _, samples in mixture._shared_out(800, 0)] == [100, 200, 500]

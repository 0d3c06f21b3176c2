"""Forgetting: exact for linear regression, Newton's step elsewhere, and refused where nothing would be left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from tests.posterior import exact_regression as exact

GONE = torch.tensor([0, 3, 7])


def kept_rows():
    kept = torch.ones(exact.ROWS, dtype=torch.bool)
    kept[GONE] = False
    return kept


@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("outputs", [1, 2])
def test_linear_regression_forgets_exactly(temperature, outputs):
    x, y = exact.make_rows(outputs=outputs)
    posterior = exact.make_posterior(x, y, temperature)
    before = posterior.mean["weight"].clone()
    forgotten = posterior.forget((x[GONE], y[GONE]))
    mean, precision = exact.normal_equations(x[kept_rows()], y[kept_rows()], temperature)
    torch.testing.assert_close(forgotten.mean["weight"], mean.T, rtol=1e-9, atol=1e-12)
    whole = torch.kron(torch.eye(outputs, dtype=torch.float64), precision)
    torch.testing.assert_close(forgotten.precision, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(forgotten.covariance, torch.linalg.inv(whole), rtol=1e-8, atol=1e-12)
    assert forgotten.ess == pytest.approx((exact.ROWS - 3) / temperature)
    assert torch.equal(posterior.mean["weight"], before)
    assert posterior.ess == exact.ROWS / temperature


def test_it_is_exact_wherever_the_mean_is():
    """What is subtracted are natural parameters, so a posterior that is not at its optimum forgets the same rows."""
    x, y = exact.make_rows()
    posterior = exact.make_posterior(x, y)
    posterior.mean["weight"] += 0.5
    forgotten = posterior.forget((x[GONE], y[GONE]))
    shift = posterior.precision @ torch.full((3,), 0.5, dtype=torch.float64)
    mean, precision = exact.normal_equations(x[kept_rows()], y[kept_rows()])
    expected = mean[:, 0] + torch.linalg.solve(precision, shift)
    torch.testing.assert_close(forgotten.mean["weight"][0], expected, rtol=1e-9, atol=1e-12)


def test_in_parts_and_at_once():
    x, y = exact.make_rows()
    posterior = exact.make_posterior(x, y)
    at_once = posterior.forget(DataLoader(TensorDataset(x[GONE], y[GONE]), batch_size=2))
    in_turn = posterior.forget((x[GONE[:1]], y[GONE[:1]])).forget((x[GONE[1:]], y[GONE[1:]]))
    torch.testing.assert_close(in_turn.mean["weight"], at_once.mean["weight"], rtol=1e-9, atol=1e-12)
    assert in_turn.ess == pytest.approx(at_once.ess)


def test_trained_by_an_optimizer():
    """VON's posterior of all rows forgets some, and is VON's posterior of the others."""
    x, y = exact.make_rows()
    posteriors = []
    for rows in (torch.ones(exact.ROWS, dtype=torch.bool), kept_rows()):
        model = nn.Linear(exact.COLUMNS, 1, bias=False).double()
        optimizer = vprop.VON(
            model.parameters(),
            lr=1.0,
            mc_samples=0,
            num_data=int(rows.sum()),
            betas=(0.0, 0.0),
            prior_precision=exact.PRIOR,
            temperature=0.5,
        )
        optimizer.step(vprop.Objective(model, exact.loss(), x[rows], y[rows]))
        posteriors.append(optimizer.posterior(model, likelihood="gaussian", noise_variance=exact.NOISE))
    forgotten = posteriors[0].forget((x[GONE], y[GONE]))
    # The likelihood keeps its noise in float32, hence no more digits.
    torch.testing.assert_close(forgotten.mean["weight"], posteriors[1].mean["weight"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(forgotten.covariance, posteriors[1].covariance, rtol=1e-6, atol=1e-8)
    assert forgotten.ess == pytest.approx(posteriors[1].ess)


def test_a_diagonal_posterior_loses_the_diagonal():
    """With features that are orthogonal in the rows that stay and in those that go it is exact, too."""
    x = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    y = torch.arange(12, dtype=torch.float64)[:, None] / 5
    rest = torch.arange(12) >= 3
    prior = vprop.GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(exact.PRIOR)})

    def posterior_of(rows):
        mean, precision = exact.normal_equations(x[rows], y[rows])
        variance = {"weight": 1 / precision.diagonal()[None]}
        model = nn.Linear(3, 1, bias=False).double()
        rest = {"ess": float(rows.sum()), "likelihood": "gaussian", "noise_variance": exact.NOISE}
        return vprop.posterior.DiagonalPosterior(model, {"weight": mean.T.contiguous()}, variance, prior, **rest)

    forgotten, expected = posterior_of(rest | ~rest).forget((x[:3], y[:3])), posterior_of(rest)
    torch.testing.assert_close(forgotten.mean["weight"], expected.mean["weight"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(forgotten.variance["weight"], expected.variance["weight"], rtol=1e-9, atol=1e-12)
    assert forgotten.ess == expected.ess


def test_a_forgotten_posterior_is_saved_and_predicts(tmp_path):
    x, y = exact.make_rows()
    forgotten = exact.make_posterior(x, y).forget((x[GONE], y[GONE]))
    forgotten.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", forgotten.model)
    assert torch.equal(loaded.predict(x).samples, forgotten.predict(x).samples)


def test_one_example_is_what_sensitivity_says():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = nn.Linear(4, 3).double(), torch.randn(30, 4, dtype=torch.float64), torch.randint(3, (30,))
    optimizer = vprop.VON(model.parameters(), lr=1.0, num_data=30, betas=(0.0, 0.5))
    for _ in range(20):
        optimizer.step(vprop.Objective(model, F.cross_entropy, x, y))
    posterior = optimizer.posterior(model, likelihood="categorical")
    result = posterior.sensitivity((x, y))
    forgotten = posterior.forget((x[4:5], y[4:5]))

    def output(q):
        return F.linear(x[4], q.mean["weight"], q.mean["bias"])

    torch.testing.assert_close(output(forgotten) - output(posterior), result.prediction_change[4])


def test_refusals():
    x, y = exact.make_rows()
    posterior = exact.make_posterior(x, y)
    with pytest.raises(ValueError, match="all of the posterior's effective sample size"):
        posterior.forget((x, y))
    strangers = torch.full((1, exact.COLUMNS), 100.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"would not be positive definite .*Were they part of its training data"):
        posterior.forget((strangers, strangers[:, :1]))
    model = nn.Linear(exact.COLUMNS, 1).double()
    diagonal = vprop.Vprop(model.parameters(), num_data=10).posterior(model, likelihood="gaussian")
    with pytest.raises(ValueError, match="would not be positive for 3 weights"):
        diagonal.forget((strangers, strangers[:, :1]))
    with pytest.raises(ValueError, match="there are no examples"):
        posterior.forget([])
    with pytest.raises(TypeError, match="Ask the members of a mixture"):
        vprop.Mixture([posterior, posterior]).forget((x[GONE], y[GONE]))


def test_structures_that_cannot_forget_say_who_can():
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "structure": "eigenbasis"}, {"params": [model.bias]}]
    composed = vprop.Vario(groups, num_data=10, batch_size=2).posterior(model, likelihood="gaussian")
    pruned = vprop.Vprop(model.parameters(), num_data=10).posterior(model, likelihood="gaussian").prune(0.5)
    data = (torch.ones(1, 2), torch.ones(1, 1))
    with pytest.raises(TypeError, match=r"forget\(\): a ComposedPosterior .*: posterior\.parts\[name\]\.forget\("):
        composed.forget(data)
    with pytest.raises(TypeError, match=r"prune\(\): a ComposedPosterior .*: posterior\.parts\[name\]\.prune\("):
        composed.prune(0.5)
    with pytest.raises(TypeError, match=r"before it is pruned: posterior\.forget\(\.\.\.\), then prune\("):
        pruned.forget(data)

"""torch.set_default_device is the user's: what we make lies beside the tensors that it belongs to, whatever it is."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils._device import _device_constructors

import vprop
from tests.harness import assert_same_run, make_batch, train
from tests.table import cases
from vprop import metrics
from vprop.baselines import ExtendedKalmanFilter, OnlineNaturalGradient, RegularizedNaturalGradient, exact_vi_logistic

SOURCE = pathlib.Path(vprop.__file__).parent
FACTORIES = {function.__name__ for function in _device_constructors()}


@pytest.fixture
def elsewhere():
    """What set_default_device does, for the time of a test: tensors without a device of their own hold nothing."""
    return torch.device("meta")


def calls_without_device(path):
    """All calls of torch's factories that leave the device to the default."""
    for node in ast.walk(ast.parse(path.read_text())):
        function = node.func if isinstance(node, ast.Call) else None
        of_torch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        makes = of_torch and function.value.id == "torch" and function.attr in FACTORIES
        if makes and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_factory_is_given_a_device():
    """In the library; the laboratory's programs are run by themselves."""
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "lab"]
    assert len(files) > 80
    assert [call for path in files for call in calls_without_device(path)] == []


def test_the_search_finds_a_factory_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_default_device.SOURCE", tmp_path)
    (tmp_path / "one.py").write_text("torch.zeros(2)\ntorch.zeros(2, device='cpu')\ntorch.zeros_like(x)\n")
    assert list(calls_without_device(tmp_path / "one.py")) == ["one.py:1: torch.zeros(2)"]


class Elsewhere:
    """An optimizer whose samples and steps are made while another device is the default."""

    def __init__(self, make, device):
        self.make, self.device = make, device

    def __call__(self, params, **arguments):
        with self.device:
            optimizer = self.make(params, **arguments)
        own = optimizer.step

        def step(closure):
            with self.device:
                return own(closure)

        optimizer.step = step
        return optimizer


IMPLEMENTATIONS = [None, True, False]


@pytest.mark.parametrize("foreach", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", cases())
def test_training_is_the_same_with_another_default_device(case, foreach, elsewhere):
    def here(params, **arguments):
        return case(params, foreach=foreach, **arguments)

    assert_same_run(train(here, steps=2), train(Elsewhere(here, elsewhere), steps=2))


@pytest.mark.parametrize("case", cases(first_only=True))
def test_the_posterior_answers_with_another_default_device(case, elsewhere, tmp_path):
    model, optimizer = train(case, steps=2)
    x, y = make_batch()
    objective = vprop.Objective(model, F.cross_entropy, x, y)

    def answers():
        posterior = optimizer.posterior(model, likelihood="categorical")
        prediction = posterior.predict(x, num_samples=3)
        posterior.save(tmp_path / "posterior.safetensors")
        again = vprop.load_posterior(tmp_path / "posterior.safetensors", model)
        return [
            posterior.sample(seed=1)["0.weight"],
            posterior.variance["0.weight"],
            posterior.kl(),
            posterior.entropy(),
            posterior.elbo(objective, num_samples=2),
            posterior.log_prob(posterior.mean),
            prediction.probs,
            prediction.mutual_information,
            again.mean["0.weight"],
            vprop.merge([posterior, again]).mean["0.weight"],
            *posterior.as_prior()["prior_mean"],
        ]

    expected = answers()
    with elsewhere:
        found = answers()
        optimizer.diagnose()
        optimizer.load_state_dict(optimizer.state_dict())
        with optimizer.sampled_params(train=False):
            pass
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference)


def test_likelihoods_and_metrics_with_another_default_device(elsewhere):
    mean, y = torch.linspace(0, 1, 10), torch.linspace(0.1, 1, 10)
    probs, labels = torch.full((10, 2), 0.5), torch.arange(10) % 2

    def scores():
        return [
            metrics.gaussian_nll(mean, 0.5, y),
            metrics.coverage(mean, 0.5, y, level=0.9),
            metrics.expected_calibration_error(probs, labels),
            metrics.nll(probs, labels),
        ]

    expected = scores()
    with elsewhere:
        assert scores() == expected
        assert vprop.likelihood.GaussianLikelihood(0.25).log_noise_variance.device.type == "meta"
        given = torch.tensor(0.25, device="cpu")
        assert vprop.likelihood.GaussianLikelihood(given).log_noise_variance.device.type == "cpu"


def test_baselines_with_another_default_device(elsewhere):
    x, _ = make_batch()
    labels = torch.arange(len(x)) % 2
    model = torch.nn.Linear(4, 1)
    settings, target = {"prior_precision": 1.0, "likelihood": "bernoulli"}, labels[:1, None].double()
    with elsewhere:
        exact_vi_logistic(x, labels, 1.0)
        exact_vi_logistic(x.numpy(), labels.numpy(), 1.0, structure="full")
        ExtendedKalmanFilter(model, **settings).update(x[:1], target)
        OnlineNaturalGradient(model, **settings).update(x[:1], target)
        RegularizedNaturalGradient(model, num_data=10, **settings).update(x[:1], target)

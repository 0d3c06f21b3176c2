"""Posteriors through safetensors files."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

import vprop
from tests.harness import make_batch, make_model, train
from vprop import Vprop


def test_round_trip(tmp_path):
    model, optimizer = train(Vprop, model=make_model(), num_data=200, temperature=0.5)
    posterior = optimizer.posterior(model, likelihood="categorical")
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", make_model(seed=9))
    for name in posterior.mean:
        assert torch.equal(loaded.mean[name], posterior.mean[name])
        assert torch.equal(loaded.variance[name], posterior.variance[name])
    x, _ = make_batch()
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    assert torch.equal(loaded.sample()["0.bias"], posterior.sample()["0.bias"])
    assert loaded.kl() == posterior.kl()
    assert loaded.ess == posterior.ess == 400.0


def test_buffers_noise_and_priors_per_weight_travel_too(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model(make_batch()[0] * 3)
    precisions = [torch.rand_like(p) + 1 for p in model.parameters()]
    optimizer = Vprop(model.parameters(), num_data=200, prior_precision=precisions)
    posterior = optimizer.posterior(model, likelihood="gaussian", noise_variance=torch.tensor([0.1, 0.2, 0.3]))
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    x, _ = make_batch()
    assert torch.equal(loaded.predict(x).variance, posterior.predict(x).variance)
    assert loaded.kl() == posterior.kl()


def small_network():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_a_model_in_another_precision(tmp_path):
    model, (x, _) = small_network(), make_batch()
    posterior = Vprop(model.parameters(), num_data=200).posterior(model)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", small_network().double())
    outputs, expected = loaded.predict(x.double()).samples, posterior.predict(x).samples.double()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)  # as float32 rounds


def test_a_model_on_the_meta_device(tmp_path):
    model, (x, _) = small_network(), make_batch()
    with torch.device("meta"):
        empty = small_network()
    posterior = Vprop(model.parameters(), num_data=200).posterior(model)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", empty)
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    Vprop(model[0].parameters(), num_data=200).posterior(model).save(tmp_path / "posterior.safetensors")
    with pytest.raises(ValueError, match=r"does not have the parameter '1\.weight', and the model has it on the meta"):
        vprop.load_posterior(tmp_path / "posterior.safetensors", empty)


@pytest.mark.parametrize("noise", [np.float32(0.5), np.array([0.5, 0.25, 0.125]), [0.5, 0.25, 0.125]])
def test_noise_that_is_no_tensor_travels_too(tmp_path, noise):
    model = nn.Linear(4, 3)
    posterior = Vprop(model.parameters(), num_data=200).posterior(model, likelihood="gaussian", noise_variance=noise)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", model)
    assert torch.equal(torch.as_tensor(loaded.noise_variance * 2), torch.as_tensor(noise) * 2)


def test_another_model_is_an_error(tmp_path):
    model, optimizer = train(Vprop, num_data=200)
    optimizer.posterior(model).save(tmp_path / "posterior.safetensors")
    with pytest.raises(ValueError, match=r"does not fit .* '0\.bias' of shape \(8,\), the model has \(7,\)"):
        vprop.load_posterior(tmp_path / "posterior.safetensors", nn.Sequential(nn.Linear(4, 7)))
    with pytest.raises(ValueError, match=r"the model has no such parameter"):
        vprop.load_posterior(tmp_path / "posterior.safetensors", nn.Linear(4, 7))


def test_another_file_is_an_error(tmp_path):
    import safetensors.torch

    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a posterior of this library"):
        vprop.load_posterior(tmp_path / "other.safetensors", make_model())
    with pytest.raises(FileNotFoundError):
        vprop.load_posterior(tmp_path / "missing.safetensors", make_model())


@pytest.mark.parametrize("package", ["safetensors", "numpy"])
def test_without_a_package_that_it_needs(tmp_path, monkeypatch, package):
    model, optimizer = train(Vprop, num_data=200)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {package}: pip install {package}"):
        optimizer.posterior(model).save(tmp_path / "posterior.safetensors")

"""Outputs of a calibrated posterior: samples and moments are scaled alike."""

from __future__ import annotations

import pytest
import torch

from vprop import GaussianLikelihood
from vprop.posterior.calibrated import Scales, scaled_moments, scaled_outputs

SCALES = Scales(temperature=1.7, noise=2.5, variance=3.0)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian", "heteroscedastic", None])
def test_moments_are_those_of_scaled_samples(likelihood):
    samples = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = scaled_outputs(samples, likelihood, SCALES)
    mean, covariance = scaled_moments(samples.mean(0), samples.T.cov(), likelihood, SCALES)
    torch.testing.assert_close(mean, scaled.mean(0))
    torch.testing.assert_close(covariance, scaled.T.cov())


def test_what_each_likelihood_scales():
    outputs = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(scaled_outputs(outputs, "categorical", SCALES), outputs / 1.7)
    assert scaled_outputs(outputs, "gaussian", SCALES) is outputs
    assert scaled_outputs(outputs, GaussianLikelihood(0.5), SCALES) is outputs
    mean, log_variance = scaled_outputs(outputs, "heteroscedastic", SCALES)[0]
    assert float(mean) == 2.0
    torch.testing.assert_close(log_variance.exp(), 2.5 * outputs[0, 1].exp())
    assert scaled_outputs(outputs, "categorical", Scales(noise=3.0)) is outputs

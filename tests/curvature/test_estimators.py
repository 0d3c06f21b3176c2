"""What each estimator is unbiased for, on a quadratic where it is known, and how it folds."""

from __future__ import annotations

import math

import pytest
import torch

from vprop.curvature import AntitheticSpread, Evidence, SampleSpread, SquaredGradient

ESS = 50.0


def fold_all(estimator, gradients):
    folded = None
    for grad in gradients:
        folded = estimator.fold(folded, Evidence(grad.clone()))
    return folded


@pytest.mark.parametrize("estimator", [SquaredGradient(), SampleSpread(), AntitheticSpread()])
def test_folding_equals_the_formula_on_all_samples_at_once(estimator):
    gradients = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    folded = fold_all(estimator, gradients)
    expected = {
        SquaredGradient: gradients.square().mean(0),
        SampleSpread: gradients.var(0, unbiased=True),
        AntitheticSpread: ((gradients[0::2] - gradients[1::2]) / 2).square().mean(0),
    }[type(estimator)]
    torch.testing.assert_close(folded.grad, gradients.mean(0))
    torch.testing.assert_close(estimator.hess(folded, ESS), ESS * expected)


@pytest.mark.parametrize("estimator", [SampleSpread(), AntitheticSpread()])
def test_a_spread_far_smaller_than_the_gradient_survives_float32(estimator):
    """Gradients 1000 ± 1e-3: the difference of mean squares would be all rounding."""
    spread = 1e-3 * torch.tensor([[1.0], [-1.0]])
    hess = estimator.hess(fold_all(estimator, 1000 + spread), 1.0)
    exact = ((1000 + spread)[0] - (1000 + spread)[1]).square() / (2 if isinstance(estimator, SampleSpread) else 4)
    torch.testing.assert_close(hess, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("estimator", "antithetic", "bias_counts"),
    [(SquaredGradient(), False, True), (SampleSpread(), False, False), (AntitheticSpread(), True, False)],
)
def test_expectation_on_a_quadratic(estimator, antithetic, bias_counts):
    """Mean loss ½(θ−c)ᵀH(θ−c) with a mini-batch error b on the gradient, common to the samples of one step.

    E[ĥⱼ] = ess·Σₖ Hⱼₖ²σₖ², plus ess·(E ĝⱼ)² and ess·Var bⱼ for the squared gradient. 20,000 steps of two samples;
    5 standard errors for each of 3 elements: a false alarm about once in 600,000 runs.
    """
    generator = torch.Generator().manual_seed(3)
    steps = 20_000
    hess = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
    std = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
    mean_gradient = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64)
    batch_std = 0.3
    batch_error = batch_std * torch.randn(steps, 3, generator=generator, dtype=torch.float64)
    eps = torch.randn(2, steps, 3, generator=generator, dtype=torch.float64)
    if antithetic:
        eps[1] = -eps[0]
    gradients = mean_gradient + batch_error + (eps * std) @ hess
    estimates = estimator.hess(fold_all(estimator, gradients), ESS)
    expected = hess.square() @ std.square()
    if bias_counts:
        expected = expected + mean_gradient.square() + batch_std**2
    error = estimates.std(0) / math.sqrt(steps)
    assert ((estimates.mean(0) - ESS * expected).abs() < 5 * error).all()

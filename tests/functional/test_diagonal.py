"""The formulas of the diagonal step, one at a time."""

from __future__ import annotations

import pytest
import torch

from vprop.functional import diagonal

FLAT = {"betas": (0.0, 0.9), "damping": 0.0, "prior_mean": 0.0, "clip_radius": float("inf")}


def test_variance_is_the_papers():
    """1/(ess·(h+δ)) = 1/(s+λ) with s = N·h."""
    hess = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    num_data, prior_precision = 50.0, 3.0
    ours = diagonal.variance(hess, num_data, prior_precision / num_data)
    torch.testing.assert_close(ours, 1 / (num_data * hess + prior_precision))
    noise = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(diagonal.perturbation(hess, noise, num_data, prior_precision / num_data), ours.sqrt())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["grad", "hess_estimate"])
def test_an_unusable_element_is_left_out(bad, where):
    mean, hess, momentum = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 0.5)
    inputs = {"grad": torch.ones(3), "hess_estimate": torch.ones(3)}
    inputs[where][1] = bad
    new = diagonal.natural_gradient_step(
        mean, hess, momentum, **inputs, step=1, lr=0.1, **(FLAT | {"betas": (0.5, 0.9)})
    )
    assert int(new.unusable) == 1
    assert (new.mean[1], new.hess[1], new.momentum[1]) == (1.0, 2.0, 0.5)
    assert (new.mean != 1.0).tolist() == [True, False, True]


def test_rmsprop_in_the_limit():
    """Without sampling and prior, h/ess is RMSprop's square_avg, and dividing by its root is RMSprop's step.

    The same gradients go to torch's RMSprop and to our step. RMSprop's average starts at 0, so h does too. Our own
    step divides by h, RMSprop's by √(square_avg) + eps: replacing that denominator is the whole difference.
    """
    generator = torch.Generator().manual_seed(0)
    ess, lr, beta2, eps = 100.0, 0.01, 0.95, 1e-8
    weight = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    rmsprop = torch.optim.RMSprop([weight], lr=lr, alpha=beta2, eps=eps)
    mean, hess = weight.detach().clone(), torch.zeros(6, dtype=torch.float64)
    for step in range(1, 21):
        grad = torch.randn(6, generator=generator, dtype=torch.float64)
        weight.grad = grad.clone()
        rmsprop.step()
        new = diagonal.natural_gradient_step(
            mean, hess, None, grad, ess * grad.square(), step=step, lr=lr, **(FLAT | {"betas": (0.0, beta2)})
        )
        hess = new.hess
        newton_direction = (mean - new.mean) / lr * hess  # our step with its denominator taken out: ĝ
        mean = mean - lr * newton_direction / ((hess / ess).sqrt() + eps)
        torch.testing.assert_close(hess / ess, rmsprop.state[weight]["square_avg"], rtol=1e-12, atol=0)
        torch.testing.assert_close(mean, weight.detach(), rtol=1e-10, atol=1e-12)

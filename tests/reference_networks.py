"""Naive float64 numpy transcription of what goes beyond the paper for mini-batches and networks.

With ĝ the gradient of the mean loss of M examples, ess = N/τ, δ = λ/ess:

    floor:       f = max(hess_floor, 1/(ess·(κ·rms)²)),  σ² = 1/(ess·max(h+δ, f)),  rms of the weights μ, at least 1e-3
    curvature:   ĥ = M·ĝ² (squared gradient), or ĝ·ε/σ (Price)
    average:     all values so far, the start included with the weight w₀·β₂ᵗ, divided by the sum of their weights
    step:        μ ← μ − lr·(m̂ + δμ)/max(h+δ, f), or with the root of h: μ ← μ − lr·(m̂ + δμ)/√(h/M + δ²(μ²+σ²)),
                 or with the identity: μ ← μ − lr·(m̂ + δμ)
"""

import numpy as np


class NaiveForNetworks:
    """One parameter vector, one sample per step. The size of the weights is looked at in every sixteenth step."""

    def __init__(self, mean, *, num_data, lr, betas, batch_size, prior_precision=1.0, temperature=1.0, hess_init=1.0,
                 init_steps=None, hess_floor=0.0, noise_limit=np.inf, preconditioner="precision",
                 price=False):  # fmt: skip
        self.mean = np.array(mean, dtype=np.float64)
        self.ess = num_data / temperature
        self.delta = prior_precision / self.ess
        self.lr, (self.beta1, self.beta2), self.M = lr, betas, batch_size
        self.weights = [1.0 if init_steps is None else min(1.0, init_steps * (1 - self.beta2))]
        self.values = [hess_init * np.ones_like(self.mean)]
        self.gradients = []
        self.hess_floor, self.noise_limit = hess_floor, noise_limit
        self.preconditioner, self.price = preconditioner, price
        self.rms = None

    @property
    def hess(self):
        if sum(self.weights) == 0:
            return self.values[0]
        return sum(w * v for w, v in zip(self.weights, self.values, strict=True)) / sum(self.weights)

    @property
    def floor(self):
        relative = 1 / (self.ess * (self.noise_limit * max(self.rms, 1e-3)) ** 2)
        return max(self.hess_floor, relative)

    @property
    def sigma(self):
        return 1 / np.sqrt(self.ess * np.maximum(self.hess + self.delta, self.floor))

    def step(self, grad_mean_loss, noise):
        if len(self.gradients) % 16 == 0:
            self.rms = np.sqrt(np.mean(self.mean**2))
        sigma = self.sigma
        gradient = grad_mean_loss(self.mean + sigma * noise)
        estimate = gradient * noise / sigma if self.price else self.M * gradient**2
        self.gradients.append(gradient)
        self.weights = [self.beta2 * w for w in self.weights] + [1 - self.beta2]
        self.values.append(estimate)
        t = len(self.gradients)
        momentum = sum((1 - self.beta1) * self.beta1 ** (t - 1 - i) * g for i, g in enumerate(self.gradients))
        top = momentum / (1 - self.beta1**t) + self.delta * self.mean
        if self.preconditioner == "identity":
            bottom = 1.0
        elif self.preconditioner == "root":
            prior = self.delta**2 * (self.mean**2 + self.sigma**2)
            bottom = np.sqrt(np.maximum(self.hess, 0) / self.M + prior) + 1e-8
        else:
            bottom = np.maximum(self.hess + self.delta, self.floor)
        self.mean = self.mean - self.lr * top / bottom
